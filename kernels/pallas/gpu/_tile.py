"""The GPU kernels' operations on tiles: load and store, iterate, and mask their scores.

Arrays `[B, T, N, H]` and `[B, S, K, H]` are read and written in place. Tiles have sizes that are powers of
two, and loads mask what lies outside of an array.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from ...call._state import unfused
from ...masks._visibility import visible
from .._rows import BlockList, Visibility
from ._default import power
from ._plan import TritonPlan

Carry = TypeVar("Carry")

LOG2_E = float(np.log2(np.e))  # within a kernel scores are in bits, as the hardware only has exp2


class ProgramIndex(NamedTuple):
    """The index of a program: its tile, key head, batch entry, and share of the iteration."""

    tile: Array
    kv_head: Array
    batch: Array
    split: Array


def program_index(plan: TritonPlan, *, of_keys: bool) -> ProgramIndex:
    """The index of this program, whose tile is of rows or of keys; tiles vary fastest.

    The tiles with the longest iterations under a causal mask start first: the last rows, the first keys.
    """
    tiles = plan.key_tiles if of_keys else plan.row_tiles
    i, tile = divide(pl.program_id(0), tiles)
    i, kv_head = divide(i, plan.kv_heads)
    split, batch = divide(i, plan.batch)
    return ProgramIndex(tile if of_keys else tiles - 1 - tile, kv_head, batch, split)


def divide(x: Array, size: int) -> tuple[Array, Array]:
    """Quotients and remainders of non-negative numbers."""
    if size == 1:
        return x, jnp.zeros_like(x)
    quotient = lax.div(x, lax.full_like(x, size))
    return quotient, x - quotient * size


def numbers(size: int) -> Int[Array, " size"]:
    return lax.iota(jnp.int32, size)


def load(
    ref: Array | Ref, index: tuple[Any, ...], in_bounds: Array | None, other: float = 0
) -> Array:
    """The elements at `index`, or `other` where `in_bounds` is false; None: all are in bounds."""
    ref_slice: Any = ref.at[index]
    if in_bounds is None:
        return triton.load(ref_slice)
    return triton.load(ref_slice, mask=in_bounds, other=other)


class Columns(NamedTuple):
    """The columns of a tile over an array's last axis: their indices, and which exist."""

    number: Int[Array, "1 width"]
    in_bounds: Bool[Array, "1 width"] | None


def columns(width: int) -> Columns:
    number = numbers(power(width))[None, :]
    return Columns(number, None if power(width) == width else number < width)


class RowsOfTile(NamedTuple):
    """The rows of a tile of queries: their times and heads, and which exist."""

    time: Int[Array, " rows"]
    head: Int[Array, " rows"]
    in_bounds: Bool[Array, " rows"] | None


def rows(plan: TritonPlan, tile: Array, kv_head: Array) -> RowsOfTile:
    time, head = divide(numbers(plan.rows), plan.row_heads)
    in_bounds = None if plan.full_rows else time < plan.row_times
    of_time, of_head = divide(tile, plan.head_tiles)
    time += of_time * plan.row_times
    head += of_head * plan.row_heads
    if in_bounds is not None:
        in_bounds &= (time < plan.query_len) & (head < plan.group)
    return RowsOfTile(time, head + kv_head * plan.group, in_bounds)


def load_rows(ref: Ref, program: ProgramIndex, rows: RowsOfTile, width: int) -> Array:
    """`[rows, width]` of an array `[B, T, N, width]`, zero outside of it."""
    index, in_bounds = _row_index(rows, columns(width))
    return load(ref, (program.batch, *index), in_bounds)


def store_rows(ref: Ref, program: ProgramIndex, rows: RowsOfTile, x: Array, width: int) -> None:
    """Stores `[rows, width]` to this program's share of `[splits, B, T, N, width]`."""
    index, in_bounds = _row_index(rows, columns(width))
    index = program.split, program.batch, *index
    triton.store(ref.at[index], x.astype(ref.dtype), mask=in_bounds)


