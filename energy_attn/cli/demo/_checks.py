"""The checks of the demo: attention in float64 NumPy, the predicted communication, and the loss on the text."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from ...models import Llama, LlamaConfig
from ...models.decoder._cache import Trace
from ._decode import CacheContent, kernels

_EPS = float(np.finfo(np.float32).eps)


def float64_attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    r"""$F = \log\sum_a e^{q \cdot k_a / \sqrt{H}}$ and $\nabla F = \sum_a P_a v_a$, by definition.

    Args:
        query: `[T, N, H]`.
        key: `[S, K, H]`; query head `n` reads key head `n // (N / K)`.
        value: `[S, K, H]`.
        seen: `[T, S]`, True where a key takes part.

    Returns:
        `out` `[T, N, H]`, `energy` `[T, N]` and the scores `[N, T, S]`, all float64.
    """
    heads = query.shape[1] // key.shape[1]
    key, value = (np.repeat(x.astype(np.float64), heads, axis=1) for x in (key, value))
    query = query.astype(np.float64) / np.sqrt(query.shape[-1])
    scores = np.matmul(query.transpose(1, 0, 2), key.transpose(1, 2, 0))
    scores = np.where(seen, scores, -np.inf)
    highest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    out = np.matmul(weights / total, value.transpose(1, 0, 2))
    return out.transpose(1, 0, 2), (highest + np.log(total))[..., 0].T, scores


def errors(trace: Trace, cache_content: CacheContent, first: int) -> list[tuple[float, float]]:
    """The largest error of an energy and of an output, each with the error that rounding allows."""
    query, outs, energies = (np.asarray(x)[:, 0] for x in trace)
    steps = first + np.arange(query.shape[1])
    seen = (cache_content.positions >= 0) & (cache_content.positions <= steps[:, None])
    worst = np.zeros((len(query), 4))
    for layer, (key, value) in enumerate(zip(cache_content.key, cache_content.value, strict=True)):
        out, energy, scores = float64_attention(query[layer], key, value, seen)
        differences = energies[layer] - energy, outs[layer] - out
        worst[layer] = [np.abs(x).max() for x in (*differences, scores[:, seen], value)]
    energy, out, score, size = worst.max(0)  # NaN if any is
    # A score is a sum of H products, rounded relative to their size. An error of the scores changes F
    # by as much, and the weights, hence the output relative to the values, by twice as much.
    allowed = 16 * _EPS * max(1.0, score)
    return [(energy, allowed), (out, 2 * allowed * max(1.0, size))]


def expected(config: LlamaConfig, batch: int = 1, time: int = 1) -> tuple[int, int]:
    """The number of collectives of tree reduction in a step, and their bytes, on one device.

    Each layer has one gather of states, `B T N (H + 1)` numbers in float32, which `merge="auto"` chooses for
    a few rows on the devices of one process.
    """
    layers, heads, width = config.num_hidden_layers, config.num_attention_heads, config.head_dim
    return layers, layers * batch * time * heads * (width + 1) * 4


WINDOW = 512  # bytes of the pieces that the library's model has read for most of its training


def parameters(model: PyTree) -> int:
    return sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))


def surprise(model: Llama, tokens: Int[Array, "batch read"]) -> Float[Array, "batch time"]:
    r"""$-\log P$ of each byte after those before it, in nats."""
    logits = model(tokens[:, :-1]).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


class Score(NamedTuple):
    """The loss on the last `WINDOW` bytes, given at most `WINDOW` bytes each, and given all of them by `kernels`."""

    near: float
    far: float
    kernels: str


def score(model: Llama, text: np.ndarray) -> Score:
    half = WINDOW // 2
    pieces = np.stack([text[-WINDOW - half - 1 : -half], text[-WINDOW - 1 :]])
    losses = jax.jit(surprise)
    near = losses(model, jnp.asarray(pieces, jnp.int32))[:, -half:]
    whole = losses.trace(model, jnp.asarray(text[None], jnp.int32))
    far = losses(model, jnp.asarray(text[None], jnp.int32))[:, -WINDOW:]
    return Score(float(near.mean()), float(far.mean()), kernels(whole))
