"""The Hopper kernel of the state's derivative in a direction: one pass over the keys of rows.

Each group of warps recomputes the weights of its 64 rows from the saved energies, so the sums of
programs that split the keys add up. The formulas are those of `AbstractKernel.tangent`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ..._varying import result_like
from ...call._operands import Operands
from ...call._state import AttentionState
from .._rows import Visibility, moving_arrays, pad_to_blocks, tile_ranges, visibility_of
from . import _tile as tiles
from ._plan import (
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
from ._tile import Ref, SlotRing


class KeyBuffers(NamedTuple):
    """The buffers of a tile of keys; None where the directions do not need them."""

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
        rows = plan._replace(packed=False)
        d_state = tangent(operands, rows, state, directions, interpret=interpret)
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
    visibility = visibility_of(operands, plan)
    batch, tokens, heads, _ = query.shape
    splits_and_batch, length = plan.splits * batch, plan.row_tiles * plan.row_times
    partial_dtype = state.out.dtype if plan.splits == 1 else jnp.float32
    d_out, d_lse = tiles.call(
        _kernel,
        plan,
        (
            *(rows, keys, pad_to_blocks(state.out, 1, plan.row_times, 0) if scores else None),
            *(numbers_of_rows(state.lse, plan, -jnp.inf), visibility),
            tile_ranges(operands, visibility, plan, of_keys=False),
        ),
        [
            result_like(query, (splits_and_batch, tokens, heads, plan.value_width), partial_dtype),
            result_like(query, (splits_and_batch, heads, length), jnp.float32),
        ],
        [
            [tiles.tile_memory((plan.consumers, ROWS, plan.width), query.dtype) for _ in rows],
            tiles.ring(plan, plan.keys, [x.shape[-1] for x in keys if x is not None], key.dtype),
            tiles.tile_memory((plan.consumers, ROWS, chunk(plan.value_width)), partial_dtype),
            plgpu.Barrier(num_arrivals=len(rows), num_barriers=plan.consumers),
        ],
        programs=plan.row_tiles * heads * splits_and_batch,
        interpret=interpret,
    )
    partial = d_out[:, : plan.query_len], d_lse[:, :, : plan.query_len].swapaxes(1, 2)
    pairs = zip(partial, state, strict=True)
    return AttentionState(*(sum_of_parts(x, plan, like.dtype) for x, like in pairs))


def _kernel(
    plan: MosaicPlan,
    interpret: bool,
    rows: Sequence[Ref],
    keys: KeyBuffers,
    out_ref: Ref | None,
    lse_ref: Ref,
    visibility: Visibility,
    ranges: Ref | None,
    d_out_ref: Ref,
    d_lse_ref: Ref,
    row_tiles: Sequence[Ref],
    ring: SlotRing,
    result_tile: Ref,
    ready: Any,
) -> None:
    program = tiles.program_index(plan, plan.row_tiles, plan.heads)
    tile_range = tiles.tile_range(plan, ranges, program)

    def sources(i: Array) -> Sequence[tuple[Sequence[Any], SlotRing]]:
        tile = tile_range.tile(i)
        present = (ref for ref in keys if ref is not None)
        return [([tiles.keys_of(plan, ref, program, tile) for ref in present], ring)]

    def compute(group: Array) -> None:
        row = program.tile * plan.row_times + group * ROWS
        row_slice = program.batch, pl.ds(row, ROWS), program.head
        query, *d_query = tiles_of_rows = [tile.at[group] for tile in row_tiles]
        for ref, tile in zip(rows, tiles_of_rows, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[row_slice], tile, ready.at[group])
        lse = tiles.load(lse_ref.at[program.batch, program.head, pl.ds(row, ROWS)], tiles.OF_ROWS)
        # a row without keys has no weight
        shift = jnp.where(lse == -jnp.inf, jnp.inf, lse * tiles.LOG2_E)
        plgpu.barrier_wait(ready.at[group])
        scale = plan.settings.scale

        def step(i: Array, carry: tuple[Array, Array], masked: bool) -> tuple[Array, Array]:
            total, sums = carry
            slot, filled = tiles.filled(plan, ring, i)
            remaining = iter(filled)
            tile = KeyBuffers(*(None if ref is None else next(remaining) for ref in keys))
            scores = tiles.products((query, tile.key)) * (scale * tiles.LOG2_E)
            weights = jnp.exp2(scores - tiles.of_rows(shift, plan.keys))
            if masked:
                first = tile_range.tile(i) * plan.keys
                visible = tiles.seen(plan, visibility, program, row, first, weights.shape)
                weights = jnp.where(visible, weights, 0.0)
            # in this order the sums, two tiles and one of 16 bits fit into the registers
            if tile.d_value is not None:
                added = weights.astype(tile.d_value.dtype), tile.d_value
                sums = tiles.add_product(sums, *added, interpret)
            if tile.value is not None:
                pairs = [(x, tile.key) for x in d_query]
                if tile.d_key is not None:
                    pairs.append((query, tile.d_key))
                terms = weights * (tiles.products(*pairs) * scale)
                total += terms.sum(1)
                sums = tiles.add_product(
                    sums, terms.astype(tile.value.dtype), tile.value, interpret
                )
            plgpu.barrier_arrive(ring.free.at[slot])
            return total, sums

        start = (
            tiles.constant((ROWS,), 0.0, tiles.OF_ROWS),
            tiles.constant((ROWS, plan.value_width), 0.0, tiles.TILE),
        )
        total, sums = tile_range.loop(step, start)
        part = program.split * plan.batch + program.batch
        total = jnp.where(lse == -jnp.inf, 0.0, total)
        d_lse_ref.at[part, program.head, pl.ds(row, ROWS)][...] = total
        if out_ref is not None:
            out = tiles.load(out_ref.at[row_slice], tiles.TILE).astype(jnp.float32)
            sums -= tiles.of_rows(total, plan.value_width) * out
        sums = jnp.where(tiles.of_rows(lse, plan.value_width) == -jnp.inf, 0.0, sums)
        result_slice = d_out_ref.at[part, pl.ds(row, ROWS), program.head]
        tiles.store(sums, result_tile.at[group], result_slice)

    tiles.share(plan, tile_range.steps, sources, compute)
