"""Attention whose scores are all in memory at once: the softmax, scores of a whole call, and the reference."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from ..call._kernel import AbstractJAXKernel
from ..call._operands import (
    KernelCall,
    Operands,
    Settings,
    all_meet,
    bound,
    bound_score,
    hide_unreachable,
    is_static,
    out_dtype,
    zero_absent,
)
from ..call._state import (
    AttentionState,
    exp_from,
    holds_keys,
    lse_dtype,
    precision,
    safe_shift,
)
from ..masks._abstract import AbstractMask
from ..masks._visibility import visible
from ..scores._abstract import ScoreIndices


class Softmax(NamedTuple):
    """The pieces of a softmax over an axis, which `total` keeps with size 1."""

    weights: Float[Array, "..."]  # `exp(scores - shift)`, not normalised
    total: Float[Array, "..."]  # their sum; 1 for a fully masked row
    # the free energy, without that axis; minus infinity for a fully masked row
    lse: Float[Array, "..."]


def softmax(scores: Float[Array, "..."], axis: int = -1) -> Softmax:
    r"""The softmax over an axis, where scores of minus infinity hide keys.

    The maximum $m$ is held constant: $F = m + \log\sum e^{s - m}$ does not depend on it, so the derivatives of these
    lines, of any order and in both modes, are those of $F$. A fully masked row has $m = 0$ and a total of 1, and so is
    finite, derivatives included. A NaN or an overflow among the scores makes the whole row NaN.
    """
    # w = e^{s - m}, l = Σ w, F = m + log l
    maximum = lax.stop_gradient(scores.max(axis, keepdims=True, initial=-jnp.inf))
    weights = exp_from(scores, safe_shift(maximum))
    total, lse, _ = normalised(weights.sum(axis, keepdims=True), maximum)
    return Softmax(weights, total, lse.squeeze(axis))


def normalised(total: Array, maximum: Array) -> tuple[Array, Array, Array]:
    """`total` and `lse` of a `Softmax`, from the sum of its weights and the largest score.

    Also returns the rounding error of `lse`, `F - lse`, as a constant for derivatives.
    """
    has_keys = holds_keys(maximum)
    total = jnp.where(has_keys, total, 1.0)
    # the weights are finite even if a score is not
    total = jnp.where(maximum == jnp.inf, jnp.nan, total)
    energy = jnp.log(total)
    lse = jnp.where(has_keys, maximum + energy, -jnp.inf)
    rounding = jnp.where(has_keys, (maximum - lse) + energy, 0.0)
    return total, lse, lax.stop_gradient(rounding)


FEW = 64  # queries, and keys, of a call that is preferred; chosen by measurement


class Reference(AbstractJAXKernel):
    """Attention with the whole `[B, N, T, S]` matrix in memory; takes every call, and is preferred for small ones.

    Plain differentiable JAX, of few operations, so `jax.grad`, `jax.jvp`, `jax.linearize` and `jax.hessian` of
    `forward` work to any order.
    """

    name = "reference"
    masks = (AbstractMask,)
    scores = True
    differentiated_by_jax = True

    def check(self, call: KernelCall) -> None:
        """Takes every call."""

    def check_preferred(self, call: KernelCall) -> None:
        sizes = call.operands.query.shape[1], call.operands.key.shape[1]
        if not is_static(*sizes) or max(sizes) > FEW:
            raise NotImplementedError(
                f"query: wanted at most {FEW} queries and keys, whose scores are few, got {sizes[0]} and {sizes[1]}"
            )

    def forward(self, call: KernelCall) -> AttentionState:
        operands, settings = call.operands, call.settings
        # whether each query sees a key, and each key is seen
        hiding = operands.tokens.query_segments, operands.mask, operands.bias
        full = all_meet(operands, settings) and all(x is None for x in hiding)
        if not full:
            operands = zero_absent(hide_unreachable(operands, settings))
        elif settings.mask.constrains:
            operands = operands.positioned()
        if operands.mask is not None:  # derivatives multiply rows without keys by zeros
            shown = _rows_with_keys(operands, settings)
            operands = operands._replace(query=jnp.where(shown, operands.query, 0))
        plain = full and settings.score is None and settings.scored_width is None
        # scores that are multiples of products, by at most 1, are as finite as these
        if plain and 0 < settings.scale <= 1:
            shown, qkv = _shown(operands, settings), operands.qkv
            # without the axis of a batch of one, so that `jax.vmap` makes the only one
            if operands.query.shape[0] == 1:
                query, key, value = (x[0] for x in qkv)
                out, lse = (x[None] for x in _of_products(settings.scale, shown, query, key, value))
            else:
                out, lse = _of_products(settings.scale, shown, *qkv)
        else:
            weights, total, lse = softmax(_scores_by_head(settings, operands))
            # in 16 bits: weights below 1, whose cotangents do not underflow where many keys share a row
            weights = (weights / total).astype(operands.value.dtype)
            out = _by_head(weights, operands.value, 0, operands.query.dtype).transpose(0, 2, 1, 3)
            lse = lse.transpose(0, 2, 1)
            if not full:  # a fully masked row passes no cotangent to the values
                out = jnp.where(holds_keys(lse)[..., None], out, 0)
        return AttentionState(out.astype(out_dtype(operands, settings)), lse)


def _rows_with_keys(operands: Operands, settings: Settings) -> Array:
    """Whether a query sees some key, by masks and biases alone, `[B or 1, T, N or 1, 1]`."""
    bias = lax.stop_gradient(operands.bias)
    shape = 1, 1, operands.query.shape[1], operands.key.shape[1]
    zeros = lax.full_like(operands.query, 0, lse_dtype(operands.query.dtype), shape)
    shown = masked(zeros, operands._replace(bias=bias), settings._replace(score=None))
    return holds_keys(shown.max(-1, keepdims=True, initial=-jnp.inf)).transpose(0, 2, 1, 3)


def _scores_by_head(settings: Settings, operands: Operands) -> Float[Array, "B N T S"]:
    query, key, _ = operands.qkv
    query, inner, added = query.transpose(0, 2, 1, 3), settings.scored_width, None
    if inner is not None:
        added = _by_head(query[..., inner:], key[..., inner:], 2, query.dtype)
        query, key = query[..., :inner], key[..., :inner]
    return masked(_by_head(query, key, 2, operands.query.dtype), operands, settings, added)


def _shown(operands: Operands, settings: Settings) -> Bool[Array, "T S"] | None:
    """Whether each query sees each key, where positions count from 0; None: all do."""
    queries, keys = operands.tokens.query_positions, operands.tokens.key_positions
    if queries is None or keys is None:
        return None
    return visible(bound(settings, operands), queries[:, :, None], keys[:, None, :])[0]


def _of_products(
    scale: float,
    shown: Bool[Array, "T S"] | None,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """Attention and energies where scores are multiples of products and each row has a key."""
    # queries are fewer than scores; other scales, or 16 bits, would round them
    exact = math.frexp(scale)[0] == 0.5 and query.dtype.itemsize > 2
    before, after = (scale, 1.0) if exact else (1.0, scale)
    products = _by_head(query.swapaxes(-3, -2) * before, key, 2, query.dtype)
    if shown is not None:
        products = jnp.where(shown, products, -jnp.inf)
    maximum = lax.stop_gradient(products.max(-1, keepdims=True, initial=-jnp.inf))
    # subtracted first: exactly 0 where the score is the maximum
    weights = jnp.exp((products - maximum) * after)
    total = weights.sum(-1, keepdims=True)
    out = _by_head((weights / total).astype(value.dtype), value, 0, query.dtype)
    lse = (maximum * after + jnp.log(total))[..., 0]
    return out.swapaxes(-3, -2), lse.swapaxes(-2, -1)


def _by_head(
    rows: Float[Array, "*B N T X"], keys: Array, axis: int, dtype: DTypeLike
) -> Float[Array, "*B N T Y"]:
    """Products of rows with the keys or values `[*B, S, K, W]` of their heads, over this axis of `[S, K, W]`."""
    *batch, heads, length, size = rows.shape
    # XLA:CPU transposes factors of gradients with axes of heads and rows apart, and multiplies small ones faster
    kv_heads, lead = keys.shape[-2], len(batch)
    grouped = rows.reshape(*batch, kv_heads, heads // kv_heads, length, size)
    batches = tuple(range(lead))
    result = lax.dot_general(
        grouped,
        keys,
        (((lead + 3,), (lead + axis,)), ((*batches, lead), (*batches, lead + 1))),
        precision=precision(dtype),
        preferred_element_type=lse_dtype(dtype, keys.dtype),
    )
    return result.reshape(*batch, heads, length, result.shape[-1])


def dense_state(settings: Settings, operands: Operands) -> AttentionState:
    """The state by products batched over heads; keys and values of eight bits are cast inside the products."""
    (query, key, value), present = operands.qkv, zero_absent(operands)
    if operands.scales.value is None:
        value = present.value  # the zeros are fused into the product
    else:  # exact, and fused into the product, too
        key, value = key.astype(query.dtype), value.astype(query.dtype)
    weights, total, lse = softmax(dense_scores(settings, operands._replace(key=key)))
    batch, query_len, heads, key_len = weights.shape
    kv_heads, width = value.shape[2:]
    weights = weights.reshape(batch, query_len, kv_heads, heads // kv_heads, key_len)
    # out = Σ_a w_a v_a / l; of eight bits v_a = c_a v'_a, and the scale c_a multiplies the weight
    weights = _times(weights, present.scales.value).astype(value.dtype)
    out = _einsum("btkgs,bskv->btkgv", weights, value, query.dtype)
    out = out.reshape(batch, query_len, heads, width) / total
    return AttentionState(out.astype(out_dtype(operands, settings)), lse)


def dense_scores(settings: Settings, operands: Operands) -> Float[Array, "B T N S"]:
    """All scores of a call, in the precision of energies, minus infinity where a key is hidden."""
    query, key, _ = operands.qkv
    inner, scale = settings.scored_width, operands.scales.key
    added = None if inner is None else _dense_products(query[..., inner:], key[..., inner:], scale)
    products = _dense_products(query[..., :inner], key[..., :inner], scale)
    return masked(products, operands, settings, added).transpose(0, 2, 1, 3)


def _dense_products(
    query: Array, key: Array, scale: Array | None = None
) -> Float[Array, "B N T S"]:
    # Computed as [B, T, N, S]: heads and keys fill the tiles of a TPU, which T = 1 does not.
    batch, query_len, heads, width = query.shape
    key_len, kv_heads = key.shape[1:3]
    grouped = query.reshape(batch, query_len, kv_heads, heads // kv_heads, width)
    result = _times(_einsum("btkgh,bskh->btkgs", grouped, key, query.dtype), scale)
    return result.reshape(batch, query_len, heads, key_len).transpose(0, 2, 1, 3)


def _einsum(axes: str, a: Array, b: Array, dtype: DTypeLike) -> Array:
    dtypes = {"precision": precision(dtype), "preferred_element_type": lse_dtype(dtype, b.dtype)}
    return jnp.einsum(axes, a, b, **dtypes)


def _times(x: Array, scale: Array | None) -> Array:
    """Scores or weights `[B, T, K, N/K, S]` times the scale `[B, S, K]` of their keys or values, if any."""
    return x if scale is None else x * scale.transpose(0, 2, 1)[:, None, :, None, :]


def masked(
    products: Float[Array, "B N T S"],
    operands: Operands,
    settings: Settings,
    added: Float[Array, "B N T S"] | None = None,
) -> Array:
    """Scores from products of queries and keys: scaled, biased, minus infinity where hidden.

    `added` are products that are added to the scores, not part of the score's argument. Positions may be None.
    """
    # s = g(scale q·k) + ζ·v + b, minus infinity where hidden; ζ·v is a product of further features
    scores, score = products * settings.scale, bound_score(settings, operands)
    if score is not None:
        scores = score(scores, _score_index(operands, settings))
    if added is not None:
        scores = scores + added * settings.scale
    if operands.bias is not None:
        scores = scores + operands.bias.astype(scores.dtype)
    tokens = operands.tokens
    queries, keys = tokens.query_positions, tokens.key_positions
    if queries is not None and keys is not None:
        is_visible = visible(bound(settings, operands), queries[:, :, None], keys[:, None, :])
        scores = jnp.where(is_visible[:, None], scores, -jnp.inf)
    queries, keys = tokens.query_segments, tokens.key_segments
    if queries is not None and keys is not None:
        same_segment = queries[:, :, None] == keys[:, None, :]
        scores = jnp.where(same_segment[:, None], scores, -jnp.inf)
    if operands.mask is not None:
        scores = jnp.where(operands.mask, scores, -jnp.inf)
    return scores


def _score_index(operands: Operands, settings: Settings) -> ScoreIndices:
    batches, heads = operands.part_indices()
    queries, keys = None, None
    if settings.score is not None and settings.score.uses_positions:
        tokens = operands.positioned().tokens
        queries: Any = tokens.query_positions
        keys: Any = tokens.key_positions
        queries, keys = queries[:, None, :, None], keys[:, None, None, :]
    return ScoreIndices(batches[:, None, None, None], heads[None, :, None, None], queries, keys)  # pyright: ignore[reportArgumentType]
