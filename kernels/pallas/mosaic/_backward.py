"""The Hopper backward kernels: dQ loops over keys, dK and dV loop over queries.

One program sums the whole gradient of its tile, in float32, so that the order of the sum is deterministic; dK and dV
sum over the query heads that share a key head. Each warp group recomputes the scores of 64 rows, or transposed of
64 keys, so that the weights are in the registers that the next product reads. A kernel's parameters are the references
that `launch` passes. Equations: FlashAttention-2 (Dao, arXiv 2307.08691).
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from ..._varying import result_like
from ...call._operands import Operands, cotangents
from ...call._state import AttentionState
from ...xla._blockwise_derivatives import BackwardRows, backward_rows, row_cotangents
from .._tiles import LOG2_E, divide
from . import _tile as tiles
from ._kernel import (
    ROWS,
    MosaicPlan,
    aligned,
    chunk,
    numbers_of_rows,
    pack_heads,
    stack_heads,
    sum_of_parts,
    unstack_heads,
    zero_hidden_keys,
)
from ._tile import MosaicProgram, Ref, SlotRing


def backward(
    operands: Operands,
    query_plan: MosaicPlan,
    key_plan: MosaicPlan,
    state: AttentionState,
    cotangent: AttentionState,
    *,
    interpret: bool,
) -> Operands:
    rows = backward_rows(operands, query_plan.settings, row_cotangents(state, cotangent))
    query_len, kv_heads = operands.query.shape[1], query_plan.kv_heads
    operands = operands._replace(query=rows.query)
    if query_plan.packed:
        operands = pack_heads(operands, query_plan.settings)
        rows = BackwardRows(*(stack_heads(x, kv_heads) for x in rows))
    operands = zero_hidden_keys(operands, query_plan, operands)
    rows = rows._replace(d_out=rows.d_out.astype(operands.value.dtype))
    d_query = _query_gradient(operands, query_plan, rows, interpret)
    if query_plan.packed:
        d_query = unstack_heads(d_query, query_len)
    d_key, d_value = _key_gradients(operands, key_plan, rows, interpret)
    return cotangents(d_query, d_key, d_value)


def _query_gradient(
    operands: Operands, plan: MosaicPlan, rows: BackwardRows, interpret: bool
) -> Array:
    query, key, value, d_out = map(aligned, (*operands.qkv, rows.d_out))
    partial_dtype = query.dtype if plan.splits == 1 else jnp.float32
    shape = plan.splits * plan.batch, *query.shape[1:]
    (d_query,) = tiles.launch(
        _query_kernel,
        plan,
        operands,
        (query, key, value, d_out, _numbers(rows, plan)),
        [result_like(query, shape, partial_dtype)],
        [
            tiles.tile_memory((plan.consumers, ROWS, plan.width), query.dtype),
            tiles.tile_memory((plan.consumers, ROWS, plan.value_width), value.dtype),
            tiles.ring(plan, plan.keys, (plan.width, plan.value_width), key.dtype),
            tiles.tile_memory((plan.consumers, ROWS, chunk(plan.width)), partial_dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=plan.consumers),
        ],
        interpret=interpret,
    )
    return sum_of_parts(d_query[:, : plan.query_len], plan, query.dtype)


def _key_gradients(
    operands: Operands, plan: MosaicPlan, rows: BackwardRows, interpret: bool
) -> Sequence[Array]:
    query, key, value, d_out = map(aligned, (*operands.qkv, rows.d_out))
    numbers = plgpu.SMEM((plan.stages, 2, plan.row_times), jnp.float32)
    sums = tiles.launch(
        _key_kernel,
        plan,
        operands,
        (query, key, value, d_out, _numbers(rows, plan)),
        [result_like(query, x.shape, x.dtype) for x in (key, value)],
        [
            tiles.tile_memory((plan.consumers, ROWS, plan.width), key.dtype),
            tiles.tile_memory((plan.consumers, ROWS, plan.value_width), value.dtype),
            tiles.ring(plan, plan.row_times, (plan.width, plan.value_width), key.dtype, numbers),
            plgpu.Barrier(num_arrivals=2, num_barriers=plan.consumers),
        ],
        of_keys=True,
        interpret=interpret,
    )
    return [x[:, : plan.key_len] for x in sums]


def _numbers(rows: BackwardRows, plan: MosaicPlan) -> Float[Array, "B N 2 R"]:
    # Lse in bits and delta per row; padding rows have lse = inf, and so weights 0.
    lse = numbers_of_rows(rows.lse, plan, jnp.inf) * LOG2_E
    return jnp.stack([lse, numbers_of_rows(rows.delta, plan, 0.0)], axis=2)


def _query_kernel(
    program: MosaicProgram,
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    out_ref: Ref,
    numbers_ref: Ref,
    d_query_ref: Ref,
    query_tile: Ref,
    out_tile: Ref,
    ring: SlotRing,
    result_tile: Ref,
    ready: Any,
) -> None:
    plan, interpret = program.plan, program.interpret

    def sources(i: Array) -> Sequence[tuple[Sequence[Any], SlotRing]]:
        tile = program.iterated(i)
        return [([program.keys(ref, tile) for ref in (key_ref, value_ref)], ring)]

    def compute(group: Array) -> None:
        row = program.tile * plan.row_times + group * ROWS
        query, d_out = kept_tiles = query_tile.at[group], out_tile.at[group]
        kept_rows = [program.rows(ref, row) for ref in (query_ref, out_ref)]
        tiles.start_copies(kept_rows, kept_tiles, ready.at[group])
        lse, delta = (
            tiles.load(
                numbers_ref.at[program.batch, program.head, i, pl.ds(row, ROWS)], tiles.OF_ROWS
            )
            for i in range(2)
        )
        plgpu.barrier_wait(ready.at[group])
        factor = plan.settings.scale * LOG2_E

        def step(i: Array, sums: Array, masked: bool) -> Array:
            slot, (key, value) = tiles.filled(plan, ring, i)
            scores = tiles.products((query, key)) * factor
            weights = jnp.exp2(scores - tiles.of_rows(lse, plan.keys))
            if masked:
                visible = program.seen(row, program.iterated(i) * plan.keys, weights.shape)
                weights = jnp.where(visible, weights, 0.0)
            # dS = P (dOut V^T - delta), P = e^(S - lse), delta = dOut·out - dlse; dQ = scale dS K
            d_weights = tiles.products((d_out, value))
            d_scores = weights * (d_weights - tiles.of_rows(delta, plan.keys))
            sums = tiles.add_product(sums, d_scores.astype(key.dtype), key, interpret)
            plgpu.barrier_arrive(ring.free.at[slot])
            return sums

        sums = program.loop(step, tiles.constant((ROWS, plan.width), 0.0, tiles.TILE))
        result_slice = d_query_ref.at[program.part, pl.ds(row, ROWS), program.head]
        tiles.store(sums * plan.settings.scale, result_tile.at[group], result_slice)

    tiles.share(plan, program.steps, sources, compute)


def _key_kernel(
    program: MosaicProgram,
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    out_ref: Ref,
    numbers_ref: Ref,
    d_key_ref: Ref,
    d_value_ref: Ref,
    key_tile: Ref,
    value_tile: Ref,
    ring: SlotRing,
    ready: Any,
) -> None:
    # one function, as `_kernel` of the forward: the pipeline of a warp group
    plan, interpret = program.plan, program.interpret

    def rows_at(i: Array) -> tuple[Array, Array]:
        # The first row of a step, and its head, which varies faster than the tile of rows.
        number, head = divide(i, plan.group)
        return program.iterated(number) * plan.row_times, program.head * plan.group + head

    def sources(i: Array) -> Sequence[tuple[Sequence[Any], SlotRing]]:
        row, head = rows_at(i)
        rows = pl.ds(row, plan.row_times)
        refs = (
            *(x.at[program.batch, rows, head] for x in (query_ref, out_ref)),
            numbers_ref.at[program.batch, head, :, rows],
        )
        return [(refs, ring)]

    def compute(group: Array) -> None:
        first = program.tile * plan.keys + group * ROWS
        key, value = kept_tiles = key_tile.at[group], value_tile.at[group]
        kept_rows = [program.rows(ref, first) for ref in (key_ref, value_ref)]
        tiles.start_copies(kept_rows, kept_tiles, ready.at[group])
        plgpu.barrier_wait(ready.at[group])
        factor = plan.settings.scale * LOG2_E

        def step(i: Array, carry: tuple[Array, Array], masked: bool) -> tuple[Array, Array]:
            slot, (query, d_out, numbers) = tiles.filled(plan, ring, i)
            d_key, d_value = carry
            # P^T = e^(K Q^T - lse); dV = P^T dOut; dK = scale dS^T Q. This order of products keeps the
            # sums, two tiles and few other numbers in registers.
            scores = tiles.products((key, query))
            lse = tiles.load(numbers.at[0], tiles.OF_COLUMNS)
            weights = jnp.exp2(scores * factor - tiles.of_columns(lse, ROWS))
            if masked:
                row, _ = rows_at(i)
                visible = program.seen(row, first, weights.shape)
                weights = jnp.where(visible, weights, 0.0)
            added = weights.astype(d_out.dtype), d_out
            d_value = tiles.add_product(d_value, *added, interpret)
            d_weights = tiles.products((value, d_out))
            delta = tiles.load(numbers.at[1], tiles.OF_COLUMNS)
            d_scores = weights * (d_weights - tiles.of_columns(delta, ROWS))
            added = d_scores.astype(query.dtype), query
            d_key = tiles.add_product(d_key, *added, interpret)
            plgpu.barrier_arrive(ring.free.at[slot])
            return d_key, d_value

        d_key, d_value = (
            tiles.constant((ROWS, width), 0.0, tiles.TILE)
            for width in (plan.width, plan.value_width)
        )
        d_key, d_value = program.loop(step, (d_key, d_value), plan.group)
        # the products that read these tiles have ended, so they can hold the results
        tiles.store(d_key * plan.settings.scale, key, program.rows(d_key_ref, first))
        tiles.store(d_value, value, program.rows(d_value_ref, first))

    tiles.share(plan, program.steps * plan.group, sources, compute)
