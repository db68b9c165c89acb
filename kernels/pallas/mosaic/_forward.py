"""The Hopper kernel of the state: online softmax over tiles of keys, in two alternating groups of warps.

One group of warps starts the copies of keys and values into shared memory, some tiles ahead. Each of
the others computes on 64 rows: while one multiplies, the other takes its softmax. Where rows are few,
their keys are split over programs, whose states are merged.

Sources: the online softmax of Milakov and Gimelshein (arXiv 1805.02867); FlashAttention-3 (Shah et
al., arXiv 2407.08608) for the groups of warps and their turns; Flash-Decoding for the split.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ..._varying import result_like
from ...call._operands import Operands, out_dtype
from ...call._state import AttentionState, merge_all
from .._rows import Visibility, tile_ranges, visibility_of
from . import _tile as tiles
from ._plan import ROWS, MosaicPlan, aligned, chunk, pack_heads, unstack_heads
from ._tile import Ref, SlotRing


def forward(operands: Operands, plan: MosaicPlan, *, interpret: bool) -> AttentionState:
    if plan.packed:
        rows = pack_heads(operands, plan.settings)
        state = forward(rows, plan._replace(packed=False), interpret=interpret)
        length = operands.query.shape[1]
        return AttentionState(*(unstack_heads(x, length) for x in state))
    query, key, value = map(aligned, operands.qkv)
    visibility = visibility_of(operands, plan)
    batch, tokens, heads, _ = query.shape
    parts = plan.splits * batch
    dtype = out_dtype(operands, plan.settings)
    partial_dtype = dtype if plan.splits == 1 else jnp.float32
    out, lse = tiles.call(
        _kernel,
        plan,
        (query, key, value, visibility, tile_ranges(operands, visibility, plan, of_keys=False)),
        [
            result_like(query, (parts, tokens, heads, plan.value_width), partial_dtype),
            result_like(query, (parts, heads, plan.row_tiles * plan.row_times), jnp.float32),
        ],
        [
            tiles.tile_memory((plan.consumers, ROWS, plan.width), query.dtype),
            tiles.ring(plan, plan.keys, [plan.width], key.dtype),
            tiles.ring(plan, plan.keys, [plan.value_width], value.dtype),
            tiles.tile_memory((plan.consumers, ROWS, chunk(plan.value_width)), partial_dtype),
            plgpu.Barrier(num_barriers=plan.consumers),
            plgpu.Barrier(num_arrivals=plan.consumers),
        ],
        programs=plan.row_tiles * heads * parts,
        interpret=interpret,
    )
    out, lse = out[:, : plan.query_len], lse[:, :, : plan.query_len].swapaxes(1, 2)
    if plan.splits == 1:
        return AttentionState(out, lse)
    split = AttentionState(*(x.reshape(plan.splits, batch, *x.shape[1:]) for x in (out, lse)))
    merged = merge_all(split)
    return AttentionState(merged.out.astype(dtype), merged.lse)


def _kernel(
    plan: MosaicPlan,
    interpret: bool,
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    visibility: Visibility,
    ranges: Ref | None,
    out_ref: Ref,
    lse_ref: Ref,
    query_tile: Ref,
    keys: SlotRing,
    values: SlotRing,
    out_tile: Ref,
    query_ready: Any,
    turn: Any,
) -> None:
    program = tiles.program_index(plan, plan.row_tiles, plan.heads)
    tile_range = tiles.tile_range(plan, ranges, program)

    def sources(i: Array) -> Sequence[tuple[Sequence[Any], SlotRing]]:
        return [
            ([tiles.keys_of(plan, ref, program, tile_range.tile(i))], ring)
            for ref, ring in ((key_ref, keys), (value_ref, values))
        ]

    def compute(group: Array) -> None:
        row = program.tile * plan.row_times + group * ROWS
        query = query_tile.at[group]
        row_slice = program.batch, pl.ds(row, ROWS), program.head
        plgpu.copy_gmem_to_smem(query_ref.at[row_slice], query, query_ready.at[group])
        plgpu.barrier_wait(query_ready.at[group])
        scale = plan.settings.scale
        # scores here are products, negated products or zeros, by the sign of the scale
        unit = abs(scale) or 1.0
        bits = unit * tiles.LOG2_E

        def change_turns() -> None:
            if plan.consumers > 1:
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

        def step(i: Array, carry: tuple[Array, Array, Array], masked: bool) -> Any:
            maximum, total, sums = carry
            _, slot = tiles.divide(i, plan.stages)
            plgpu.barrier_wait(keys.ready.at[slot])
            scores = tiles.products((query, keys.tiles[0].at[slot]), meanwhile=change_turns)
            plgpu.barrier_arrive(keys.free.at[slot])
            if scale <= 0:  # the largest score is not that of the largest product
                scores = scores * math.copysign(bool(scale), scale)
            if masked:
                key = tile_range.tile(i) * plan.keys
                visible = tiles.seen(plan, visibility, program, row, key, scores.shape)
                scores = jnp.where(visible, scores, -jnp.inf)
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
            if masked and plan.hides(visibility.key_positions):
                hidden = visibility, program, tile_range.tile(i), values.tiles[0].at[slot]
                # the first group's product has ended when the other reads the values
                pl.when(group == 0)(lambda: tiles.zero_hidden(plan, *hidden))
            sums = tiles.add_product(sums, narrow, values.tiles[0].at[slot], interpret)
            plgpu.barrier_arrive(values.free.at[slot])
            return new, total, sums

        start = (
            tiles.constant((ROWS,), -math.inf, tiles.OF_ROWS),
            tiles.constant((ROWS,), 0.0, tiles.OF_ROWS),
            tiles.constant((ROWS, plan.value_width), 0.0, tiles.TILE),
        )
        pl.when(group == 1)(change_turns)  # half a step behind
        carry = tile_range.loop(step, start)
        pl.when(group == 0)(change_turns)
        maximum, total, sums = carry
        largest = maximum * unit
        # the score of a finite product may overflow
        total = jnp.where(largest < math.inf, total, math.nan)
        if visibility.row_positions is not None:
            positions = tiles.load_numbers(
                visibility.row_positions, program, row, ROWS, tiles.OF_ROWS
            )
            total = jnp.where(positions >= 0, total, 0.0)
        part = program.split * plan.batch + program.batch
        lse = jnp.where(total == 0, -jnp.inf, largest + jnp.log(total))
        lse_ref.at[part, program.head, pl.ds(row, ROWS)][...] = lse
        divisor = tiles.of_rows(total, plan.value_width)
        out = jnp.where(divisor == 0, 0.0, sums / jnp.where(divisor == 0, 1.0, divisor))
        result_slice = out_ref.at[part, pl.ds(row, ROWS), program.head]
        tiles.store(out, out_tile.at[group], result_slice)

    tiles.share(plan, tile_range.steps, sources, compute)
