"""The blockwise tangent: the derivative of a state in a direction, in one pass over the keys."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..call._operands import Operands, Settings, zero_absent
from ..call._state import AttentionState, exp_from, holds_keys, lse_dtype
from ._blocks import BlockedOperands, reduce_blocks, reduced_of_nothing
from ._grid import BLOCK_SIZES, BlockSizes, Index

Rows = tuple[Array, Array | None]


class TangentSums(NamedTuple):
    r"""The sums over keys that a tangent is made of, with weights $e^{s_a - \mathrm{lse}}$."""

    out: Array  # $\sum_a P_a (\dot s_a v_a + \dot v_a)$, `[B, T, N, Hv]`
    lse: Array  # $\sum_a P_a \dot s_a$, `[B, T, N]`
    total: Array  # $\sum_a P_a$, which is 1 but for the rounding of `lse`: large where that is

    def means(self) -> AttentionState:
        """The first two divided by the total, which is of all keys of a row, or none."""
        total = lax.stop_gradient(self.total)
        total = jnp.where(total == 0, 1.0, total)
        return AttentionState(self.out / total[..., None], self.lse / total)


Keys = tuple[Array, Array | None, Array | None]


def tangent_of(state: AttentionState, means: AttentionState) -> AttentionState:
    r"""The tangent of a state, from $\sum P_a (\dot s_a v_a + \dot v_a)$ and $\dot F$ of all its keys."""
    # zeros in fully masked rows, by a choice: in reverse their cotangents are not read either
    seen = holds_keys(state.lse)
    change = jnp.where(seen, means.lse, 0.0)
    out = means.out - change[..., None] * state.out.astype(change.dtype)
    out = jnp.where(seen[..., None], out, 0.0)
    return AttentionState(out.astype(state.out.dtype), change)


def tangent_sums(
    operands: Operands,
    settings: Settings,
    lse: Array,
    directions: Operands,
    sizes: BlockSizes = BLOCK_SIZES,
) -> TangentSums:
    r"""The sums of a tangent over keys, which may be some of those that `lse` is of; in the dtype of the scores.

    With $P_a = e^{s_a - F}$,

    $$\dot s_a = \mathrm{scale}\,(\dot q \cdot k_a + q \cdot \dot k_a) + \dot b_a, \quad
      \dot F = \sum_a P_a \dot s_a, \quad
      \dot{out} = \sum_a P_a \dot s_a v_a - \dot F\, out + \sum_a P_a \dot v_a.$$

    A score makes of the scaled product's change $g'$ times it, and $\partial g/\partial\theta\, \dot\theta$.
    """
    dtype, query_len = lse_dtype(operands.query.dtype), operands.query.shape[1]
    widths = (width := operands.value.shape[-1]), 1, 1
    if (nothing := reduced_of_nothing(operands, 0.0, widths)) is not None:
        return TangentSums(nothing[0], *(x[..., 0] for x in nothing[1:]))
    has_keys = holds_keys(lse)  # fully masked rows get no weight, and are not read
    operands = operands._replace(query=jnp.where(has_keys[..., None], operands.query, 0))
    blocks = BlockedOperands(operands, settings, sizes)
    direction = zero_absent(
        blocks.operands._replace(query=directions.query, key=directions.key, value=directions.value)
    )
    query = None if direction.query is None else jnp.where(has_keys[..., None], direction.query, 0)
    rows = jnp.where(has_keys, lse, jnp.inf)[..., None], query
    keys = blocks.value, direction.key, direction.value
    bias, score_arrays = blocks.pad_scores(directions.bias), directions.score_arrays

    def terms(index: Index, query: Array, key: Array, rows: Rows, keys: Keys) -> tuple[Array, ...]:
        (lse, query_change), (value, key_change, value_change) = rows, keys
        pairs: list[tuple[Array, Array]] = []
        if query_change is not None:
            pairs.append((query_change, key))
        if key_change is not None:
            pairs.append((query, key_change))
        raw, added = blocks.products(query, key)
        products = [blocks.products(*x) for x in pairs]
        changes = [x for x, _ in products]
        if blocks.score is not None:
            change = functools.reduce(jnp.add, changes) if changes else None
            raw, d_scores = blocks.score.jvp(raw, blocks.indices(index), change, score_arrays)
            changes = [x for x in (d_scores, *(y for _, y in products)) if x is not None]
        weights = exp_from(blocks.masked(raw, added, index), lse)
        if bias is not None:
            changes.append(blocks.score_block(bias, index).astype(dtype))
        sums, energy = (blocks.full(0.0, *lse.shape[:2], size) for size in (width, 1))
        if changes:
            d_weights = weights * functools.reduce(jnp.add, changes)
            sums = blocks.product(d_weights, value.astype(dtype))
            energy = d_weights.sum(-1, keepdims=True)
        if value_change is not None:
            sums = sums + blocks.product(weights, value_change.astype(dtype))
        return sums, energy, weights.sum(-1, keepdims=True)

    sums, *numbers = reduce_blocks(terms, jnp.add, 0.0, widths, blocks, query_len, rows, keys)
    return TangentSums(sums, *(x[..., 0] for x in numbers))
