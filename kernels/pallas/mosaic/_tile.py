"""The Hopper kernels' operations on tiles: their memory, products, masks, and the order of iteration.

Tiles of 16 bits lie in shared memory as the tensor cores read them, and are filled and emptied by the
copy engine, which reads zeros beyond an array and writes nothing there.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool

from ...masks._visibility import visible
from .._rows import Visibility
from ._plan import Plan

LOG2_E = float(np.log2(np.e))  # within a kernel scores are in bits, as the hardware only has exp2

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


def _interpreted(interpret: bool) -> dict[str, Any]:
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


class Ring(NamedTuple):
    """Slots in shared memory that are filled in turn, with a barrier each for "filled" and for "read".

    `tiles` are those that are filled and read together.
    """

    tiles: Any
    ready: Any
    free: Any


def ring(plan: Plan, rows: int, widths: Sequence[int], dtype: DTypeLike, *more: Any) -> Ring:
    """The scratch memory of the tiles of a plan's stages, some by widths; and `more`."""
    memory = *(tile_memory((plan.stages, rows, width), dtype) for width in widths), *more
    free = plgpu.Barrier(num_arrivals=plan.consumers, num_barriers=plan.stages)
    ready = plgpu.Barrier(num_arrivals=len(memory), num_barriers=plan.stages)
    return Ring(memory, ready, free)


def call(
    kernel: Callable[..., None],
    plan: Plan,
    inputs: Any,
    results: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any],
    *,
    programs: int,
    interpret: bool,
) -> Sequence[Array]:
    """The results of a kernel, of a plan, `interpret`, and what is in memory: inputs, results and scratch."""
    arrays, tree = jax.tree.flatten(inputs)

    def run(*refs: Any) -> None:
        given = jax.tree.unflatten(tree, refs[: len(arrays)])
        kernel(plan, interpret, *given, *refs[len(arrays) :])

    return plgpu.kernel(
        run,
        out_type=results,
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        num_threads=plan.consumers + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **_interpreted(interpret),
    )(*arrays)


def share(
    plan: Plan,
    steps: Array,
    sources: Callable[[Array], Sequence[tuple[Sequence[Any], Ring]]],
    compute: Callable[[Array], None],
) -> None:
    """Gives each group of warps its work: the last copies what each step reads, the others compute."""
    group = lax.axis_index("group")

    @pl.when(group == plan.consumers)
    def copy() -> None:
        if plan.consumers > 1:
            plgpu.set_max_registers(COPYING, action="decrease")

        @pl.loop(0, steps)
        def step(i: Array) -> None:
            round, slot = divide(i, plan.stages)
            for refs, (tiles, ready, free) in sources(i):
                pl.when(round > 0)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                for ref, tile in zip(refs, tiles, strict=True):
                    plgpu.copy_gmem_to_smem(ref, tile.at[slot], ready.at[slot])

    @pl.when(group < plan.consumers)
    def rest() -> None:
        if plan.consumers > 1:
            plgpu.set_max_registers(COMPUTING, action="increase")
        compute(group)


def store(x: Array, own: Ref, there: Ref) -> None:
    """Writes a tile from registers into an array, some columns at a time through shared memory."""
    (rows, columns), width = own.shape, there.shape[1]
    for column in range(0, width, columns):
        own[...] = lax.slice(x, (0, column), (rows, column + columns)).astype(own.dtype)
        plgpu.commit_smem()
        tile: Any = own
        plgpu.copy_smem_to_gmem(tile, there.at[:, pl.ds(column, columns)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=column + columns < width)


def filled(plan: Plan, ring: Ring, i: Array) -> tuple[Array, Sequence[Ref]]:
    """The slot of a step, and its tiles, once these are filled."""
    _, slot = divide(i, plan.stages)
    plgpu.barrier_wait(ring.ready.at[slot])
    return slot, [tile.at[slot] for tile in ring.tiles]


def products(*pairs: tuple[Ref, Ref], meanwhile: Callable[[], None] | None = None) -> Array:
    """The sum of `a @ b.T` of pairs of tiles in shared memory, in float32; `meanwhile` runs beside it."""
    rows, columns = (x.shape[0] for x in pairs[0])

    def run(sums: Any) -> Array:
        for a, b in pairs:
            plgpu.wgmma(sums, a, b.transpose((1, 0)))
        if meanwhile is not None:
            meanwhile()
        return sums[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32))


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
    """Loads from memory into registers of a layout."""
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

    def loop(self, step: Callable[[Array, Any, bool], Any], start: Any, times: int = 1) -> Any:
        """`start` after `times` steps for each tile, first those without a mask."""
        end = self.run * times
        carry = lax.fori_loop(0, end, lambda i, carry: step(i, carry, False), start)
        return lax.fori_loop(end, self.steps * times, lambda i, carry: step(i, carry, True), carry)


