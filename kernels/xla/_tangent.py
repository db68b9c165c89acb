"""The blockwise tangent: the derivative of a state in a direction, in one pass over the keys."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..call._operands import Operands, Settings, zero_absent
from ..call._state import AttentionState, exp_from, holds_keys, lse_dtype
from ._blocks import BlockedOperands
from ._grid import BLOCK_SIZES, BlockSizes, Index
from ._reduce import reduce_blocks

Rows = tuple[Array, Array | None]


class TangentSums(NamedTuple):
    r"""The sums over keys that a tangent is made of, with weights $e^{s_a - \mathrm{lse}}$.

    Attributes:
        out: $\sum_a P_a (\dot s_a v_a + \dot v_a)$, `[B, T, N, Hv]`.
        lse: $\sum_a P_a \dot s_a$, `[B, T, N]`.
        total: $\sum_a P_a$, which is 1 but for the rounding of `lse`: large where that is.
    """

    out: Array
    lse: Array
    total: Array

    def means(self) -> AttentionState:
        """The first two divided by the total, which is of all keys of a row, or none."""
        total = lax.stop_gradient(self.total)
        total = jnp.where(total == 0, 1.0, total)
        return AttentionState(self.out / total[..., None], self.lse / total)


Keys = tuple[Array, Array | None, Array | None]


def tangent(
    operands: Operands,
    settings: Settings,
    state: AttentionState,
    directions: Operands,
    sizes: BlockSizes = BLOCK_SIZES,
) -> AttentionState:
    r"""The derivative of `(out, lse)` in the directions that are not None.

    With $P_a = e^{s_a - F}$,

    $$\dot s_a = \mathrm{scale}\,(\dot q \cdot k_a + q \cdot \dot k_a) + \dot b_a, \quad
      \dot F = \sum_a P_a \dot s_a, \quad
      \dot{out} = \sum_a P_a \dot s_a v_a - \dot F\, out + \sum_a P_a \dot v_a.$$

    A score makes of the scaled product's change $g'$ times it, and $\partial g/\partial\theta\, \dot\theta$.

    Plain JAX, and so differentiable itself.
    """
    sums = tangent_sums(operands, settings, state.lse, directions, sizes)
    return tangent_of(state, sums.means())


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
    """The sums of a tangent over keys, which may be some of those that `lse` is of; in the dtype of the scores."""
    (batch, query_len, heads), key_len = operands.query.shape[:3], operands.key.shape[1]
    dtype, width = lse_dtype(operands.query.dtype), operands.value.shape[-1]
    if 0 in (batch, query_len, key_len):
        shape = (batch, query_len, heads)
        zero = lax.full_like(operands.query, 0.0, dtype=dtype, shape=(*shape, width))
        return TangentSums(zero, *(lax.full_like(zero, 0.0, shape=shape) for _ in range(2)))
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
        changes: list[Array] = []
        if blocks.score is None:
            changes += [blocks.products(*x)[0] for x in pairs]
        else:
            pair_products = [blocks.products(*x) for x in pairs]
            change = (
                functools.reduce(jnp.add, (x for x, _ in pair_products)) if pair_products else None
            )
            raw, d_scores = blocks.score.jvp(raw, blocks.indices(index), change, score_arrays)
            changes += [x for x in (d_scores, *(y for _, y in pair_products)) if x is not None]
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

    sums_over_keys = reduce_blocks(
        terms, jnp.add, 0.0, (width, 1, 1), blocks, query_len, rows, keys
    )
    return TangentSums(sums_over_keys[0], *(x[..., 0] for x in sums_over_keys[1:]))
