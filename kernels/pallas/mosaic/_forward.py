"""The Hopper kernels of the state and of its tangent: one pass over the keys of each tile of rows.

One warp group copies keys and values into shared memory, some tiles ahead. Each of the others computes 64 rows: while
one multiplies, the other takes its softmax. If rows are few, programs split their keys, and online softmax merges the
states. The tangent takes its weights from the saved lse, so that its parts add up; its equations are in
`AbstractKernel.tangent`.

Sources: the online softmax of Milakov and Gimelshein (arXiv 1805.02867); FlashAttention-3 (Shah et
al., arXiv 2407.08608) for the alternating warp groups; Flash-Decoding for the split.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array

from ..._varying import result_like
from ...call._operands import Operands, out_dtype
from ...call._state import AttentionState, merge_all
from .._rows import moving_arrays, pad_to_blocks
from .._tiles import LOG2_E, divide
from . import _tile as tiles
from ._kernel import (
    ROWS,
    MosaicPlan,
    aligned,
    chunk,
    numbers_of_rows,
    pack_heads,
    scores_move,
    stack_heads,
    sum_of_parts,
    unstack_heads,
    zero_hidden_keys,
)
from ._tile import MosaicProgram, Ref, SlotRing


def _parts_like(query: Array, plan: MosaicPlan, dtype: DTypeLike) -> list[jax.ShapeDtypeStruct]:
    """Types of the states, or tangents, of all programs; float32 where several share keys."""
    (batch, tokens, heads, _), length = query.shape, plan.row_tiles * plan.row_times
    parts, dtype = plan.splits * batch, dtype if plan.splits == 1 else jnp.float32
    return [
        result_like(query, (parts, tokens, heads, plan.value_width), dtype),
        result_like(query, (parts, heads, length), jnp.float32),
    ]


def _without_padding(state: Sequence[Array], plan: MosaicPlan) -> AttentionState:
    out, lse = state
    return AttentionState(out[:, : plan.query_len], lse[:, :, : plan.query_len].swapaxes(1, 2))


def forward(operands: Operands, plan: MosaicPlan, *, interpret: bool) -> AttentionState:
    if plan.packed:
        rows, plan = pack_heads(operands, plan.settings), dataclasses.replace(plan, packed=False)
        state = forward(rows, plan, interpret=interpret)
        return AttentionState(*(unstack_heads(x, operands.query.shape[1]) for x in state))
    query, key, value = map(aligned, operands.qkv)
    dtype = out_dtype(operands, plan.settings)
    results = _parts_like(query, plan, dtype)
    state = tiles.launch(
        _kernel,
        plan,
        operands,
        (query, key, value),
        results,
        [
            tiles.tile_memory((plan.consumers, ROWS, plan.width), query.dtype),
            tiles.ring(plan, plan.keys, [plan.width], key.dtype),
            tiles.ring(plan, plan.keys, [plan.value_width], value.dtype),
            tiles.tile_memory((plan.consumers, ROWS, chunk(plan.value_width)), results[0].dtype),
            plgpu.Barrier(num_barriers=plan.consumers),
            plgpu.Barrier(num_arrivals=plan.consumers),
        ],
        interpret=interpret,
    )
    state = _without_padding(state, plan)
    if plan.splits == 1:
        return state
    split = AttentionState(*(x.reshape(plan.splits, plan.batch, *x.shape[1:]) for x in state))
    merged = merge_all(split)
    return AttentionState(merged.out.astype(dtype), merged.lse)


def _kernel(
    program: MosaicProgram,
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    query_tile: Ref,
    keys: SlotRing,
    values: SlotRing,
    out_tile: Ref,
    query_ready: Any,
    turn: Any,
) -> None:
    # The parameters are the refs that `launch` passes. `compute` holds the pipeline of one warp group: its barriers
    # order it against the copies and the other group, so its steps are kept together.
    plan, interpret = program.plan, program.interpret

    def sources(i: Array) -> Sequence[tuple[Sequence[Any], SlotRing]]:
        return [
            ([program.keys(ref, program.iterated(i))], ring)
            for ref, ring in ((key_ref, keys), (value_ref, values))
        ]

    def compute(group: Array) -> None:
        row = program.tile * plan.row_times + group * ROWS
        query, ready = query_tile.at[group], query_ready.at[group]
        tiles.start_copies([program.rows(query_ref, row)], [query], ready)
        plgpu.barrier_wait(ready)
        scale = plan.settings.scale
        # scores here are products, negated products or zeros, by the sign of the scale
        unit = abs(scale) or 1.0
        bits = unit * LOG2_E

        def change_turns() -> None:
            if plan.consumers > 1:
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

        def step(i: Array, carry: tuple[Array, Array, Array], masked: bool) -> Any:
            maximum, total, sums = carry
            _, slot = divide(i, plan.stages)
            plgpu.barrier_wait(keys.ready.at[slot])
            scores = tiles.products((query, keys.tiles[0].at[slot]), meanwhile=change_turns)
            plgpu.barrier_arrive(keys.free.at[slot])
            if scale <= 0:  # the largest score is not that of the largest product
                scores = scores * math.copysign(bool(scale), scale)
            if masked:
                visible = program.seen(row, program.iterated(i) * plan.keys, scores.shape)
                scores = jnp.where(visible, scores, -jnp.inf)
            # m' = max(m, max S); l = l e^(m - m') + sum e^(S - m'); o = o e^(m - m') + e^(S - m') V
            new = jnp.maximum(maximum, scores.max(1))
            shift = jnp.where(new > -jnp.inf, new, 0.0) if masked else new
            # subtract first: the difference is 0 where the score is the maximum, which a fused product rounds
            weights = jnp.exp2((scores - tiles.of_rows(shift, plan.keys)) * bits)
            decay = jnp.exp2((maximum - shift) * bits)
            total = total * decay + weights.sum(1)
            sums = sums * tiles.of_rows(decay, plan.value_width)
            narrow = weights.astype(value_ref.dtype)
            change_turns()
            plgpu.barrier_wait(values.ready.at[slot])
            value = values.tiles[0].at[slot]
            if masked and plan.hides(program.visibility.key_positions):
                hidden = program.iterated(i), value
                # the first group's product has ended when the other reads the values
                pl.when(group == 0)(lambda: program.zero_hidden(*hidden))
            sums = tiles.add_product(sums, narrow, value, interpret)
            plgpu.barrier_arrive(values.free.at[slot])
            return new, total, sums

        start = (
            tiles.constant((ROWS,), -math.inf, tiles.OF_ROWS),
            tiles.constant((ROWS,), 0.0, tiles.OF_ROWS),
            tiles.constant((ROWS, plan.value_width), 0.0, tiles.TILE),
        )
        pl.when(group == 1)(change_turns)  # half a step behind
        maximum, total, sums = program.loop(step, start)
        pl.when(group == 0)(change_turns)
        largest = maximum * unit
        # the score of a finite product may overflow
        total = jnp.where(largest < math.inf, total, math.nan)
        if (positions := program.visibility.row_positions) is not None:
            positions = program.load_numbers(positions, row, ROWS, tiles.OF_ROWS)
            total = jnp.where(positions >= 0, total, 0.0)
        # out = o / l, lse = m + log l
        part = program.part
        lse = jnp.where(total == 0, -jnp.inf, largest + jnp.log(total))
        lse_ref.at[part, program.head, pl.ds(row, ROWS)][...] = lse
        divisor = tiles.of_rows(total, plan.value_width)
        out = jnp.where(divisor == 0, 0.0, sums / jnp.where(divisor == 0, 1.0, divisor))
        result_slice = out_ref.at[part, pl.ds(row, ROWS), program.head]
        tiles.store(out, out_tile.at[group], result_slice)

    tiles.share(plan, program.steps, sources, compute)


class KeyBuffers(NamedTuple):
    """Buffers of a tile of keys; None for operands that this tangent does not need."""

    key: Any
    value: Any
    d_key: Any
    d_value: Any


def tangent(
    operands: Operands,
    plan: MosaicPlan,
    state: AttentionState,
    directions: Operands,
    *,
    interpret: bool,
) -> AttentionState:
    if plan.packed:
        kv_heads, length = plan.kv_heads, operands.query.shape[1]
        operands = pack_heads(operands, plan.settings)
        state = AttentionState(*(stack_heads(x, kv_heads) for x in state))
        if directions.query is not None:
            directions = directions._replace(query=stack_heads(directions.query, kv_heads))
        plan = dataclasses.replace(plan, packed=False)
        d_state = tangent(operands, plan, state, directions, interpret=interpret)
        return AttentionState(*(unstack_heads(x, length) for x in d_state))
    moving = moving_arrays(zero_hidden_keys(operands, plan, directions))
    operands = zero_hidden_keys(operands, plan, operands)
    query, key, value = map(aligned, operands.qkv)
    d_query, d_key, d_value = (
        aligned(moving[name]) if name in moving else None for name in ("query", "key", "value")
    )
    scores = scores_move(moving)
    rows = [x for x in (query, d_query) if x is not None]
    keys = KeyBuffers(key, value if scores else None, d_key, d_value)
    results = _parts_like(query, plan, state.out.dtype)
    out = pad_to_blocks(state.out, 1, plan.row_times, 0) if scores else None
    d_state = tiles.launch(
        _tangent_kernel,
        plan,
        operands,
        (rows, keys, out, numbers_of_rows(state.lse, plan, -jnp.inf)),
        results,
        [
            [tiles.tile_memory((plan.consumers, ROWS, plan.width), query.dtype) for _ in rows],
            tiles.ring(plan, plan.keys, [x.shape[-1] for x in keys if x is not None], key.dtype),
            tiles.tile_memory((plan.consumers, ROWS, chunk(plan.value_width)), results[0].dtype),
            plgpu.Barrier(num_arrivals=len(rows), num_barriers=plan.consumers),
        ],
        interpret=interpret,
    )
    pairs = zip(_without_padding(d_state, plan), state, strict=True)
    return AttentionState(*(sum_of_parts(x, plan, like.dtype) for x, like in pairs))


def _tangent_kernel(
    program: MosaicProgram,
    rows: Sequence[Ref],
    keys: KeyBuffers,
    out_ref: Ref | None,
    lse_ref: Ref,
    d_out_ref: Ref,
    d_lse_ref: Ref,
    row_tiles: Sequence[Ref],
    ring: SlotRing,
    result_tile: Ref,
    ready: Any,
) -> None:
    # one function, as `_kernel`: the pipeline of a warp group
    plan, interpret = program.plan, program.interpret

    def sources(i: Array) -> Sequence[tuple[Sequence[Any], SlotRing]]:
        tile = program.iterated(i)
        return [([program.keys(ref, tile) for ref in keys if ref is not None], ring)]

    def compute(group: Array) -> None:
        row = program.tile * plan.row_times + group * ROWS
        query, *d_query = tiles_of_rows = [tile.at[group] for tile in row_tiles]
        tiles.start_copies([program.rows(x, row) for x in rows], tiles_of_rows, ready.at[group])
        lse = tiles.load(lse_ref.at[program.batch, program.head, pl.ds(row, ROWS)], tiles.OF_ROWS)
        # a fully masked row has weights 0
        shift = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)
        plgpu.barrier_wait(ready.at[group])
        scale = plan.settings.scale

        def step(i: Array, carry: tuple[Array, Array], masked: bool) -> tuple[Array, Array]:
            total, sums = carry
            slot, filled = tiles.filled(plan, ring, i)
            remaining = iter(filled)
            tile = KeyBuffers(*(None if ref is None else next(remaining) for ref in keys))
            scores = tiles.products((query, tile.key)) * (scale * LOG2_E)
            weights = jnp.exp2(scores - tiles.of_rows(shift, plan.keys))
            if masked:
                visible = program.seen(row, program.iterated(i) * plan.keys, weights.shape)
                weights = jnp.where(visible, weights, 0.0)
            # dS = scale (dQ K^T + Q dK^T); dlse = sum P dS; dout = P (dS V + dV) - dlse out. This order of
            # products keeps the sums, two tiles and one of 16 bits in registers.
            if tile.d_value is not None:
                added = weights.astype(tile.d_value.dtype), tile.d_value
                sums = tiles.add_product(sums, *added, interpret)
            if tile.value is not None:
                pairs = [(x, tile.key) for x in d_query]
                if tile.d_key is not None:
                    pairs.append((query, tile.d_key))
                terms = weights * (tiles.products(*pairs) * scale)
                total += terms.sum(1)
                added = terms.astype(tile.value.dtype), tile.value
                sums = tiles.add_product(sums, *added, interpret)
            plgpu.barrier_arrive(ring.free.at[slot])
            return total, sums

        start = (
            tiles.constant((ROWS,), 0.0, tiles.OF_ROWS),
            tiles.constant((ROWS, plan.value_width), 0.0, tiles.TILE),
        )
        total, sums = program.loop(step, start)
        part = program.part
        total = jnp.where(lse == -jnp.inf, 0.0, total)
        d_lse_ref.at[part, program.head, pl.ds(row, ROWS)][...] = total
        # dout = Σ P (dS V + dV) - dlse out
        if out_ref is not None:
            out = tiles.load(program.rows(out_ref, row), tiles.TILE).astype(jnp.float32)
            sums -= tiles.of_rows(total, plan.value_width) * out
        sums = jnp.where(tiles.of_rows(lse, plan.value_width) == -jnp.inf, 0.0, sums)
        result_slice = d_out_ref.at[part, pl.ds(row, ROWS), program.head]
        tiles.store(sums, result_tile.at[group], result_slice)

    tiles.share(plan, program.steps, sources, compute)