def store_numbers(ref: Ref, program: ProgramIndex, rows: RowsOfTile, x: Array) -> None:
    """Stores one number for each row to this program's share of `[splits, B, T, N]`."""
    index = program.split, program.batch, rows.time, rows.head
    triton.store(ref.at[index], x, mask=rows.in_bounds)


def _row_index(rows: RowsOfTile, columns: Columns) -> tuple[tuple[Array, Array, Array], Any]:
    time, head = rows.time[:, None], rows.head[:, None]
    in_bounds = None if rows.in_bounds is None else rows.in_bounds[:, None]
    return (time, head, columns.number), _both(in_bounds, columns.in_bounds, len(rows.time))


def _both(a: Array | None, b: Array | None, size: int) -> Array | None:
    if a is None:
        return None if b is None else jnp.broadcast_to(b, (size, b.shape[1]))
    return a if b is None else a & b


def load_numbers(
    ref: Ref, program: ProgramIndex, rows: RowsOfTile, other: float
) -> Float[Array, " rows"]:
    """One number for each row, of an array `[B, T, N]`; `other` outside of it."""
    return load(ref, (program.batch, rows.time, rows.head), rows.in_bounds, other)


def load_keys(
    plan: TritonPlan, ref: Array | Ref, program: ProgramIndex, tile: Array, width: int, full: bool
) -> Array:
    """`[keys, width]` of an array `[B, S, K, width]`, zero outside of it unless the tile is `full`."""
    index, in_bounds = _key_index(plan, program, tile, width, full)
    return load(ref, (program.batch, *index), in_bounds)


def store_keys(plan: TritonPlan, ref: Ref, program: ProgramIndex, x: Array, width: int) -> None:
    """Stores `[keys, width]` to this program's share of `[splits, B, S, K, width]`."""
    index, in_bounds = _key_index(plan, program, program.tile, width, False)
    triton.store(
        ref.at[(program.split, program.batch, *index)], x.astype(ref.dtype), mask=in_bounds
    )


def _key_index(
    plan: TritonPlan, program: ProgramIndex, tile: Array, width: int, full: bool
) -> tuple[Any, Any]:
    key, column = tile * plan.keys + numbers(plan.keys), columns(width)
    in_bounds = None if full or plan.full_keys else (key < plan.key_len)[:, None]
    return (key[:, None], program.kv_head, column.number), _both(
        in_bounds, column.in_bounds, plan.keys
    )


Exp2 = Callable[[Array, float, Array], Array]


def exp2_of(*, interpret: bool) -> Exp2:
    """The function $2^{x u - m}$ of float32 tiles `x`, a number `u`, and `m` for each row."""
    return (lambda x, unit, shift: jnp.exp2(x * unit - shift)) if interpret else _exp2


def exp2_from(x: Array, shift: Array, *, unit: float, interpret: bool) -> Array:
    """The function $2^{(x - m) u}$, exactly 1 where `x` equals `m`, unlike `exp2_of` for large numbers."""
    if interpret:
        return jnp.exp2((unfused(x) - shift) * unit)
    scaled = f"sub.rn.ftz.f32 %x, $1, $2; mul.rn.ftz.f32 %x, %x, 0f{_bits(unit)}"
    return _ptx_exp2(scaled, x, shift)


def _bits(x: float) -> str:
    """A float32 number in PTX."""
    return struct.pack(">f", x).hex().upper()


