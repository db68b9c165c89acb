"""The Hopper kernels' operations on tiles: their memory, products, masks, and the order of iteration.

A group of warps computes on 64 rows. Tiles of 16 bits lie in shared memory as the tensor cores read
them, and are filled and emptied by the copy engine, which reads zeros beyond an array and writes
nothing there.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool

from ...masks._visibility import visible
from .._rows import Visibility
from ._plan import ROWS, Plan

LOG2_E = float(np.log2(np.e))  # within a kernel scores are in bits, as the hardware only has exp2
LN_2 = float(np.log(2))

# The registers of a thread, of 65536 in a multiprocessor: 168 for each of three groups of warps, until
# the one that only starts copies leaves most of its own to the two that compute.
COMPUTING, COPYING = 232, 40

TILE = plgpu.Layout.WGMMA  # of sums and scores in registers
OF_ROWS, OF_COLUMNS = TILE.reduce(1), TILE.reduce(0)  # of a number for each row or column of these


@runtime_checkable
class Ref(Protocol):
    """An array in a memory of the GPU, or a part of one, in any order there; for which JAX has no public name."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def at(self) -> Any: ...
    def transpose(self, permutation: tuple[int, int], /) -> Any: ...
    def __getitem__(self, index: Any, /) -> Array: ...
    def __setitem__(self, index: Any, value: Array, /) -> None: ...


def interpreted(interpret: bool) -> dict[str, Any]:
    """The option by which a kernel runs in JAX's interpreter of barriers and copies, from 0.12 on.

    It raises where accesses to memory are not ordered by barriers.
    """
    if not interpret:
        return {}
    return {"interpret": plgpu.InterpretGPUParams(detect_races=True)}  # pyright: ignore[reportAttributeAccessIssue]


def tile_memory(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Shared memory for tiles `[..., rows, columns]`."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = next(x for x in (128, 64, 32) if shape[-1] * itemsize % x == 0)
    transforms = plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def product(a: Ref, b: Ref, meanwhile: Callable[[], None] | None = None) -> Array:
    """`a @ b.T` of two tiles in shared memory, with sums in float32; `meanwhile` runs beside it."""

    def run(sums: Any) -> Array:
        plgpu.wgmma(sums, a, b.transpose((1, 0)))
        if meanwhile is not None:
            meanwhile()
        return sums[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[0]), jnp.float32))


def add_product(sums: Array, a: Array, b: Ref, interpret: bool) -> Array:
    """`sums + a @ b`, of a tile in registers and one in shared memory."""
    if interpret:  # as the interpreter lacks products of tiles in registers
        added = jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # the tensor cores read as the copy engine does, in no need of a fence
        return sums + added
    held: Any = plgpu.WGMMAAccumulatorRef.init(sums)
    return pl.run_state(lambda sums: plgpu.wgmma(sums, a, b))(held)


# before JAX 0.12 it has the argument for an index, too
_INDEX = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()


def load(ref: Ref, layout: Any) -> Array:
    """What is in memory, in registers of a layout."""
    here: Any = ref
    return plgpu.load(here, *_INDEX, layout=layout, optimized=False)


