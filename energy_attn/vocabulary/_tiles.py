"""Statistics with `reproducible=True`, from the logits of tiles of tokens."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from energy_attn.kernels.internal import lse_dtype, safe_shift

from ..functional._by_rows import by_rows
from ._evaluate import OutputLayer, evaluate, spread, static_layer, with_nan
from ._parallel import plan_of
from ._statistics import Asked, LayerStatistics


def of_tiles(layers: tuple[OutputLayer, ...], f: Callable[..., Any], *arrays: Array | None) -> Any:
    """`f(scores, *arrays)` with the logits `[tokens, V]` of each layer, a result for each token."""
    plans = [plan_of(x.parallel, x.hidden, x.weight) for x in layers]
    if any(x and x.local and x.words for x in plans):
        raise NotImplementedError(
            "reproducible: wanted False inside a jax.shard_map over words, got True"
        )
    shape = layers[0].hidden.shape[:-1]
    rows = math.prod(shape[:-1]), shape[-1] if shape else 1

    def flat(x: Array) -> Array:
        return x.reshape(*rows, *x.shape[len(shape) :])

    def of_tile(is_token: Array, tokens: list[Any], arrays: PyTree) -> Any:
        scores = [_logits(layer, is_token, *x) for layer, x in zip(layers, tokens, strict=True)]
        result = f(*jax.tree.map(lambda x: x[0], (scores, arrays)))
        return jax.tree.map(lambda x: x[None], result)

    tokens = [(x.hidden, *(spread(y, shape) for y in (x.scale, x.temperature))) for x in layers]
    result = by_rows(of_tile, *jax.tree.map(flat, (jnp.ones(shape, bool), tokens, arrays)))
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[2:]), result)


def measure(
    layers: tuple[OutputLayer, ...], asked: Asked, label: Array | None = None
) -> LayerStatistics:
    """Statistics of each token; NaN as the logit of a label that is no word."""
    if layers[0].reproducible:
        found = of_tiles(layers, lambda scores, x: tile_statistics(scores, asked, x[0]), label)
    else:
        found = evaluate(layers, lambda local: local.statistics(asked), label)
    return with_nan(found, layers[0].vocab_size, label)


def _logits(
    layer: OutputLayer, is_token: Array, hidden: Array, scale: Any, temperature: Any
) -> Array:
    dtype = static_layer(layer).dtype
    out, axes = lse_dtype(dtype), (((2,), (1,)), ((), ()))
    x, weight = (y.astype(dtype) for y in (hidden, layer.weight))
    result = lax.dot_general(x, weight, axes, preferred_element_type=out)
    if scale is not None:
        result = result * scale[..., None].astype(out)
    if layer.bias is not None:
        result = result + layer.bias.astype(out)
    if layer.soft_cap is not None:
        result = layer.soft_cap * jnp.tanh(result / layer.soft_cap)
    if temperature is not None:
        # a tile is padded with tokens of zeros, whose gradients would be NaN
        factor = jnp.where(is_token, temperature.astype(out), 1.0)
        result = result / factor[..., None]
    return result if layer.mask is None else jnp.where(layer.mask, result, -jnp.inf)


def tile_statistics(scores: list[Array], asked: Asked, label: Array | None) -> LayerStatistics:
    """The statistics of the logits of a tile."""
    logs, first = [log_probabilities(s) for s in scores], scores[0]
    means = []
    for i, j in asked.pairs:
        terms = jnp.where(jnp.isneginf(scores[i]), 0.0, jnp.exp(logs[i]) * logs[j])
        # a word that j hides and i allows
        misses = jnp.isneginf(scores[j]) & ~jnp.isneginf(scores[i])
        means.append(jnp.where(misses.any(-1), -jnp.inf, terms.sum(-1)))
    at = None
    if label is not None:
        place = jnp.clip(label, 0, first.shape[1] - 1)
        at = jnp.take_along_axis(first, place[:, None], -1)[:, 0]
    return LayerStatistics(
        tuple(_log_partition(s) for s in scores),
        tuple(means),
        at if asked.label else None,
        jnp.where(jnp.isneginf(first), 0.0, first).sum(-1) if asked.total else None,
        first.argmax(-1).astype(jnp.int32) if asked.mode else None,
        None,
    )


def _log_partition(scores: Float[Array, "T V"]) -> Float[Array, " T"]:
    top = safe_shift(lax.stop_gradient(scores.max(-1)))
    total = jnp.exp(scores - top[:, None]).sum(-1)
    return jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)


def top_k(scores: list[Array], k: int) -> tuple[Array, Array]:
    """The log-probabilities of the likeliest words of a tile, and these words."""
    words = lax.top_k(lax.stop_gradient(scores[0]), k)[1]
    chosen = jnp.take_along_axis(scores[0], words, -1)
    return chosen - _log_partition(scores[0])[:, None], words


def log_probabilities(scores: Float[Array, "T V"]) -> Float[Array, "T V"]:
    """Log-probabilities, 0 for a word that is hidden."""
    lse = safe_shift(_log_partition(scores))[:, None]
    hidden = jnp.isneginf(scores)
    return jnp.where(hidden, 0.0, jnp.where(hidden, 0.0, scores) - lse)


def mixture_divergence(scores: list[Array]) -> Array:
    """Half of the divergences of two distributions from their mean."""
    logs, hidden = map(log_probabilities, scores), [jnp.isneginf(s) for s in scores]
    p, q = (jnp.where(x, 0.0, jnp.exp(log)) for x, log in zip(hidden, logs, strict=True))
    mean = (p + q) / 2
    safe = jnp.where(mean > 0, mean, 1.0)
    terms = (jnp.where(x > 0, x * jnp.log(jnp.where(x > 0, x, 1.0) / safe), 0.0) for x in (p, q))
    first, second = terms
    return 0.5 * (first + second).sum(-1)


def ordered_sum(x: Array) -> Float[Array, ""]:
    """The sum of all entries, added in pairs: XLA chooses no order."""
    x = x.reshape(-1)
    x = jnp.pad(x, (0, (1 << max(len(x) - 1, 0).bit_length()) - len(x)))
    while len(x) > 1:
        x = x[0::2] + x[1::2]
    return x[0]
