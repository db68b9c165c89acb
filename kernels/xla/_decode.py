"""The decode implementation: few queries and many keys, which are read once and in place."""

import functools

import jax.numpy as jnp
from jaxtyping import Array

from ..call._kernel import AbstractKernel
from ..call._operands import (
    KernelCall,
    Operands,
    Settings,
    bound_score,
    hide_unreachable,
    is_static,
    out_dtype,
    zero_absent,
)
from ..call._state import AttentionState, divided, holds_keys, lse_dtype, precision
from ..masks._abstract import AbstractMask
from . import _blockwise
from ._reference import dense_products, dense_sums, masked, masked_scores, score_index
from ._softmax import softmax
from ._tangent import tangent_of

MOST_ROWS = 64  # queries times heads, of which all scores are in memory; chosen by measurement


class AbstractDecode(AbstractKernel):
    """Few queries and many keys, with any mask and score; subclasses define `forward`."""

    interpreted = ()
    exported = True
    masks = (AbstractMask,)
    scores = True

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        """The blockwise backward, with energies recomputed from the same products that it computes."""
        operands, settings, _ = call
        no_values = operands._replace(value=operands.value[..., :0])
        (_, lse), rounding = _blockwise.forward(no_values, settings)
        state, cotangent = state._replace(lse=lse), divided(cotangent, jnp.exp(-rounding))
        return _blockwise.backward(operands, settings, state, cotangent)


class Decode(AbstractDecode):
    """XLA's operations, for at most 64 queries times heads; reads each key and value once.

    Memory O(T·N·S), small beside the keys.
    """

    name = "decode"
    platforms = ()

    def check(self, call: KernelCall) -> None:
        operands, settings, _ = call
        check_rows(operands, settings, MOST_ROWS)

    def forward(self, call: KernelCall) -> AttentionState:
        operands, settings, _ = call
        return per_head(hide_unreachable(operands, settings), settings)

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState:
        operands, settings, _ = call
        return _tangent(operands, settings, state, directions)


def check_rows(operands: Operands, settings: Settings, most: int) -> None:
    """Raises `NotImplementedError` for more than `most` queries times heads, or a score with a source."""
    query_len, heads = operands.query.shape[1:3]
    if not is_static(query_len) or query_len * heads > most:
        raise NotImplementedError(
            f"query: wanted at most {most} rows times heads, "
            f"got {query_len} × {heads} = {query_len * heads}"
        )
    if settings.scored_width is not None:
        raise NotImplementedError("source: wanted None beside a score, got an array")


def per_head(operands: Operands, settings: Settings) -> AttentionState:
    """The state by products batched over heads; keys and values of eight bits are cast inside the products."""
    # Scores as [B, T, N, S]: heads and keys fill the tiles of a TPU, which T = 1 does not.
    query, key, value = operands.qkv
    batch, query_len, heads, width = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, query_len, kv_heads, heads // kv_heads, width)
    dtype = lse_dtype(query.dtype)
    einsum = functools.partial(
        jnp.einsum, precision=precision(query.dtype), preferred_element_type=dtype
    )
    present = zero_absent(operands)
    if operands.scales.value is None:
        value = present.value  # the zeros are fused into the product
    else:
        key, value = key.astype(query.dtype), value.astype(query.dtype)  # exact, and likewise
    scores = _times(einsum("btkgh,bskh->btkgs", grouped, key), operands.scales.key)
    scores = scores.reshape(batch, query_len, heads, key.shape[1])
    scores = masked(scores.transpose(0, 2, 1, 3), operands, settings).transpose(0, 2, 1, 3)
    weights, total, lse = softmax(scores)
    weights = _times(weights.reshape(*grouped.shape[:-1], key.shape[1]), present.scales.value)
    out = einsum("btkgs,bskv->btkgv", weights.astype(value.dtype), value)
    out = out.reshape(batch, query_len, heads, value.shape[-1]) / total
    return AttentionState(out.astype(out_dtype(operands, settings)), lse)


def _times(x: Array, scale: Array | None) -> Array:
    """Scores or weights `[B, T, K, N/K, S]` times the scale `[B, S, K]` of their keys or values, if any."""
    return x if scale is None else x * scale.transpose(0, 2, 1)[:, None, :, None, :]


def _tangent(
    operands: Operands, settings: Settings, state: AttentionState, directions: Operands
) -> AttentionState:
    """The derivative of `(out, lse)` in the directions that are not None; memory O(T·N·S).

    The formulas are those of the blockwise `tangent`.
    """
    operands = hide_unreachable(operands, settings)
    has_keys, dtype = holds_keys(state.lse)[..., None], state.lse.dtype
    directions_present = zero_absent(
        operands._replace(query=directions.query, key=directions.key, value=directions.value)
    )
    query, key, value = zero_absent(operands)[:3]
    query = jnp.where(has_keys, query, 0)
    exact = precision(query.dtype)
    pairs: list[tuple[Array, Array]] = []
    if directions_present.query is not None:
        pairs.append((jnp.where(has_keys, directions_present.query, 0), key))
    if directions_present.key is not None:
        pairs.append((query, directions_present.key))
    changes = [dense_products(*x, dtype) * settings.scale for x in pairs]
    scores = dense_products(query, key, dtype) * settings.scale
    score = bound_score(settings, operands)
    if score is not None:
        change = functools.reduce(jnp.add, changes) if changes else None
        index = score_index(operands, settings)
        scores, d_scores = score.jvp(scores, index, change, directions.score_arrays)
        changes = [] if d_scores is None else [d_scores]
    weights, total, _ = softmax(masked_scores(scores, operands, None, settings))
    if directions.bias is not None:
        changes.append(directions.bias.astype(dtype))
    sums, energy = jnp.zeros_like(state.out, dtype=dtype), jnp.zeros_like(state.lse)
    if changes:
        terms = weights * sum(changes)
        sums = dense_sums(terms, value.astype(dtype), exact, dtype)
        energy = terms.sum(-1).transpose(0, 2, 1)
    if directions_present.value is not None:
        value = directions_present.value.astype(dtype)
        sums = sums + dense_sums(weights, value, exact, dtype)
    total = total.transpose(0, 2, 1, 3)
    return tangent_of(state, AttentionState(sums / total, energy / total[..., 0]))