def tile_range(
    plan: Plan, found: Ref | None, at: ProgramIndex, *, of_keys: bool = False
) -> TileRange:
    """The tiles that this program iterates over: of keys, its share of those of its rows; or of rows, `of_keys`.

    From `tile_ranges`, or if that is None from the mask with positions that count from 0.
    """
    if found is not None:
        batch = row_of(found, at, 1)
        first, stop, begin, end = (found[i, batch, at.tile] for i in range(4))
    else:
        first, stop, begin, end = _by_window(plan, at.tile, of_keys)
    if plan.splits > 1:
        share, _ = divide(stop - first + (plan.splits - 1), plan.splits)
        first = first + at.split * share
        stop = jnp.minimum(first + share, stop)
    # the run is within the share, even if either is empty
    stop = jnp.maximum(first, stop)
    begin = jnp.minimum(jnp.maximum(begin, first), stop)
    end = jnp.maximum(jnp.minimum(end, stop), begin)
    return TileRange(first, begin, end - begin, stop - first)


def _by_window(plan: Plan, tile: Array, of_keys: bool) -> tuple[Array, Array, Array, Array]:
    own = plan.query_len, plan.row_times
    other = plan.key_len, plan.keys
    window = plan.settings.mask.window
    # a query sees the keys of a window around it, and a key is seen by those of its reflection
    if of_keys:
        own, other, window = other, own, window[::-1]
    (own_len, own_tile), (other_len, size) = own, other
    if not plan.settings.mask.constrains:
        number = math.ceil(other_len / size)
        # rows mask the keys that pad the last tile; rows that pad it have no weight
        whole = number if of_keys else other_len // size
        first, stop, end = (jnp.int32(x) for x in (0, number, whole))
        return first, stop, first, end
    left, right = (min(x, own_len + other_len) for x in window)
    least = tile * own_tile
    most = jnp.minimum(least + own_tile, own_len) - 1
    first, _ = divide(jnp.maximum(least - left, 0), size)
    stop, _ = divide(jnp.minimum(most + right + 1, other_len) + (size - 1), size)
    begin, _ = divide(jnp.maximum(most - left, 0) + (size - 1), size)
    end, _ = divide(jnp.minimum(least + right + 1, other_len), size)
    return first, stop, begin, end


def keys_of(plan: Plan, ref: Ref, at: ProgramIndex, tile: Array) -> Ref:
    """A tile of the keys that a program's rows see."""
    kv_head, _ = divide(at.head, plan.group)
    return ref.at[at.batch, pl.ds(tile * plan.keys, plan.keys), kv_head]


def row_of(ref: Ref, at: ProgramIndex, axis: int = 0) -> Any:
    """The row of the batch in an array that may have one for all."""
    return 0 if ref.shape[axis] == 1 else at.batch


def load_numbers(ref: Ref, at: ProgramIndex, start: Array, size: int, layout: Any) -> Array:
    """`size` of the numbers `[b, L]` of queries or keys, from `start`."""
    here = ref.at[row_of(ref, at), pl.ds(start, size)]
    return load(here, layout)


def seen(
    plan: Plan,
    visibility: Visibility,
    at: ProgramIndex,
    row: Array,
    key: Array,
    shape: tuple[int, ...],
    *,
    keys_first: bool = False,
) -> Bool[Array, "rows keys"]:
    """Which rows from `row` on see which keys from `key` on, in a tile of a shape, rows by keys or `keys_first`."""
    kinds = (OF_ROWS, of_rows), (OF_COLUMNS, of_columns)

    def spread(ref: Ref | None, start: Array, axis: int) -> Array:
        if ref is None:  # positions that are not given count from 0
            return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE) + start
        layout, across = kinds[axis]
        return across(load_numbers(ref, at, start, shape[axis], layout), shape[1 - axis])

    def numbers(rows: Ref | None, keys: Ref | None) -> tuple[Array, Array]:
        if rows is None or keys is None:
            rows = keys = None
        return spread(rows, row, int(keys_first)), spread(keys, key, int(not keys_first))

    found = numbers(None, None)[1] < plan.key_len
    if plan.settings.mask.constrains or visibility.row_positions is not None:
        found &= visible(plan.settings.mask.bind(), *numbers(*visibility[:2]))
    if visibility.row_segments is not None:
        found &= jnp.equal(*numbers(*visibility[2:4]))
    return found


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
            there = number < plan.query_len + plan.settings.mask.window[1]
        part = values.at[:, pl.ds(column, step)]
        x = load(part, TILE)
        part[...] = jnp.where(there, x, jnp.zeros_like(x))
    plgpu.commit_smem()
