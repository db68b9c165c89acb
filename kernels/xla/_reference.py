"""The reference implementation: slow, obviously right, differentiable to any order in both modes."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..call._kernel import AbstractJAXKernel
from ..call._operands import (
    KernelCall,
    Operands,
    Settings,
    bound,
    bound_score,
    hide_unreachable,
    out_dtype,
    zero_absent,
)
from ..call._state import AttentionState, holds_keys, lse_dtype, precision
from ..masks._abstract import AbstractMask
from ..masks._visibility import visible
from ..scores._abstract import At
from ._softmax import softmax


class Reference(AbstractJAXKernel):
    """Attention with the whole `[B, N, T, S]` matrix in memory; takes every call.

    Plain differentiable JAX, so `jax.grad`, `jax.jvp`, `jax.linearize` and `jax.hessian` of
    `forward` work to any order.
    """

    name = "reference"
    masks = (AbstractMask,)
    scores = True
    differentiated_by_jax = True

    def check(self, call: KernelCall) -> None:
        """Takes every call."""

    def forward(self, call: KernelCall) -> AttentionState:
        operands, settings, _ = call
        operands = hide_unreachable(operands, settings)
        query, key, value = zero_absent(operands).qkv

        def scores(query: Array) -> Array:
            return _scores(query, key, operands, settings)

        if operands.mask is not None:  # derivatives multiply rows without keys by zeros
            has_keys = holds_keys(scores(lax.stop_gradient(query)).max(-1, initial=-jnp.inf))
            query = jnp.where(has_keys.transpose(0, 2, 1)[..., None], query, 0)
        weights, total, lse = softmax(scores(query))
        weights = (weights / total).astype(value.dtype)
        out = dense_sums(weights, value, precision(query.dtype), lse_dtype(value.dtype))
        lse = lse.transpose(0, 2, 1)
        # a fully masked row passes no cotangent to the values
        out = jnp.where(holds_keys(lse)[..., None], out, 0)
        return AttentionState(out.astype(out_dtype(operands, settings)), lse)


def dense_scores(settings: Settings, operands: Operands) -> Float[Array, "B N T S"]:
    """All scores of a call, in the precision of energies, minus infinity where a key is hidden."""
    operands = hide_unreachable(operands, settings)
    query, key, _ = zero_absent(operands).qkv
    return _scores(query, key, operands, settings)


def _scores(query: Array, key: Array, operands: Operands, settings: Settings) -> Array:
    """The scores of queries and keys in the places of those of the operands."""
    inner, dtype = settings.scored_width, lse_dtype(query.dtype)
    added = None if inner is None else dense_products(query[..., inner:], key[..., inner:], dtype)
    raw = dense_products(query[..., :inner], key[..., :inner], dtype)
    return masked(raw, operands, settings, added)


def dense_products(query: Array, key: Array, dtype: DTypeLike) -> Float[Array, "B N T S"]:
    """The products of all queries and keys."""
    batch, query_len, heads, width = query.shape
    key_len, kv_heads = key.shape[1:3]
    grouped = query.reshape(batch, query_len, kv_heads, heads // kv_heads, width)
    exact = precision(query.dtype)
    out = jnp.einsum(
        "btkgh,bskh->bkgts", grouped, key, precision=exact, preferred_element_type=dtype
    )
    return out.reshape(batch, heads, query_len, key_len)


def dense_sums(
    weights: Float[Array, "B N T S"], value: Array, exact: lax.Precision | None, dtype: DTypeLike
) -> Float[Array, "B T N W"]:
    """The values of all keys, weighted and summed."""
    batch, heads, query_len, key_len = weights.shape
    kv_heads, width = value.shape[2:]
    grouped = weights.reshape(batch, kv_heads, heads // kv_heads, query_len, key_len)
    out = jnp.einsum(
        "bkgts,bskh->btkgh", grouped, value, precision=exact, preferred_element_type=dtype
    )
    return out.reshape(batch, query_len, heads, width)


def masked(
    products: Float[Array, "B N T S"],
    operands: Operands,
    settings: Settings,
    added: Float[Array, "B N T S"] | None = None,
) -> Array:
    """Scores from products of queries and keys: scaled, biased, minus infinity where hidden.

    `added` are products that are added to the scores, not part of the score's argument.
    """
    raw, score = products * settings.scale, bound_score(settings, operands)
    scores = raw if score is None else score(raw, score_index(operands, settings))
    return masked_scores(
        scores, operands, None if added is None else added * settings.scale, settings
    )


def score_index(operands: Operands, settings: Settings) -> At:
    """The batch, head and positions of the scores `[B, N, T, S]`, for a score."""
    batches, heads = operands.part_indices()
    queries, keys = None, None
    if settings.score is not None and settings.score.compares:
        tokens = operands.positioned().tokens
        queries: Any = tokens.query_positions
        keys: Any = tokens.key_positions
        queries, keys = queries[:, None, :, None], keys[:, None, None, :]
    return At(batches[:, None, None, None], heads[None, :, None, None], queries, keys)  # pyright: ignore[reportArgumentType]


def masked_scores(
    scores: Float[Array, "B N T S"], operands: Operands, added: Array | None, settings: Settings
) -> Array:
    """Scores plus `added` and the bias, minus infinity where hidden; positions may be None."""
    if added is not None:
        scores = scores + added
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
