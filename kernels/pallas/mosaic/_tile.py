"""The Hopper kernels' operations on tiles: their memory, products, masks, and the order of iteration.

Tiles of 16 bits are in shared memory, in the order in which the tensor cores read them. The copy engine
fills and empties them; beyond an array it reads zeros and writes nothing.
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
from ._plan import MosaicPlan

LOG2_E = float(np.log2(np.e))  # within a kernel scores are in bits, as the hardware only has exp2

# The registers of a thread, of 65536 in a multiprocessor: 168 for each of three groups of warps, until
# the one that only starts copies leaves most of its own to the two that compute.
COMPUTING, COPYING = 232, 40

TILE = plgpu.Layout.WGMMA  # of sums and scores in registers
OF_ROWS, OF_COLUMNS = TILE.reduce(1), TILE.reduce(0)  # of a number for each row or column of these


@runtime_checkable
class Ref(Protocol):
    """A reference to an array, or a slice of one, in a GPU's memory; JAX has no public name for it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def at(self) -> Any: ...
    def transpose(self, permutation: tuple[int, int], /) -> Any: ...
    def __getitem__(self, index: Any, /) -> Array: ...
    def __setitem__(self, index: Any, value: Array, /) -> None: ...


def tile_memory(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Shared memory for tiles `[..., rows, columns]`."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = next(x for x in (128, 64, 32) if shape[-1] * itemsize % x == 0)
    transforms = plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


class SlotRing(NamedTuple):
    """Slots in shared memory that are filled in turn, with a barrier each for "filled" and for "read".

    `tiles` are those that are filled and read together.
    """

    tiles: Any
    ready: Any
    free: Any


def ring(
    plan: MosaicPlan, rows: int, widths: Sequence[int], dtype: DTypeLike, *more: Any
) -> SlotRing:
    """A ring of a plan's stages, with a tile for each of `widths`, and `more` scratch memory."""
    memory = *(tile_memory((plan.stages, rows, width), dtype) for width in widths), *more
    free = plgpu.Barrier(num_arrivals=plan.consumers, num_barriers=plan.stages)
    ready = plgpu.Barrier(num_arrivals=len(memory), num_barriers=plan.stages)
    return SlotRing(memory, ready, free)


def call(
    kernel: Callable[..., None],
    plan: MosaicPlan,
    inputs: Any,
    results: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any],
    *,
    programs: int,
    interpret: bool,
) -> Sequence[Array]:
    """Runs `kernel(plan, interpret, *inputs, *results, *scratch)`, all but the first two being references."""
    arrays, tree = jax.tree.flatten(inputs)
    options: dict[str, Any] = {}
    if interpret:  # raises if barriers do not order accesses to memory
        options["interpret"] = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]

    def run(*refs: Any) -> None:
        input_refs = jax.tree.unflatten(tree, refs[: len(arrays)])
        kernel(plan, interpret, *input_refs, *refs[len(arrays) :])

    return plgpu.kernel(
        run,
        out_type=results,
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        num_threads=plan.consumers + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **options,
    )(*arrays)


def share(
    plan: MosaicPlan,
    steps: Array,
    sources: Callable[[Array], Sequence[tuple[Sequence[Any], SlotRing]]],
    compute: Callable[[Array], None],
) -> None:
    """Runs `compute` in all groups of warps but the last, which copies the tiles that each step reads."""
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
    def compute_group() -> None:
        if plan.consumers > 1:
            plgpu.set_max_registers(COMPUTING, action="increase")
        compute(group)


