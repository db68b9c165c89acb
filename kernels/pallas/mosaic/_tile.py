"""The Hopper kernels' operations on tiles: their memory, products, masks, and the order of iteration.

Tiles of 16 bits are in shared memory, in the order in which the tensor cores read them. The copy engine
fills and empties them; beyond an array it reads zeros and writes nothing.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool

from ...call._operands import Operands
from ...masks._visibility import visible
from .._rows import Visibility
from .._tiles import (
    Bounds,
    batch_of,
    counted_bounds,
    divide,
    split_bounds,
    tile_index,
    tile_ranges,
    visibility_of,
)
from ._kernel import ROWS, MosaicPlan

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
    """A ring of slots in shared memory, each with a barrier for "filled" and one for "read".

    `tiles` are filled and read together.
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


def launch(
    kernel: Callable[..., None],
    plan: MosaicPlan,
    operands: Operands,
    arrays: tuple[Any, ...],
    results: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any],
    *,
    of_keys: bool = False,
    interpret: bool,
) -> Sequence[Array]:
    """Runs `kernel(program, *arrays, *results, *scratch)`; all but the program are references."""
    visibility = visibility_of(operands, plan)
    ranges = tile_ranges(operands, visibility, plan, of_keys=of_keys)
    inputs, tree = jax.tree.flatten((*arrays, visibility, ranges))
    kept = plan.key_tiles * plan.kv_heads if of_keys else plan.row_tiles * plan.heads
    options: dict[str, Any] = {}
    if interpret:  # raises if barriers do not order accesses to memory
        options["interpret"] = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]

    def run(*refs: Any) -> None:
        *array_refs, visibility, ranges = jax.tree.unflatten(tree, refs[: len(inputs)])
        program = MosaicProgram(plan, visibility, ranges, of_keys, interpret)
        kernel(program, *array_refs, *refs[len(inputs) :])

    return plgpu.kernel(
        run,
        out_type=results,
        scratch_types=scratch,
        grid=(kept * plan.batch * plan.splits,),
        grid_names=("program",),
        num_threads=plan.consumers + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **options,
    )(*inputs)


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
                start_copies(refs, [tile.at[slot] for tile in tiles], ready.at[slot])

    @pl.when(group < plan.consumers)
    def compute_group() -> None:
        if plan.consumers > 1:
            plgpu.set_max_registers(COMPUTING, action="increase")
        compute(group)


def start_copies(refs: Sequence[Any], tiles: Sequence[Any], ready: Any) -> None:
    """Fills tiles in shared memory; the barrier `ready` counts them."""
    for ref, tile in zip(refs, tiles, strict=True):
        plgpu.copy_gmem_to_smem(ref, tile, ready)


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
    """Waits until the slot of a step is filled; returns the slot and its tiles."""
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
    """Broadcasts one number per row to a tile."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))


def of_columns(x: Array, rows: int) -> Array:
    """Broadcasts one number per column to a tile."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,))


