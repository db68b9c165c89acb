"""The derivatives of blockwise attention: the backward and the tangent, each in one pass over blocks of scores."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..call._operands import (
    Operands,
    Settings,
    all_meet,
    differentiated,
    is_static,
    map_some,
    zero_absent,
)
from ..call._state import AttentionState, exp_from, holds_keys, lse_dtype
from ..fold._tree import as_written
from ._blocks import BlockedOperands, reduce_blocks, reduced_of_nothing
from ._grid import BLOCK_SIZES, BlockSizes, Index, numbers

Gradients = tuple[Any, Any, Any]  # of queries, keys and values


class InFlight(NamedTuple):
    """Arrays in flight from other devices during a backward, used only after all its products.

    XLA starts a transfer as late as possible, so this makes it start these before the products.
    """

    others: Any = None
    # cotangents of these keys and values, to which the backward's are added. Programs that do not use them, such as
    # Hessian-vector products, neither send nor compute them.
    sums: Any = None


NOTHING_IN_FLIGHT = InFlight()


def backward_delta(state: AttentionState, cotangent: AttentionState) -> Array:
    """`δ` of `backward`, `[B, T, N]`. A cotangent of `lse` that is None is zero."""
    # δ = dout·out - dlse
    dtype = state.lse.dtype
    delta = (cotangent.out.astype(dtype) * state.out.astype(dtype)).sum(-1)
    return delta if cotangent.lse is None else delta - cotangent.lse


def after_products(gradients: Gradients, in_flight: InFlight) -> tuple[Gradients, InFlight]:
    """Returns both behind optimization barriers, so that the transfers overlap with the products of a backward.

    XLA:TPU needs the first barrier where more than five transfers, its limit, overlap at a time.
    A program that uses no gradients of keys and values does not wait for the sums of these.
    """
    if not jax.tree.leaves(in_flight):
        return gradients, in_flight
    queries, keys, values = gradients
    queries, others = lax.optimization_barrier((queries, in_flight.others))
    gradients, sums = lax.optimization_barrier(((queries, keys, values), in_flight.sums))
    return gradients, InFlight(others, sums)


# The cotangents of the bias and of the score's arrays, which all blocks share.
SharedCotangents = tuple[Array | None, tuple[Array | None, ...]]
BlockCotangents = tuple[Array, Array, Array, SharedCotangents]


class RowCotangents(NamedTuple):
    """The cotangents of rows, which are the same for all keys."""

    d_out: Array  # [B, T, N, Hv]
    lse: Array  # [B, T, N], the state's
    delta: Array  # [B, T, N], `backward_delta`


def row_cotangents(state: AttentionState, cotangent: AttentionState) -> RowCotangents:
    return RowCotangents(cotangent.out, state.lse, backward_delta(state, cotangent))


class BackwardRows(NamedTuple):
    """The rows of a backward. Fully masked ones get no weight: $P = e^{s - \\infty} = 0$."""

    query: Array  # [B, T, N, H]
    d_out: Array  # [B, T, N, Hv]
    lse: Array  # [B, T, N], plus infinity for fully masked rows
    delta: Array  # [B, T, N], `backward_delta`


def backward_rows(operands: Operands, settings: Settings, rows: RowCotangents) -> BackwardRows:
    query, d_out = operands.query, rows.d_out
    has_keys = holds_keys(rows.lse)
    masks = operands.tokens.query_segments, operands.mask, operands.bias
    if any(x is not None for x in masks) or not all_meet(operands, settings):
        query, d_out = (jnp.where(has_keys[..., None], x, 0) for x in (query, d_out))
    lse = jnp.where(has_keys, rows.lse, jnp.inf)
    return BackwardRows(query, d_out, lse, jnp.where(has_keys, rows.delta, 0.0))


def cast_like(cotangents: Operands, operands: Operands) -> Operands:
    return map_some(lambda x, like: x.astype(like.dtype), cotangents, operands)


# One closure per level of the loops; they share the padded arrays, and so stay in one function.
def backward_unrounded(
    operands: Operands,
    settings: Settings,
    cotangent: RowCotangents,
    sizes: BlockSizes = BLOCK_SIZES,
) -> Operands:
    """`backward` with cotangents in the dtype of the scores, for further sums.

    `cotangent` may belong to a state of more keys than these; weights are then relative to all of them.
    """
    (query, key, value), bias = operands.qkv, operands.bias
    dtype = lse_dtype(query.dtype)
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, dtype=dtype), differentiated(operands))
    (batch, query_len), key_len = query.shape[:2], key.shape[1]
    if batch == 0 or query_len == 0 or key_len == 0:
        return zeros
    rows = backward_rows(operands, settings, cotangent)
    blocks = BlockedOperands(operands._replace(query=rows.query), settings, sizes)
    g = blocks.grid
    outs = g.pad_queries(rows.d_out)
    lse = g.pad_queries(rows.lse[..., None], jnp.inf)  # no weight in rows that fill a block
    delta = g.pad_queries(rows.delta[..., None])
    no_arrays = jax.tree.map(lambda x: blocks.full(0.0, *x.shape), zeros.score_arrays)

    # A derivative of this derivative stores only the index of a block and its transposed queries.
    @jax.checkpoint
    def pulled(index: Index, query_side: Array, out_side: Array) -> BlockCotangents:
        def pull() -> BlockCotangents:
            query, out, shift, change = (
                g.take_queries(x, index) for x in (blocks.query, outs, lse, delta)
            )
            key, value = (g.take_keys(x, index) for x in (blocks.key, blocks.value))
            # P = e^{s - F}, ds = P (dout·v - δ), dk = Σ ds q, dv = Σ P dout, dq = Σ ds k
            raw, added = blocks.products(query, key)
            scored, pullback = raw, None
            if blocks.score is not None:
                scored, pullback = blocks.score.vjp(raw, blocks.indices(index))
            weights = exp_from(blocks.masked(scored, added, index), shift)
            d_scores = weights * (blocks.outer(out, value.astype(out.dtype)) - change)
            d_raw, d_arrays = (d_scores, ()) if pullback is None else pullback(d_scores)
            return (
                blocks.to_keys(query_side, d_raw, d_scores),
                blocks.product(out_side, weights),
                blocks.to_queries(key.astype(dtype), d_raw, d_scores),
                (None if bias is None else d_scores, d_arrays),
            )

        def nothing() -> BlockCotangents:
            return (
                blocks.full(0.0, batch, key.shape[-1], g.keys),
                blocks.full(0.0, batch, value.shape[-1], g.keys),
                blocks.full(0.0, batch, g.rows, key.shape[-1]),
                (None if bias is None else blocks.full(0.0, batch, g.rows, g.keys), no_arrays),
            )

        meet = blocks.meet(index)
        return pull() if meet is None else lax.cond(meet, pull, nothing)

    def one_block(
        query_index: Index, sides: list[Array], carry: tuple[Gradients, SharedCotangents], j: Array
    ) -> tuple[tuple[Gradients, SharedCotangents], None]:
        (queries, keys, values), (biases, arrays) = carry
        index = query_index._replace(key=j)
        d_keys, d_values, d_queries, (d_scores, d_arrays) = pulled(index, *sides)
        # Without the barrier XLA transposes the products, and sums over the first axis of both factors.
        d_keys, d_values = lax.optimization_barrier((d_keys, d_values))
        if biases is not None:
            biases = blocks.add_to_bias(biases, d_scores, index)
        added = (
            g.add_to_queries(queries, d_queries * settings.scale, index),
            g.add_to_keys(keys, d_keys.transpose(0, 2, 1) * settings.scale, index),
            g.add_to_keys(values, d_values.transpose(0, 2, 1), index),
        )
        return (added, (biases, jax.tree.map(jnp.add, arrays, d_arrays))), None

    queries, keys, values = (
        blocks.full(0.0, *x.shape) for x in (blocks.query, blocks.key, blocks.value)
    )
    start = queries, keys, values
    biases = None if blocks.bias is None else blocks.full(0.0, *blocks.bias.shape)

    # The inner loop is over keys, so that queries are transposed once for all of their blocks of keys.
    def one_block_of_queries(carry: tuple[Gradients, SharedCotangents], n: Array) -> Any:
        query_index = blocks.index_of_queries(n)
        # [B, W, rows] in memory, so that sums over rows are plain matrix products
        taken = (g.take_queries(x, query_index).astype(dtype) for x in (blocks.query, outs))
        sides = [lax.optimization_barrier(x.transpose(0, 2, 1)) for x in taken]
        step = functools.partial(one_block, query_index, sides)
        return lax.scan(step, carry, numbers(g.key_blocks))

    count, begin = numbers(g.kv_heads * g.query_blocks), (start, (biases, no_arrays))
    (gradients, (biases, arrays)), _ = lax.scan(one_block_of_queries, begin, count)
    queries, keys, values = gradients
    if bias is not None and biases is not None:
        biases = biases[:, :, : bias.shape[2], : bias.shape[3]]
    return zeros._replace(
        query=queries[:, :query_len],
        key=keys[:, :key_len],
        value=values[:, :key_len],
        bias=biases,
        score_arrays=arrays,
    )


# Heads are computed one by one if queries in the dtype of the scores take more bytes than this: blocks of rows
# and keys and their gradients take several times as much.
LEAST = 16 << 20


def backward_by_head(
    d_query: Array | None,
    operands: Operands,
    settings: Settings,
    rows: RowCotangents,
    in_flight: InFlight = NOTHING_IN_FLIGHT,
) -> tuple[Operands, InFlight]:
    """`backward_unrounded`, with `d_query` (None: zero) added to the cotangent of the queries.

    Large calls are computed one key head at a time.
    """
    heads, kv_heads = operands.query.shape[2], operands.key.shape[2]
    query, indices = operands.query, operands.indices
    large = is_static(*query.shape) and query.size * rows.lse.dtype.itemsize > LEAST
    if kv_heads == 1 or not large:
        result, so_far = backward_unrounded(operands, settings, rows), d_query
    else:
        if settings.score is not None and indices.heads is None:
            indices = indices._replace(heads=jnp.arange(heads, dtype=jnp.int32))
            operands = operands._replace(indices=indices)
        result, so_far = _head_by_head(d_query, operands, settings, rows), None
    (query, key, value), in_flight = after_products(result.qkv, in_flight)
    query = query if so_far is None else query + so_far
    return result._replace(query=query, key=key, value=value), in_flight


def _head_by_head(
    d_query: Array | None, operands: Operands, settings: Settings, rows: RowCotangents
) -> Operands:
    count = operands.key.shape[2]

    def add(head: Array, sums: Operands) -> Operands:
        indices = operands.indices
        indices = indices._replace(heads=_cut(indices.heads, 0, head, count))
        cut = {name: _cut(getattr(operands, name), axis, head, count) for name, axis in _HEADS}
        head_rows = RowCotangents(*(_cut(x, 2, head, count) for x in rows))
        part = operands._replace(**cut, indices=indices)
        part = backward_unrounded(part, settings, head_rows)
        arrays = jax.tree.map(jnp.add, sums.score_arrays, part.score_arrays)
        pairs = ((name, getattr(sums, name), getattr(part, name), axis) for name, axis in _HEADS)
        added = {name: _added(x, y, axis, head) for name, x, y, axis in pairs}
        return sums._replace(**added, score_arrays=arrays)

    moving, dtype = differentiated(operands), rows.lse.dtype
    sums = jax.tree.map(lambda x: lax.full_like(x, 0.0, dtype=dtype), moving)
    sums = sums if d_query is None else sums._replace(query=d_query)
    return lax.fori_loop(0, count, add, sums)


_HEADS = ("query", 2), ("key", 2), ("value", 2), ("bias", 1), ("mask", 1)  # axes of heads


def _cut(x: Any, axis: int, number: Array, count: int) -> Any:
    if x is None or x.shape[axis] == 1:
        return x
    size = x.shape[axis] // count
    part = lax.dynamic_slice_in_dim(x, number * size, size, axis)
    return as_written(part) if x.ndim == 4 else part


def _added(sums: Any, part: Any, axis: int, number: Array) -> Any:
    """Adds the `number`-th part along an axis, or the whole array if it has no such axis."""
    if sums is None or sums.shape == part.shape:
        return sums if sums is None else sums + part
    size = part.shape[axis]
    old = lax.dynamic_slice_in_dim(sums, number * size, size, axis)
    return lax.dynamic_update_slice_in_dim(sums, old + part, number * size, axis)


Rows = tuple[Array, Array | None]


class TangentSums(NamedTuple):
    r"""The sums over keys that a tangent is made of, with weights $e^{s_a - \mathrm{lse}}$."""

    out: Array  # $\sum_a P_a (\dot s_a v_a + \dot v_a)$, `[B, T, N, Hv]`
    lse: Array  # $\sum_a P_a \dot s_a$, `[B, T, N]`
    total: Array  # $\sum_a P_a$, 1 up to the rounding error of `lse`

    def means(self) -> AttentionState:
        """The first two divided by the total, which is of all keys of a row, or none."""
        total = lax.stop_gradient(self.total)
        total = jnp.where(total == 0, 1.0, total)
        return AttentionState(self.out / total[..., None], self.lse / total)


Keys = tuple[Array, Array | None, Array | None]


def tangent_of(state: AttentionState, means: AttentionState) -> AttentionState:
    r"""The tangent of a state, from $\sum P_a (\dot s_a v_a + \dot v_a)$ and $\dot F$ of all its keys."""
    # dout = Σ P (ds v + dv) - dF out. Selects zeros in fully masked rows, so that reverse mode does not read them.
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
    r"""The sums of a tangent over keys, which may be part of the keys of `lse`; in the dtype of the scores.

    With $P_a = e^{s_a - F}$,

    $$\dot s_a = \mathrm{scale}\,(\dot q \cdot k_a + q \cdot \dot k_a) + \dot b_a, \quad
      \dot F = \sum_a P_a \dot s_a, \quad
      \dot{out} = \sum_a P_a \dot s_a v_a - \dot F\, out + \sum_a P_a \dot v_a.$$

    A score multiplies the tangent of the scaled product by $g'$ and adds $\partial g/\partial\theta\, \dot\theta$.
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
        # Σ P (ds v + dv), Σ P ds and Σ P, with P = e^{s - lse}
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