def _ptx_exp2(instructions: str, x: Array, shift: Array) -> Array:
    """The power of two of what PTX instructions compute in `%x` from an element of a tile and its shift."""
    (out,) = triton.elementwise_inline_asm(
        f"{{ .reg .f32 %x; {instructions}; ex2.approx.ftz.f32 $0, %x; }}",
        args=[x, jnp.broadcast_to(shift, x.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return out


def _exp2(x: Array, unit: float, shift: Array) -> Array:
    """Two instructions for each element; flushes subnormal results to zero.

    JAX would emit six, with guards for subnormal numbers, which do not matter beside the largest weight of 1.
    """
    return _ptx_exp2(f"fma.rn.ftz.f32 %x, $1, 0f{_bits(unit)}, $2", x, -shift)


def product(a: Array, b: Array, a_axis: int, b_axis: int) -> Float[Array, "i j"]:
    """Contracts two tiles over an axis of each; float32 in full precision, sums in float32."""
    return lax.dot_general(
        a,
        b,
        (((a_axis,), (b_axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def seen(
    plan: TritonPlan,
    visibility: Visibility,
    program: ProgramIndex,
    rows: RowsOfTile,
    tile: Array,
    *,
    keys_first: bool,
) -> Bool[Array, "i j"]:
    """Which rows of a tile see which keys of another, `[rows, keys]` or `[keys, rows]`."""
    key = tile * plan.keys + numbers(plan.keys)
    i, j = (-2, -1) if keys_first else (-1, -2)

    def facing(of_rows: Array, of_keys: Array) -> tuple[Array, Array]:
        return jnp.expand_dims(of_rows, i), jnp.expand_dims(of_keys, j)

    def read(ref: Array | Ref | None, default: Array, in_bounds: Array | None) -> Array:
        if ref is None:
            return default
        return load(ref, (_batch_of(ref, program), default), in_bounds, -1)

    see = facing(rows.time, key)[1] < plan.key_len
    if plan.settings.mask.constrains or visibility.row_positions is not None:
        # without positions, count from 0
        of_rows = read(visibility.row_positions, rows.time, rows.in_bounds)
        of_keys = read(visibility.key_positions, key, None)
        positions = facing(of_rows, of_keys)
        if plan.pairs is None:
            see &= visible(plan.settings.mask.bind(), *positions)
        else:
            see &= plan.pairs.visible(
                *positions,
                [
                    jnp.expand_dims(read(x, rows.time, rows.in_bounds), i)
                    for x in visibility.features.queries
                ],
                [jnp.expand_dims(read(x, key, None), j) for x in visibility.features.keys],
            )
    if visibility.row_segments is not None:
        of_rows, of_keys = facing(
            read(visibility.row_segments, rows.time, rows.in_bounds),
            read(visibility.key_segments, key, None),
        )
        see &= of_rows == of_keys
    return see


def zero_hidden(
    plan: TritonPlan, visibility: Visibility, program: ProgramIndex, tile: Array, *arrays: Array
) -> tuple[Array, ...]:
    """Tiles of keys or values, or numbers of each key, with zeros for keys that no row of the call sees."""
    key, right = tile * plan.keys + numbers(plan.keys), plan.settings.mask.window[1]
    if visibility.key_positions is not None:
        positions = visibility.key_positions
        present = load(positions, (_batch_of(positions, program), key), None) >= 0
    elif plan.key_len > plan.query_len + right:  # positions count from 0
        present = key < plan.query_len + right
    else:
        return arrays
    return tuple(
        jnp.where(jnp.expand_dims(present, tuple(range(1, x.ndim))), x, jnp.zeros_like(x))
        for x in arrays
    )


def absent_rows(
    visibility: Visibility, program: ProgramIndex, rows: RowsOfTile
) -> Bool[Array, " rows"] | None:
    """Which rows are absent, by their position; None if none are."""
    if visibility.row_positions is None:
        return None
    index = (_batch_of(visibility.row_positions, program), rows.time)
    return load(visibility.row_positions, index, rows.in_bounds, -1) < 0


class TileRange(NamedTuple):
    """The tiles that a tile iterates over, and among them a run that needs no mask.

    `number` maps an index of the iteration to a tile; None: the index itself.
    """

    first: Any
    stop: Any
    begin: Any
    end: Any
    number: Callable[[Array], Array] | None = None


def tile_range(
    plan: TritonPlan, ranges: Ref | BlockList | None, program: ProgramIndex, *, of_keys: bool
) -> TileRange:
    """The tiles that this program's tile, of rows or of keys, iterates over.

    From `tile_ranges`, or if that is None from the mask with positions that count from 0.
    """
    tile = program.tile if of_keys else divide(program.tile, plan.head_tiles)[0]
    if isinstance(ranges, BlockList):
        return _list_range(plan, ranges, program, tile, of_keys=of_keys)
    if ranges is not None:
        return TileRange(*(ranges[i, _batch_of(ranges, program, 1), tile] for i in range(4)))
    sides = (plan.row_times, plan.query_len), (plan.keys, plan.key_len)
    (own_block, own_len), (other_block, other_len) = sides[::-1] if of_keys else sides
    unit = plan.head_tiles if of_keys else 1
    if not plan.settings.mask.constrains:
        # rows mask the keys that pad the last tile; keys need not mask the rows that do
        all_visible = -(-other_len // other_block) if of_keys else other_len // other_block
        bounds: Any = (
            np.int32(unit * x) for x in (0, -(-other_len // other_block), 0, all_visible)
        )
        return TileRange(*bounds)
    left, right = (min(side, own_len + other_len) for side in plan.settings.mask.window)
    if of_keys:
        left, right = right, left
    least, most = tile * own_block, jnp.minimum((tile + 1) * own_block, own_len) - 1
    first, _ = divide(jnp.maximum(least - left, 0), other_block)
    stop, _ = divide(jnp.minimum(most + right + 1, other_len) + (other_block - 1), other_block)
    begin, _ = divide(jnp.maximum(most - left, 0) + (other_block - 1), other_block)
    end, _ = divide(jnp.minimum(least + right + 1, other_len), other_block)
    first, stop, begin, end = (unit * x for x in (jnp.minimum(first, stop), stop, begin, end))
    return TileRange(first, stop, begin, end)


def _list_range(
    plan: TritonPlan, blocks: BlockList, program: ProgramIndex, tile: Array, *, of_keys: bool
) -> TileRange:
    order: Any = blocks.order
    batch = _batch_of(order, program)
    # the same queries are in a tile for each group of heads
    unit = plan.head_tiles if of_keys else 1

    def number(i: Array) -> Array:
        of_list, of_head = divide(i, unit)
        return order[batch, tile, of_list] * unit + of_head

    stop, unmasked = (x[batch, tile] * unit for x in (blocks.stop, blocks.unmasked))
    zero = jnp.zeros_like(stop)
    return TileRange(zero, stop, zero, unmasked, number)


def loop_over(
    plan: TritonPlan,
    tile_range: TileRange,
    program: ProgramIndex,
    step: Callable[[Any, Carry, bool], Carry],
    x: Carry,
) -> Carry:
    """`x = step(tile, x, masked)` over this program's share of its tile's range.

    First the tiles that need no mask, then those around them.
    """
    first, stop, begin, end, number = tile_range
    if plan.splits > 1:
        share, _ = divide(jnp.asarray(stop - first + (plan.splits - 1), jnp.int32), plan.splits)
        first = first + program.split * share
        stop = jnp.minimum(first + share, stop)
    if not isinstance(first, np.integer):
        # the run is within the share, even if either is empty
        begin = jnp.minimum(jnp.maximum(begin, first), jnp.maximum(first, stop))
        end = jnp.maximum(jnp.minimum(end, stop), begin)

    def tile_at(i: Array) -> Array:
        return i if number is None else number(i)

    x = lax.fori_loop(begin, end, lambda i, x: step(tile_at(i), x, False), x)
    if isinstance(tile_range.end, np.integer) and tile_range.end == tile_range.stop:
        return x

    def around(i: Array, x: Carry) -> Carry:
        return step(tile_at(jnp.where(i < begin, i, i + (end - begin))), x, True)

    return lax.fori_loop(first, stop - (end - begin), around, x)


def _batch_of(ref: Array | Ref, program: ProgramIndex, axis: int = 0) -> Any:
    return 0 if ref.shape[axis] == 1 else program.batch