def store(x: Array, buffer: Ref, target: Ref) -> None:
    """Writes a tile from registers to an array, a few columns at a time through a buffer in shared memory."""
    (rows, columns), width = buffer.shape, target.shape[1]
    for column in range(0, width, columns):
        buffer[...] = lax.slice(x, (0, column), (rows, column + columns)).astype(buffer.dtype)
        plgpu.commit_smem()
        tile: Any = buffer
        plgpu.copy_smem_to_gmem(tile, target.at[:, pl.ds(column, columns)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=column + columns < width)


def filled(plan: MosaicPlan, ring: SlotRing, i: Array) -> tuple[Array, Sequence[Ref]]:
    """The slot of a step, and its tiles, once these are filled."""
    _, slot = divide(i, plan.stages)
    plgpu.barrier_wait(ring.ready.at[slot])
    return slot, [tile.at[slot] for tile in ring.tiles]


def products(*pairs: tuple[Ref, Ref], meanwhile: Callable[[], None] | None = None) -> Array:
    """The sum of `a @ b.T` of pairs of tiles in shared memory, in float32; `meanwhile` overlaps with it."""
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
    if interpret:  # the interpreter lacks products of tiles in registers
        added = jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # the tensor cores would read shared memory without a fence
        return sums + added
    accumulator: Any = plgpu.WGMMAAccumulatorRef.init(sums)
    return pl.run_state(lambda sums: plgpu.wgmma(sums, a, b))(accumulator)


# older versions of JAX have an argument for an index
_INDEX = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()


def load(ref: Ref, layout: Any) -> Array:
    source: Any = ref
    return plgpu.load(source, *_INDEX, layout=layout, optimized=False)


def constant(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def of_rows(x: Array, columns: int) -> Array:
    """A number for each row, as a tile."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))


def of_columns(x: Array, rows: int) -> Array:
    """A number for each column, as a tile."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,))


class MosaicIndex(NamedTuple):
    """The index of a program: its tile, head of queries, batch entry, and share of the iteration."""

    tile: Array
    head: Array
    batch: Array
    split: Array


def program_index(plan: MosaicPlan, tiles: int, heads: int) -> MosaicIndex:
    """The index of this program; tiles vary fastest, the last first, as these see most keys."""
    i = lax.axis_index("program").astype(jnp.int32)
    i, tile = divide(i, tiles)
    i, head = divide(i, heads)
    split, batch = divide(i, plan.batch)
    return MosaicIndex(tiles - 1 - tile, head, batch, split)


def divide(x: Array, size: int) -> tuple[Array, Array]:
    """Quotients and remainders of non-negative numbers."""
    if size == 1:
        return x, jnp.zeros_like(x)
    return lax.div(x, jnp.int32(size)), lax.rem(x, jnp.int32(size))


class MosaicTileRange(NamedTuple):
    """The tiles that a tile iterates over: `run` of them without a mask, and then those around these.

    Attributes:
        first: the first tile.
        begin: the first that needs no mask.
        run: how many need no mask.
        steps: the number of tiles.
    """

    first: Array
    begin: Array
    run: Array
    steps: Array

    def tile(self, i: Array) -> Array:
        around = self.first + i - self.run
        around = around + jnp.where(around >= self.begin, self.run, 0)
        return jnp.where(i < self.run, self.begin + i, around)

    def loop(self, step: Callable[[Array, Any, bool], Any], start: Any, times: int = 1) -> Any:
        """`start` after `times` steps for each tile, first those without a mask."""
        end = self.run * times
        carry = lax.fori_loop(0, end, lambda i, carry: step(i, carry, False), start)
        return lax.fori_loop(end, self.steps * times, lambda i, carry: step(i, carry, True), carry)


def tile_range(
    plan: MosaicPlan, ranges: Ref | None, program: MosaicIndex, *, of_keys: bool = False
) -> MosaicTileRange:
    """The tiles that this program iterates over: of keys, its share of those of its rows; or of rows, `of_keys`.

    From `tile_ranges`, or if that is None from the mask with positions that count from 0.
    """
    if ranges is not None:
        batch = batch_of(ranges, program, 1)
        first, stop, begin, end = (ranges[i, batch, program.tile] for i in range(4))
    else:
        first, stop, begin, end = _by_window(plan, program.tile, of_keys)
    if plan.splits > 1:
        share, _ = divide(stop - first + (plan.splits - 1), plan.splits)
        first = first + program.split * share
        stop = jnp.minimum(first + share, stop)
    # the run is within the share, even if either is empty
    stop = jnp.maximum(first, stop)
    begin = jnp.minimum(jnp.maximum(begin, first), stop)
    end = jnp.maximum(jnp.minimum(end, stop), begin)
    return MosaicTileRange(first, begin, end - begin, stop - first)


def _by_window(plan: MosaicPlan, tile: Array, of_keys: bool) -> tuple[Array, Array, Array, Array]:
    own_sizes = plan.query_len, plan.row_times
    other_sizes = plan.key_len, plan.keys
    window = plan.settings.mask.window
    # a query sees the keys of a window around it, and a key is seen by those of its reflection
    if of_keys:
        own_sizes, other_sizes, window = other_sizes, own_sizes, window[::-1]
    (own_len, own_tile), (other_len, size) = own_sizes, other_sizes
    if not plan.settings.mask.constrains:
        number = math.ceil(other_len / size)
        # rows mask the keys that pad the last tile; rows that pad it have no weight
        all_visible = number if of_keys else other_len // size
        first, stop, end = (jnp.int32(x) for x in (0, number, all_visible))
        return first, stop, first, end
    left, right = (min(x, own_len + other_len) for x in window)
    least = tile * own_tile
    most = jnp.minimum(least + own_tile, own_len) - 1
    first, _ = divide(jnp.maximum(least - left, 0), size)
    stop, _ = divide(jnp.minimum(most + right + 1, other_len) + (size - 1), size)
    begin, _ = divide(jnp.maximum(most - left, 0) + (size - 1), size)
    end, _ = divide(jnp.minimum(least + right + 1, other_len), size)
    return first, stop, begin, end


def keys_of(plan: MosaicPlan, ref: Ref, program: MosaicIndex, tile: Array) -> Ref:
    kv_head, _ = divide(program.head, plan.group)
    return ref.at[program.batch, pl.ds(tile * plan.keys, plan.keys), kv_head]


def batch_of(ref: Ref, program: MosaicIndex, axis: int = 0) -> Any:
    """The batch index into an array whose batch axis may be 1."""
    return 0 if ref.shape[axis] == 1 else program.batch


def load_numbers(ref: Ref, program: MosaicIndex, start: Array, size: int, layout: Any) -> Array:
    """`size` of the numbers `[b, L]` of queries or keys, from `start`."""
    numbers = ref.at[batch_of(ref, program), pl.ds(start, size)]
    return load(numbers, layout)


def seen(
    plan: MosaicPlan,
    visibility: Visibility,
    program: MosaicIndex,
    row: Array,
    key: Array,
    shape: tuple[int, ...],
    *,
    keys_first: bool = False,
) -> Bool[Array, "rows keys"]:
    """Which rows from `row` on see which keys from `key` on, in a tile of a shape, rows by keys or `keys_first`."""
    layouts = (OF_ROWS, of_rows), (OF_COLUMNS, of_columns)

    def spread(ref: Ref | None, start: Array, axis: int) -> Array:
        if ref is None:  # without positions, count from 0
            return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE) + start
        layout, across = layouts[axis]
        return across(load_numbers(ref, program, start, shape[axis], layout), shape[1 - axis])

    def numbers(rows: Ref | None, keys: Ref | None) -> tuple[Array, Array]:
        if rows is None or keys is None:
            rows = keys = None
        return spread(rows, row, int(keys_first)), spread(keys, key, int(not keys_first))

    see = numbers(None, None)[1] < plan.key_len
    if plan.settings.mask.constrains or visibility.row_positions is not None:
        see &= visible(plan.settings.mask.bind(), *numbers(*visibility[:2]))
    if visibility.row_segments is not None:
        see &= jnp.equal(*numbers(*visibility[2:4]))
    return see


def zero_hidden(
    plan: MosaicPlan, visibility: Visibility, program: MosaicIndex, tile: Array, values: Ref
) -> None:
    """Zeros the values, in shared memory, of the keys of a tile that no row of the call sees."""
    start, width = tile * plan.keys, values.shape[1]
    step = 64 if width % 64 == 0 else width
    for column in range(0, width, step):
        shape = plan.keys, step
        if visibility.key_positions is not None:
            positions = load_numbers(visibility.key_positions, program, start, plan.keys, OF_ROWS)
            present = of_rows(positions, step) >= 0
        else:
            number = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE) + start
            present = number < plan.query_len + plan.settings.mask.window[1]
        part = values.at[:, pl.ds(column, step)]
        x = load(part, TILE)
        part[...] = jnp.where(present, x, jnp.zeros_like(x))
    plgpu.commit_smem()
