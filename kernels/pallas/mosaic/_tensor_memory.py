"""The Blackwell kernel of the state: online softmax over tiles of keys, with scores and sums in tensor memory.

One group of warps starts the copies of keys and values into shared memory, some tiles ahead. Each of the
others computes on 128 rows, one in each of its threads. It starts a product and goes on: the tensor cores
write into a memory of their own, and arrive at a barrier when they are done. So the product of a tile's
scores runs beside the softmax of the tile before, and that of its weights and values beside the softmax of
the next, while the other group does the same with other rows.

Sources: the online softmax of Milakov and Gimelshein (arXiv 1805.02867); FlashAttention-4 (Zadouri et al.,
arXiv 2603.05451) for two tiles of 128 rows by turns and for weights in tensor memory; Flash-Decoding for the split.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array

from ...call._operands import Operands
from ...call._state import AttentionState
from .._rows import Visibility
from . import _tile as tiles
from ._forward import lse_of, quotient, state_by, weigh
from ._plan import LANES, Plan, chunk
from ._tile import Ref, Ring

ROW_IN_THREAD = plgpu.Layout.TCGEN05_TMEM_NATIVE
OF_ROWS = ROW_IN_THREAD.reduce(1)
# What is written into shared memory has a row in several threads, so that their writes do not collide.
ROW_IN_THREADS = plgpu.Layout.TCGEN05
# The columns of the sums that are in registers at a time, beside a tile of weights: more of them spill.
PART = 32


def forward(operands: Operands, plan: Plan, *, interpret: bool) -> AttentionState:
    """The state of a call, by a plan for tensor memory."""
    return state_by(_kernel, _scratch, operands, plan, interpret=interpret)


def _scratch(plan: Plan, operands: Operands, wide: DTypeLike) -> Sequence[Any]:
    groups, keys, value_width = plan.consumers, plan.keys, plan.value_width
    ring = functools.partial(tiles.ring, plan, keys, by_products=True)
    of_products = plgpu.Barrier(num_barriers=groups, orders_tensor_core=True)
    return [
        tiles.tile_memory((groups, LANES, plan.width), operands.query.dtype),
        ring([plan.width], operands.key.dtype),
        ring([value_width], operands.value.dtype),
        tiles.tile_memory((groups, LANES, chunk(value_width)), wide),
        plgpu.TMEM((LANES, groups * keys), jnp.float32),
        plgpu.TMEM((LANES, groups * keys), operands.value.dtype, packed=True),
        plgpu.TMEM((LANES, groups * value_width), jnp.float32),
        plgpu.Barrier(num_barriers=groups),
        *(of_products, of_products, of_products),
        plgpu.Barrier(num_barriers=plan.stages),
    ]


def _kernel(
    plan: Plan,
    interpret: bool,
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    visibility: Visibility,
    found: Ref | None,
    out_ref: Ref,
    lse_ref: Ref,
    query_tile: Ref,
    keys: Ring,
    values: Ring,
    out_tile: Ref,
    scores: Ref,
    weights: Ref,
    sums: Ref,
    query_ready: Any,
    scored: Any,
    added: Any,
    handed: Any,
    cleared: Any,
) -> None:
    del interpret  # the interpreter has these instructions
    at = tiles.program_index(plan, plan.row_tiles, plan.heads)
    over = tiles.tile_range(plan, found, at)
    hides = plan.hides(visibility.key_positions)

    def sources(i: Array) -> Sequence[tuple[Sequence[Any], Ring]]:
        return [
            ([tiles.keys_of(plan, ref, at, over.tile(i))], ring)
            for ref, ring in ((key_ref, keys), (value_ref, values))
        ]

    def compute(group: Array) -> None:
        row = at.tile * plan.row_times + group * LANES
        query = query_tile.at[group]
        here = at.batch, pl.ds(row, LANES), at.head
        plgpu.copy_gmem_to_smem(query_ref.at[here], query, query_ready.at[group])

        def own(ref: Ref, width: int, first: int = 0, size: int | None = None) -> Any:
            """The group's columns of a tile in tensor memory, of a width, or some of them."""
            return ref.at[:, pl.ds(group * width + first, size or width)]

        own_scores, own_weights = own(scores, plan.keys), own(weights, plan.keys)
        own_sums = functools.partial(own, sums, plan.value_width)
        part = math.gcd(plan.value_width, PART)

        def change_sums(change: Callable[[Array], Array]) -> None:
            for column in range(0, plan.value_width, part):
                there = own_sums(column, part)
                x = plgpu.async_load_tmem(there, layout=ROW_IN_THREAD)
                plgpu.wait_load_tmem()
                plgpu.async_store_tmem(there, change(x))
            plgpu.commit_tmem()

        def hand_over() -> None:
            """Orders what all threads did in tensor memory before the products that one of them starts."""
            plgpu.barrier_arrive(handed.at[group])
            plgpu.barrier_wait(handed.at[group])

        def score(i: Array) -> None:
            slot, (key,) = tiles.filled(plan, keys, i)
            free = keys.free.at[slot]
            plgpu.tcgen05_mma(own_scores, query, key.transpose((1, 0)), free, accumulate=False)
            plgpu.tcgen05_commit_arrive(scored.at[group])

        def values_of(i: Array, masked: bool) -> tuple[Array, Any]:
            """The slot of a step's values, and these, once they are there and no hidden ones are among them."""
            if not hides:
                slot, (value,) = tiles.filled(plan, values, i)
                return slot, value
            _, slot = tiles.divide(i, plan.stages)
            value = values.tiles[0].at[slot]

            @pl.when(group == 0)
            def clear() -> None:
                plgpu.barrier_wait(values.ready.at[slot])
                if masked:
                    tiles.zero_hidden(plan, visibility, at, over.tile(i), value)
                plgpu.barrier_arrive(cleared.at[slot])

            plgpu.barrier_wait(cleared.at[slot])
            return slot, value

        def step(i: Array, carry: tuple[Array, Array], masked: bool) -> tuple[Array, Array]:
            plgpu.barrier_wait(scored.at[group])
            tile = plgpu.async_load_tmem(own_scores, layout=ROW_IN_THREAD)
            plgpu.wait_load_tmem()
            hand_over()
            pl.when(i + 1 < over.steps)(lambda: score(i + 1))
            place = at, row, over.tile(i) * plan.keys, tile.shape
            see = functools.partial(tiles.seen, plan, visibility, *place, layout=ROW_IN_THREAD)
            tile, decay, maximum, total = weigh(plan, tile, *carry, see if masked else None)
            plgpu.barrier_wait(added.at[group])  # what the step before adds
            plgpu.async_store_tmem(own_weights, tile.astype(value_ref.dtype))
            change_sums(lambda x: x * tiles.of_rows(decay, part))
            hand_over()
            slot, value = values_of(i, masked)
            plgpu.tcgen05_mma(own_sums(), own_weights, value, values.free.at[slot])
            plgpu.tcgen05_commit_arrive(added.at[group])
            return maximum, total

        zeros = tiles.constant((LANES, part), 0.0, ROW_IN_THREAD)
        for column in range(0, plan.value_width, part):
            plgpu.async_store_tmem(own_sums(column, part), zeros)
        plgpu.commit_tmem()
        plgpu.barrier_arrive(added.at[group])
        plgpu.barrier_wait(query_ready.at[group])
        pl.when(over.steps > 0)(lambda: score(jnp.int32(0)))
        start = (tiles.constant((LANES,), x, OF_ROWS) for x in (-math.inf, 0.0))
        maximum, total = over.loop(step, tuple(start))
        plgpu.barrier_wait(added.at[group])
        if visibility.row_positions is not None:
            positions = tiles.load_numbers(visibility.row_positions, at, row, LANES, OF_ROWS)
            total = jnp.where(positions >= 0, total, 0.0)
        of_split = at.split * plan.batch + at.batch
        lse_ref.at[of_split, at.head, pl.ds(row, LANES)][...] = lse_of(plan, maximum, total)
        change_sums(lambda x: quotient(x, total))

        def result(column: int) -> Array:
            there = own_sums(column, out_tile.shape[-1])
            return plgpu.async_load_tmem(there, layout=ROW_IN_THREADS)

        there = out_ref.at[of_split, pl.ds(row, LANES), at.head]
        tiles.store_parts(result, out_tile.at[group], there)

    tiles.share(plan, over.steps, sources, compute)
