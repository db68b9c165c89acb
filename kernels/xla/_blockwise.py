"""The blockwise implementation: XLA's operations, memory O(T·block), any platform.

Forward and backward iterate over blocks of scores and keep running statistics; the `T×S` matrix is
never stored (online softmax: Milakov and Gimelshein, arXiv 1805.02867; FlashAttention-2: Dao,
arXiv 2307.08691).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..call._kernel import AbstractKernel
from ..call._operands import (
    KernelCall,
    Operands,
    Settings,
    all_meet,
    differentiated,
    is_static,
    map_some,
    out_dtype,
)
from ..call._state import AttentionState, exp_from, holds_keys, lse_dtype, safe_shift
from ..fold._call import empty_like
from ..fold._tree import as_written
from ..masks._abstract import AbstractMask
from ._blocks import BlockedOperands
from ._grid import (
    BLOCK_SIZES,
    BlockSizes,
    Index,
    numbers,
)
from ._reference import normalised
from ._tangent import tangent_of, tangent_sums

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


@dataclasses.dataclass(frozen=True)
class Blockwise(AbstractKernel):
    """XLA's operations: any call, any platform, memory O(T·block)."""

    sizes: BlockSizes = BLOCK_SIZES

    name = "blockwise"
    platforms = ()
    interpreted = ()
    exported = True
    masks = (AbstractMask,)
    scores = True

    def check(self, call: KernelCall) -> None:
        """Takes every call."""

    def forward(self, call: KernelCall) -> AttentionState:
        """The online softmax over blocks of keys."""
        return self.forward_and_rest(call)[0]

    def forward_and_rest(self, call: KernelCall) -> tuple[AttentionState, Array]:
        """`forward`, and the rounding error of `lse`.

        JAX's derivative of this would store every block; `backward` is used instead.
        """
        operands, settings = call.operands, call.settings
        batch, query_len = operands.query.shape[:2]
        value = operands.value
        if batch == 0 or query_len == 0 or operands.key.shape[1] == 0:
            state = empty_like(settings, operands)
            return state, jnp.zeros_like(state.lse)
        blocks = BlockedOperands(operands, settings, self.sizes)
        g = blocks.grid
        dtype = lse_dtype(operands.query.dtype)
        # Not zeroed where absent: scores of hidden keys are replaced, and values are zeroed block by block.
        keys, values = (g.pad_keys(x) for x in (operands.key, value))

        def one_block_of_queries(n: Array) -> tuple[Array, Array, Array]:
            query_index = blocks.index_of_queries(n)

            def one_block_of_keys(carry: tuple[Array, ...], j: Array) -> Any:
                index = query_index._replace(key=j)

                def attend(maximum: Array, total: Array, sums: Array) -> tuple[Array, Array, Array]:
                    query, key = g.take_queries(blocks.query, index), g.take_keys(keys, index)
                    scores = blocks.unscaled(query, key, index)
                    new = jnp.maximum(maximum, scores.max(-1, keepdims=True))
                    shift = safe_shift(new)
                    # Subtract first: the difference is exactly 0 where the score is the maximum.
                    weights = jnp.exp((scores - shift) * blocks.unit)
                    decay = jnp.exp((maximum - shift) * blocks.unit)
                    total = total * decay + weights.sum(-1, keepdims=True)
                    # Values are cast to the dtype of the weights, which is that of the scores.
                    weighed = blocks.product(
                        weights, blocks.take_values(values, index).astype(dtype)
                    )
                    return new, total, sums * decay + weighed

                meet = blocks.meet(index)
                if meet is not None:
                    return lax.cond(meet, attend, lambda *carry: carry, *carry), None
                return attend(*carry), None

            fills = (-jnp.inf, 1), (0.0, 1), (0.0, value.shape[-1])
            start = tuple(blocks.full(fill, batch, g.rows, width) for fill, width in fills)
            (maximum, total, sums), _ = lax.scan(one_block_of_keys, start, numbers(g.key_blocks))
            total, lse, rest = normalised(total, maximum * blocks.unit)
            return (sums / total).astype(out_dtype(operands, settings)), lse, rest

        rows = lax.map(one_block_of_queries, numbers(g.kv_heads * g.query_blocks))
        out, lse, rest = (g.join_queries(x, query_len) for x in rows)
        return AttentionState(out, lse[..., 0]), rest[..., 0]

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        r"""The vector-Jacobian product of `(out, lse)` with both cotangents, in blocks.

        With $P_a = e^{s_a - F}$ and $\delta = \dot{out}\cdot out - \dot{lse}$,

        $$\dot s_a = P_a (\dot{out}\cdot v_a - \delta), \quad \dot v_a = \sum P_a \dot{out}, \quad
          \dot q = \mathrm{scale} \sum_a \dot s_a k_a, \quad \dot k_a = \mathrm{scale} \sum \dot s_a q.$$

        A score multiplies $\dot s_a$ by $g'$ in the last two; its arrays get
        $\sum \dot s_a\, \partial g/\partial\theta$. Plain JAX, and so differentiable itself.
        """
        operands, settings = call.operands, call.settings
        rows = row_cotangents(state, cotangent)
        return cast_like(backward_unrounded(operands, settings, rows, self.sizes), operands)

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState:
        operands, settings = call.operands, call.settings
        sums = tangent_sums(operands, settings, state.lse, directions, self.sizes)
        return tangent_of(state, sums.means())


def backward_delta(state: AttentionState, cotangent: AttentionState) -> Array:
    """`δ` of `backward`, `[B, T, N]`. A cotangent of `lse` that is None is zero."""
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
    """The cotangents of rows, whatever keys they are pulled back to."""

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


def backward_unrounded(
    operands: Operands,
    settings: Settings,
    given: RowCotangents,
    sizes: BlockSizes = BLOCK_SIZES,
) -> Operands:
    """`backward` with cotangents in the dtype of the scores, for further sums.

    `given` may be of the state of more keys than these; weights are then relative to all of them.
    """
    (query, key, value), bias = operands.qkv, operands.bias
    dtype = lse_dtype(query.dtype)
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, dtype=dtype), differentiated(operands))
    (batch, query_len), key_len = query.shape[:2], key.shape[1]
    if batch == 0 or query_len == 0 or key_len == 0:
        return zeros
    rows = backward_rows(operands, settings, given)
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
        found, so_far = backward_unrounded(operands, settings, rows), d_query
    else:
        if settings.score is not None and indices.heads is None:
            indices = indices._replace(heads=jnp.arange(heads, dtype=jnp.int32))
            operands = operands._replace(indices=indices)
        found, so_far = _head_by_head(d_query, operands, settings, rows), None
    (query, key, value), in_flight = after_products(found.qkv, in_flight)
    query = query if so_far is None else query + so_far
    return found._replace(query=query, key=key, value=value), in_flight


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