def constant(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    """A tile of one number, float32."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def of_rows(x: Array, columns: int) -> Array:
    """A number for each row, as a tile."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))


def of_columns(x: Array, rows: int) -> Array:
    """A number for each column, as a tile."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,))


class ProgramIndex(NamedTuple):
    """The index of a program: its tile, head of queries, batch entry, and share of the iteration."""

    tile: Array
    head: Array
    batch: Array
    split: Array


def program_index(plan: Plan, tiles: int, heads: int) -> ProgramIndex:
    """The index of this program; tiles vary fastest, the last first, as these see most keys."""
    i = lax.axis_index("program").astype(jnp.int32)
    i, tile = divide(i, tiles)
    i, head = divide(i, heads)
    split, batch = divide(i, plan.batch)
    return ProgramIndex(tiles - 1 - tile, head, batch, split)


def divide(x: Array, size: int) -> tuple[Array, Array]:
    """Quotients and remainders of non-negative numbers."""
    if size == 1:
        return x, jnp.zeros_like(x)
    return lax.div(x, jnp.int32(size)), lax.rem(x, jnp.int32(size))


class TileRange(NamedTuple):
    """The tiles that a tile iterates over: `run` of them without a mask, and then those around these.

    Attributes:
        first: the first tile.
        begin: the first that needs no mask.
        run: how many need no mask.
        steps: how many there are.
    """

    first: Array
    begin: Array
    run: Array
    steps: Array

    def tile(self, i: Array) -> Array:
        """The tile of a step."""
        around = self.first + i - self.run
        around = around + jnp.where(around >= self.begin, self.run, 0)
        return jnp.where(i < self.run, self.begin + i, around)


def tile_range(plan: Plan, found: Ref | None, at: ProgramIndex) -> TileRange:
    """The tiles of keys that this program iterates over, its share of those of its rows.

    From `tile_ranges`, or if that is None from the rule with positions that count from 0.
    """
    if found is not None:
        batch = row_of(found, at, 1)
        first, stop, begin, end = (found[i, batch, at.tile] for i in range(4))
    else:
        first, stop, begin, end = _by_sides(plan, at.tile)
    if plan.splits > 1:
        share, _ = divide(stop - first + (plan.splits - 1), plan.splits)
        first = first + at.split * share
        stop = jnp.minimum(first + share, stop)
    # the run is within the share, even if either is empty
    stop = jnp.maximum(first, stop)
    begin = jnp.minimum(jnp.maximum(begin, first), stop)
    end = jnp.maximum(jnp.minimum(end, stop), begin)
    return TileRange(first, begin, end - begin, stop - first)


def _by_sides(plan: Plan, tile: Array) -> tuple[Array, Array, Array, Array]:
    keys, key_len, rows = plan.keys, plan.key_len, plan.row_times
    if not plan.settings.rule.constrains:
        first, stop, end = (jnp.int32(x) for x in (0, plan.key_tiles, key_len // keys))
        return first, stop, first, end
    left, right = (min(side, plan.query_len + key_len) for side in plan.settings.rule.sides)
    least = tile * rows
    most = jnp.minimum(least + rows, plan.query_len) - 1
    first, _ = divide(jnp.maximum(least - left, 0), keys)
    stop, _ = divide(jnp.minimum(most + right + 1, key_len) + (keys - 1), keys)
    begin, _ = divide(jnp.maximum(most - left, 0) + (keys - 1), keys)
    end, _ = divide(jnp.minimum(least + right + 1, key_len), keys)
    return first, stop, begin, end


def row_of(ref: Ref, at: ProgramIndex, axis: int = 0) -> Any:
    """The row of the batch in an array that may have one for all."""
    return 0 if ref.shape[axis] == 1 else at.batch


def load_numbers(ref: Ref, at: ProgramIndex, start: Array, size: int, layout: Any) -> Array:
    """`size` of the numbers `[b, L]` of queries or keys, from `start`."""
    here = ref.at[row_of(ref, at), pl.ds(start, size)]
    return load(here, layout)


def seen(
    plan: Plan, visibility: Visibility, at: ProgramIndex, row: Array, tile: Array
) -> Bool[Array, "rows keys"]:
    """Which of 64 rows from `row` on see which keys of a tile."""
    shape, start = (ROWS, plan.keys), tile * plan.keys

    def numbers(rows: Ref | None, keys: Ref | None) -> tuple[Array, Array]:
        if rows is None or keys is None:  # positions that are not given count from 0
            return (
                plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE) + row,
                plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE) + start,
            )
        return (
            of_rows(load_numbers(rows, at, row, ROWS, OF_ROWS), plan.keys),
            of_columns(load_numbers(keys, at, start, plan.keys, OF_COLUMNS), ROWS),
        )

    found = numbers(None, None)[1] < plan.key_len
    if plan.settings.rule.constrains or visibility.row_positions is not None:
        found &= visible(plan.settings.rule.bind(), *numbers(*visibility[:2]))
    if visibility.row_segments is not None:
        found &= jnp.equal(*numbers(*visibility[2:4]))
    return found


def hides(plan: Plan, visibility: Visibility) -> bool:
    """Whether tiles may hold keys that no row of the call sees, whose values may be anything."""
    return (
        visibility.key_positions is not None
        or plan.key_len > plan.query_len + plan.settings.rule.sides[1]
    )


def zero_hidden(
    plan: Plan, visibility: Visibility, at: ProgramIndex, tile: Array, values: Ref
) -> None:
    """Zeros the values, in shared memory, of the keys of a tile that no row of the call sees."""
    start, width = tile * plan.keys, values.shape[1]
    step = 64 if width % 64 == 0 else width
    for column in range(0, width, step):
        shape = plan.keys, step
        if visibility.key_positions is not None:
            positions = load_numbers(visibility.key_positions, at, start, plan.keys, OF_ROWS)
            there = of_rows(positions, step) >= 0
        else:
            number = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE) + start
            there = number < plan.query_len + plan.settings.rule.sides[1]
        part = values.at[:, pl.ds(column, step)]
        x = load(part, TILE)
        part[...] = jnp.where(there, x, jnp.zeros_like(x))
    plgpu.commit_smem()