class MosaicProgram:
    """The running Mosaic program: the tile that it keeps, and the tiles that it iterates over.

    The last kept tile starts first, as it sees most keys. A program of rows iterates over its part of the keys that the
    rows see, a program `of_keys` over rows: first over `run` tiles that need no mask, then over the tiles around them,
    in `steps` steps.
    """

    def __init__(
        self,
        plan: MosaicPlan,
        visibility: Visibility,
        ranges: Ref | None,
        of_keys: bool,
        interpret: bool,
    ):
        self.plan, self.visibility, self.of_keys = plan, visibility, of_keys
        self.interpret = interpret
        tiles, heads = plan.row_tiles, plan.heads
        if of_keys:
            tiles, heads = plan.key_tiles, plan.kv_heads
        program = lax.axis_index("program").astype(jnp.int32)
        self.index = tile_index(plan, program, tiles, heads, last_first=True)
        self.tile, self.head, self.batch, split = self.index
        if ranges is None:
            whole = counted_bounds(plan, self.tile, of_keys=of_keys)
            whole = Bounds(*map(jnp.int32, whole))
        else:
            batch = batch_of(ranges, self.index, 1)
            whole = Bounds(*(ranges[i, batch, self.tile] for i in range(4)))
        self.first, stop, self.begin, end = split_bounds(plan, whole, split)
        self.run, self.steps = end - self.begin, jnp.maximum(stop - self.first, 0)

    @property
    def part(self) -> Array:
        """Index of this program's result among the results of all splits."""
        return self.index.split * self.plan.batch + self.batch

    def iterated(self, i: Array) -> Array:
        """The iterated tile of step `i`."""
        around = self.first + i - self.run
        around = around + jnp.where(around >= self.begin, self.run, 0)
        return jnp.where(i < self.run, self.begin + i, around)

    def loop(self, step: Callable[[Array, Any, bool], Any], start: Any, times: int = 1) -> Any:
        """The carry after `times` steps for each tile; tiles without a mask come first."""
        end = self.run * times
        carry = lax.fori_loop(0, end, lambda i, carry: step(i, carry, False), start)
        return lax.fori_loop(end, self.steps * times, lambda i, carry: step(i, carry, True), carry)

    def rows(self, ref: Ref, row: Array) -> Ref:
        """64 rows of a head from `row` on."""
        return ref.at[self.batch, pl.ds(row, ROWS), self.head]

    def keys(self, ref: Ref, tile: Array) -> Ref:
        plan = self.plan
        kv_head, _ = divide(self.head, plan.group)
        return ref.at[self.batch, pl.ds(tile * plan.keys, plan.keys), kv_head]

    def load_numbers(self, ref: Ref, start: Array, size: int, layout: Any) -> Array:
        """Loads `size` numbers from `start` on of an array `[b, L]`, one per query or key."""
        return load(ref.at[batch_of(ref, self.index), pl.ds(start, size)], layout)

    def seen(self, row: Array, key: Array, shape: tuple[int, ...]) -> Bool[Array, "i j"]:
        """Visibility of keys from `key` on by rows from `row` on, `[rows, keys]`, or `[keys, rows]` `of_keys`."""
        plan, visibility, keys_first = self.plan, self.visibility, self.of_keys
        layouts = (OF_ROWS, of_rows), (OF_COLUMNS, of_columns)

        def spread(ref: Ref | None, start: Array, axis: int) -> Array:
            if ref is None:  # without positions, count from 0
                return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE) + start
            layout, across = layouts[axis]
            return across(self.load_numbers(ref, start, shape[axis], layout), shape[1 - axis])

        def numbers(rows: Ref | None, keys: Ref | None) -> tuple[Array, Array]:
            if rows is None or keys is None:
                rows = keys = None
            return spread(rows, row, int(keys_first)), spread(keys, key, int(not keys_first))

        is_visible = numbers(None, None)[1] < plan.key_len
        if plan.settings.mask.constrains or visibility.row_positions is not None:
            is_visible &= visible(plan.settings.mask.bind(), *numbers(*visibility[:2]))
        if visibility.row_segments is not None:
            is_visible &= jnp.equal(*numbers(*visibility[2:4]))
        return is_visible

    def zero_hidden(self, tile: Array, values: Ref) -> None:
        """Zeros the values, in shared memory, of the keys of a tile that no row of the call sees."""
        plan, positions = self.plan, self.visibility.key_positions
        start, width = tile * plan.keys, values.shape[1]
        step = 64 if width % 64 == 0 else width
        for column in range(0, width, step):
            if positions is not None:
                numbers = self.load_numbers(positions, start, plan.keys, OF_ROWS)
                present = of_rows(numbers, step) >= 0
            else:
                shape = plan.keys, step
                number = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE) + start
                present = number < plan.query_len + plan.settings.mask.window[1]
            part = values.at[:, pl.ds(column, step)]
            x = load(part, TILE)
            part[...] = jnp.where(present, x, jnp.zeros_like(x))
        plgpu.commit_smem()
