"""The tangent of few queries and many keys: all scores at once, and no copy of keys or values."""

import functools

import jax.numpy as jnp
from jaxtyping import Array

from ..call._operands import Operands, Settings, bound_score, hide_unreachable, zero_absent
from ..call._state import AttentionState, holds_keys, precision
from ._reference import masked_scores, score_index
from ._softmax import softmax
from ._tangent import tangent_of


def tangent(
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
    batch, query_len, heads = query.shape[:3]
    kv_heads, key_len = key.shape[2], key.shape[1]
    einsum = functools.partial(
        jnp.einsum, precision=precision(query.dtype), preferred_element_type=dtype
    )

    def products(query: Array, key: Array) -> Array:
        grouped = query.reshape(batch, query_len, kv_heads, heads // kv_heads, query.shape[-1])
        return einsum("btkgh,bskh->bkgts", grouped, key).reshape(batch, heads, query_len, key_len)

    def mean(weights: Array, value: Array) -> Array:
        grouped = weights.reshape(batch, kv_heads, heads // kv_heads, query_len, key_len)
        out = einsum("bkgts,bskv->btkgv", grouped, value.astype(dtype))
        return out.reshape(batch, query_len, heads, value.shape[-1])

    pairs: list[tuple[Array, Array]] = []
    if directions_present.query is not None:
        pairs.append((jnp.where(has_keys, directions_present.query, 0), key))
    if directions_present.key is not None:
        pairs.append((query, directions_present.key))
    changes = [products(*x) * settings.scale for x in pairs]
    scores, score = products(query, key) * settings.scale, bound_score(settings, operands)
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
        sums, energy = mean(terms, value), terms.sum(-1).transpose(0, 2, 1)
    if directions_present.value is not None:
        sums = sums + mean(weights, directions_present.value)
    total = total.transpose(0, 2, 1, 3)
    return tangent_of(state, AttentionState(sums / total, energy / total[..., 0]))
