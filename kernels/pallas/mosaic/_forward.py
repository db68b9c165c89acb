"""The Hopper kernel of the state: online softmax over tiles of keys, in two groups of warps by turns.

One group of warps starts the copies of keys and values into shared memory, some tiles ahead. Each of
the others computes on 64 rows: while one multiplies, the other takes its softmax. Where rows are few,
their keys are split over programs, whose states are merged.

Sources: the online softmax of Milakov and Gimelshein (arXiv 1805.02867); FlashAttention-3 (Shah et
al., arXiv 2407.08608) for the groups of warps and their turns; Flash-Decoding for the split.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ...call._operands import Operands, out_dtype
from ...call._state import AttentionState, merge_all
from .._common import result_like
from .._ranges import tile_ranges, visibility_of
from . import _tile as tiles
from ._plan import ROWS, Plan, chunk, pack_heads, unpack_heads
from ._tile import Ref


def forward(operands: Operands, plan: Plan, *, interpret: bool) -> AttentionState:
    """The state of a call, by a plan."""
    if plan.packed:
        rows = pack_heads(operands, plan.settings)
        state = forward(rows, plan._replace(packed=False), interpret=interpret)
        return unpack_heads(state, operands)
    query, key, value = operands[:3]
    given = visibility_of(operands, plan)
    found = tile_ranges(operands, given, plan, of_keys=False)
    arrays, tree = jax.tree.flatten((given, found))
    batch, query_len, heads, _ = query.shape
    parts = plan.splits * batch
    dtype = out_dtype(operands, plan.settings)
    wide = dtype if plan.splits == 1 else jnp.float32
    columns = chunk(plan.value_width)
    keys = plan.stages, plan.keys
    ready = plgpu.Barrier(num_barriers=plan.stages)
    free = plgpu.Barrier(num_arrivals=plan.consumers, num_barriers=plan.stages)
    out, lse = plgpu.kernel(
        functools.partial(_kernel, plan, tree, interpret),
        out_type=[
            result_like(query, (parts, query_len, heads, plan.value_width), wide),
            result_like(query, (parts, heads, plan.row_tiles * plan.row_times), jnp.float32),
        ],
        scratch_types=[
            tiles.tile_memory((plan.consumers, ROWS, plan.width), query.dtype),
            tiles.tile_memory((*keys, plan.width), key.dtype),
            tiles.tile_memory((*keys, plan.value_width), value.dtype),
            tiles.tile_memory((plan.consumers, ROWS, columns), wide),
            plgpu.Barrier(num_barriers=plan.consumers),
            *(ready, ready, free, free),
            plgpu.Barrier(num_arrivals=plan.consumers),
        ],
        grid=(plan.row_tiles * heads * parts,),
        grid_names=("program",),
        num_threads=plan.consumers + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **tiles.interpreted(interpret),
    )(query, key, value, *arrays)
    lse = lse[:, :, :query_len].swapaxes(1, 2)
    if plan.splits == 1:
        return AttentionState(out, lse)
    split = AttentionState(*(x.reshape(plan.splits, batch, *x.shape[1:]) for x in (out, lse)))
    merged = merge_all(split)
    return AttentionState(merged.out.astype(dtype), merged.lse)


def _kernel(
    plan: Plan,
    tree: Any,
    interpret: bool,
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    *refs: Ref,
) -> None:
    count = tree.num_leaves
    visibility, found = jax.tree.unflatten(tree, refs[:count])
    out_ref, lse_ref, query_tile, key_tiles, value_tiles, out_tile, *rest = refs[count:]
    barriers: Any = rest
    query_ready, key_ready, value_ready, key_free, value_free, turn = barriers
    at = tiles.program_index(plan, plan.row_tiles, plan.heads)
    kv_head, _ = tiles.divide(at.head, plan.group)
    over = tiles.tile_range(plan, found, at)
    group = lax.axis_index("group")

    @pl.when(group == plan.consumers)
    def copy() -> None:
        if plan.consumers > 1:
            plgpu.set_max_registers(tiles.COPYING, action="decrease")

        @pl.loop(0, over.steps)
        def step(i: Array) -> None:
            round, slot = tiles.divide(i, plan.stages)
            here = at.batch, pl.ds(over.tile(i) * plan.keys, plan.keys), kv_head
            for ref, tile, ready, free in (
                (key_ref, key_tiles, key_ready, key_free),
                (value_ref, value_tiles, value_ready, value_free),
            ):
                pl.when(round > 0)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                plgpu.copy_gmem_to_smem(ref.at[here], tile.at[slot], ready.at[slot])

    @pl.when(group < plan.consumers)
    def compute() -> None:
        if plan.consumers > 1:
            plgpu.set_max_registers(tiles.COMPUTING, action="increase")
        row = at.tile * plan.row_times + group * ROWS
        own = query_tile.at[group]
        here = at.batch, pl.ds(row, ROWS), at.head
        plgpu.copy_gmem_to_smem(query_ref.at[here], own, query_ready.at[group])
        plgpu.barrier_wait(query_ready.at[group])
        factor = plan.settings.scale * tiles.LOG2_E

        def change_turns() -> None:
            if plan.consumers > 1:
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

        def step(i: Array, carry: tuple[Array, Array, Array], masked: bool) -> Any:
            maximum, total, sums = carry
            _, slot = tiles.divide(i, plan.stages)
            plgpu.barrier_wait(key_ready.at[slot])
            scores = tiles.product(own, key_tiles.at[slot], change_turns)
            plgpu.barrier_arrive(key_free.at[slot])
            after = factor
            if factor <= 0:  # the maximum is of the scores, not of the products
                scores, after = scores * factor, 1.0
            if masked:
                see = tiles.seen(plan, visibility, at, row, over.tile(i))
                scores = jnp.where(see, scores, -jnp.inf)
            new = jnp.maximum(maximum, scores.max(1) * after)
            shift = jnp.where(new > -jnp.inf, new, 0.0) if masked else new
            weights = jnp.exp2(scores * after - tiles.of_rows(shift, plan.keys))
            decay = jnp.exp2(maximum - shift)
            total = total * decay + weights.sum(1)
            sums = sums * tiles.of_rows(decay, plan.value_width)
            narrow = weights.astype(value_ref.dtype)
            change_turns()
            plgpu.barrier_wait(value_ready.at[slot])
            if masked and tiles.hides(plan, visibility):
                hidden = visibility, at, over.tile(i), value_tiles.at[slot]
                # the first group is done with its product when the other comes to the values
                pl.when(group == 0)(lambda: tiles.zero_hidden(plan, *hidden))
            sums = tiles.add_product(sums, narrow, value_tiles.at[slot], interpret)
            plgpu.barrier_arrive(value_free.at[slot])
            return new, total, sums

        start = (
            tiles.constant((ROWS,), -math.inf, tiles.OF_ROWS),
            tiles.constant((ROWS,), 0.0, tiles.OF_ROWS),
            tiles.constant((ROWS, plan.value_width), 0.0, tiles.TILE),
        )
        pl.when(group == 1)(change_turns)  # half a step behind
        carry = lax.fori_loop(0, over.run, functools.partial(step, masked=False), start)
        carry = lax.fori_loop(over.run, over.steps, functools.partial(step, masked=True), carry)
        pl.when(group == 0)(change_turns)
        maximum, total, sums = carry
        if visibility.row_positions is not None:
            positions = tiles.load_numbers(visibility.row_positions, at, row, ROWS, tiles.OF_ROWS)
            total = jnp.where(positions >= 0, total, 0.0)
        part = at.split * plan.batch + at.batch
        lse = jnp.where(total == 0, -jnp.inf, maximum * tiles.LN_2 + jnp.log(total))
        lse_ref.at[part, at.head, pl.ds(row, ROWS)][...] = lse
        divisor = tiles.of_rows(total, plan.value_width)
        out = jnp.where(divisor == 0, 0.0, sums / jnp.where(divisor == 0, 1.0, divisor))
        columns = out_tile.shape[-1]
        for column in range(0, plan.value_width, columns):
            own_out = out_tile.at[group]
            part_out = lax.slice(out, (0, column), (ROWS, column + columns))
            own_out[...] = part_out.astype(out_ref.dtype)
            plgpu.commit_smem()
            there = out_ref.at[part, pl.ds(row, ROWS), at.head, pl.ds(column, columns)]
            plgpu.copy_smem_to_gmem(own_out, there)
            plgpu.wait_smem_to_gmem(0, wait_read_only=column + columns < plan.value_width)
