"""The GPU kernels' operations on tiles: load and store, iterate, and mask their scores.

Arrays are read and written in place, `[B, T, N, H]` and `[B, S, K, H]`, by the indices of rows, heads
and columns. Loads mask what lies outside an array, so that any widths and lengths fit into tiles,
whose sizes are powers of two.
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
from ._plan import Plan
from ._sizes import power

Carry = TypeVar("Carry")

LOG2_E = float(np.log2(np.e))  # within a kernel scores are in bits, as the hardware only has exp2


class ProgramIndex(NamedTuple):
    """The index of a program: its tile, key head, batch entry, and share of the iteration."""

    tile: Array
    kv_head: Array
    batch: Array
    split: Array


def program_index(plan: Plan, *, of_keys: bool) -> ProgramIndex:
    """The index of this program, whose tile is of rows or of keys; tiles vary fastest.

    Under a causal mask the last rows see most keys, and most rows see the first keys. These tiles
    start first, and short iterations come last.
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
    """0, 1, ... in int32."""
    return lax.iota(jnp.int32, size)


def load(ref: Array | Ref, index: tuple[Any, ...], there: Array | None, other: float = 0) -> Array:
    """The elements at `index`, `other` where they do not exist (`there`; None: all do)."""
    here: Any = ref.at[index]
    if there is None:
        return triton.load(here)
    return triton.load(here, mask=there, other=other)


class Columns(NamedTuple):
    """The columns of a tile over an array's last axis: their indices, and which exist."""

    number: Int[Array, "1 width"]
    there: Bool[Array, "1 width"] | None


def columns(width: int) -> Columns:
    """The columns of a tile for arrays of `width`."""
    number = numbers(power(width))[None, :]
    return Columns(number, None if power(width) == width else number < width)


class Rows(NamedTuple):
    """The rows of a tile of queries: their times and heads, and which exist."""

    time: Int[Array, " rows"]
    head: Int[Array, " rows"]
    there: Bool[Array, " rows"] | None


def rows(plan: Plan, tile: Array, kv_head: Array) -> Rows:
    """The rows of a tile."""
    time, head = divide(numbers(plan.rows), plan.row_heads)
    if plan.full_rows:
        there = None
    else:
        there = time < plan.row_times
    of_time, of_head = divide(tile, plan.head_tiles)
    time += of_time * plan.row_times
    head += of_head * plan.row_heads
    if there is not None:
        there &= (time < plan.query_len) & (head < plan.group)
    return Rows(time, head + kv_head * plan.group, there)


def load_rows(ref: Ref, at: ProgramIndex, rows: Rows, width: int) -> Array:
    """`[rows, width]` of an array `[B, T, N, width]`, zero outside of it."""
    index, there = _row_index(rows, columns(width))
    return load(ref, (at.batch, *index), there)


def store_rows(ref: Ref, at: ProgramIndex, rows: Rows, x: Array, width: int) -> None:
    """Stores `[rows, width]` to this program's share of `[splits, B, T, N, width]`."""
    index, there = _row_index(rows, columns(width))
    triton.store(ref.at[(at.split, at.batch, *index)], x.astype(ref.dtype), mask=there)


def store_numbers(ref: Ref, at: ProgramIndex, rows: Rows, x: Array) -> None:
    """Stores one number for each row to this program's share of `[splits, B, T, N]`."""
    triton.store(ref.at[(at.split, at.batch, rows.time, rows.head)], x, mask=rows.there)


def _row_index(rows: Rows, columns: Columns) -> tuple[tuple[Array, Array, Array], Any]:
    time, head = rows.time[:, None], rows.head[:, None]
    there = None if rows.there is None else rows.there[:, None]
    return (time, head, columns.number), _both(there, columns.there, len(rows.time))


def _both(a: Array | None, b: Array | None, size: int) -> Array | None:
    if a is None:
        return None if b is None else jnp.broadcast_to(b, (size, b.shape[1]))
    return a if b is None else a & b


def load_numbers(ref: Ref, at: ProgramIndex, rows: Rows, other: float) -> Float[Array, " rows"]:
    """One number for each row, of an array `[B, T, N]`; `other` outside of it."""
    return load(ref, (at.batch, rows.time, rows.head), rows.there, other)


def load_keys(
    plan: Plan, ref: Array | Ref, at: ProgramIndex, tile: Array, width: int, full: bool
) -> Array:
    """`[keys, width]` of an array `[B, S, K, width]`, zero outside of it unless the tile is `full`."""
    index, there = _key_index(plan, at, tile, width, full)
    return load(ref, (at.batch, *index), there)


def store_keys(plan: Plan, ref: Ref, at: ProgramIndex, x: Array, width: int) -> None:
    """Stores `[keys, width]` to this program's share of `[splits, B, S, K, width]`."""
    index, there = _key_index(plan, at, at.tile, width, False)
    triton.store(ref.at[(at.split, at.batch, *index)], x.astype(ref.dtype), mask=there)


def _key_index(
    plan: Plan, at: ProgramIndex, tile: Array, width: int, full: bool
) -> tuple[Any, Any]:
    key, column = tile * plan.keys + numbers(plan.keys), columns(width)
    there = None if full or plan.full_keys else (key < plan.key_len)[:, None]
    return (key[:, None], at.kv_head, column.number), _both(there, column.there, plan.keys)


Exp2 = Callable[[Array, float, Array], Array]


def exp2_of(*, interpret: bool) -> Exp2:
    """The function $2^{x u - m}$ of float32 tiles `x`, a number `u` and what `m` is for each row."""
    return _interpreted_exp2 if interpret else _exp2


def exp2_from(x: Array, shift: Array, *, unit: float, interpret: bool) -> Array:
    """The function $2^{(x - m) u}$, which is 1 where `x` is `m`, however large: the weights of a softmax.

    In `exp2_of` the product is not rounded and `m` is, which from 1e9 on is no small difference.
    """
    if interpret:
        return jnp.exp2((unfused(x) - shift) * unit)
    (found,) = triton.elementwise_inline_asm(
        "{ .reg .f32 %x; sub.rn.ftz.f32 %x, $1, $2; mul.rn.ftz.f32 %x, %x, 0f"
        f"{_bits(unit)}; ex2.approx.ftz.f32 $0, %x; }}",
        args=[x, jnp.broadcast_to(shift, x.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return found


def _bits(x: float) -> str:
    """A float32 number in PTX."""
    return struct.pack(">f", x).hex().upper()


def _interpreted_exp2(x: Array, unit: float, shift: Array) -> Array:
    return jnp.exp2(x * unit - shift)


def _exp2(x: Array, unit: float, shift: Array) -> Array:
    """By two instructions for each element, a fused multiply-add and the power; zero below normal numbers.

    JAX makes six of it: two for the first, and the power with a guard that keeps subnormal results. No weight
    of a softmax is the worse without, as its largest is 1.
    """
    (found,) = triton.elementwise_inline_asm(
        f"{{ .reg .f32 %x; fma.rn.ftz.f32 %x, $1, 0f{_bits(unit)}, $2; ex2.approx.ftz.f32 $0, %x; }}",
        args=[x, jnp.broadcast_to(-shift, x.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return found


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
    plan: Plan,
    visibility: Visibility,
    at: ProgramIndex,
    rows: Rows,
    tile: Array,
    *,
    keys_first: bool,
) -> Bool[Array, "i j"]:
    """Which rows of a tile see which keys of another, `[rows, keys]` or `[keys, rows]`."""
    key = tile * plan.keys + numbers(plan.keys)

    def facing(of_rows: Array, of_keys: Array) -> tuple[Array, Array]:
        i, j = (-2, -1) if keys_first else (-1, -2)
        return jnp.expand_dims(of_rows, i), jnp.expand_dims(of_keys, j)

    def of(ref: Array | Ref | None, number: Array, there: Array | None) -> Array:
        return number if ref is None else load(ref, (_row_of(ref, at), number), there, -1)

    found = facing(rows.time, key)[1] < plan.key_len
    if plan.settings.mask.constrains or visibility.row_positions is not None:
        # positions that are not given count from 0
        of_rows = of(visibility.row_positions, rows.time, rows.there)
        of_keys = of(visibility.key_positions, key, None)
        positions = facing(of_rows, of_keys)
        if plan.pairs is None:
            found &= visible(plan.settings.mask.bind(), *positions)
        else:
            i, j = (-2, -1) if keys_first else (-1, -2)
            found &= plan.pairs.visible(
                *positions,
                [
                    jnp.expand_dims(of(x, rows.time, rows.there), i)
                    for x in visibility.features.queries
                ],
                [jnp.expand_dims(of(x, key, None), j) for x in visibility.features.keys],
            )
    if visibility.row_segments is not None:
        of_rows, of_keys = facing(
            of(visibility.row_segments, rows.time, rows.there),
            of(visibility.key_segments, key, None),
        )
        found &= of_rows == of_keys
    return found


def zero_hidden(
    plan: Plan, visibility: Visibility, at: ProgramIndex, tile: Array, *arrays: Array
) -> tuple[Array, ...]:
    """Tiles of keys or values, or numbers of each key, with zeros for keys that no row of the call sees."""
    key, right = tile * plan.keys + numbers(plan.keys), plan.settings.mask.window[1]
    if visibility.key_positions is not None:
        there = (
            load(visibility.key_positions, (_row_of(visibility.key_positions, at), key), None) >= 0
        )
    elif plan.key_len > plan.query_len + right:  # positions count from 0
        there = key < plan.query_len + right
    else:
        return arrays
    return tuple(
        jnp.where(jnp.expand_dims(there, tuple(range(1, x.ndim))), x, jnp.zeros_like(x))
        for x in arrays
    )


def absent_rows(
    visibility: Visibility, at: ProgramIndex, rows: Rows
) -> Bool[Array, " rows"] | None:
    """Which rows are absent, by their position; None if none are."""
    if visibility.row_positions is None:
        return None
    index = (_row_of(visibility.row_positions, at), rows.time)
    return load(visibility.row_positions, index, rows.there, -1) < 0


class TileRange(NamedTuple):
    """The tiles that a tile iterates over, and among them a run that needs no mask.

    `number` tells the tile at an index of the iteration; None: the index itself.
    """

    first: Any
    stop: Any
    begin: Any
    end: Any
    number: Callable[[Array], Array] | None = None


def tile_range(
    plan: Plan, found: Ref | BlockList | None, at: ProgramIndex, *, of_keys: bool
) -> TileRange:
    """The tiles that this program's tile, of rows or of keys, iterates over.

    From `tile_ranges`, or if that is None from the mask with positions that count from 0.
    """
    tile = at.tile if of_keys else divide(at.tile, plan.head_tiles)[0]
    if isinstance(found, BlockList):
        return _listed(plan, found, at, tile, of_keys=of_keys)
    if found is not None:
        return TileRange(*(found[i, _row_of(found, at, 1), tile] for i in range(4)))
    sides = (plan.row_times, plan.query_len), (plan.keys, plan.key_len)
    (block, size), (other, others) = sides[::-1] if of_keys else sides
    unit = plan.head_tiles if of_keys else 1
    if not plan.settings.mask.constrains:
        # rows mask the keys that pad the last tile; keys need not mask the rows that do
        whole = -(-others // other) if of_keys else others // other
        ends: Any = (np.int32(unit * x) for x in (0, -(-others // other), 0, whole))
        return TileRange(*ends)
    left, right = (min(side, size + others) for side in plan.settings.mask.window)
    if of_keys:
        left, right = right, left
    least, most = tile * block, jnp.minimum((tile + 1) * block, size) - 1
    first, _ = divide(jnp.maximum(least - left, 0), other)
    stop, _ = divide(jnp.minimum(most + right + 1, others) + (other - 1), other)
    begin, _ = divide(jnp.maximum(most - left, 0) + (other - 1), other)
    end, _ = divide(jnp.minimum(least + right + 1, others), other)
    first, stop, begin, end = (unit * x for x in (jnp.minimum(first, stop), stop, begin, end))
    return TileRange(first, stop, begin, end)


def _listed(
    plan: Plan, found: BlockList, at: ProgramIndex, tile: Array, *, of_keys: bool
) -> TileRange:
    order: Any = found.order
    batch = _row_of(order, at)
    # the same queries are in a tile for each group of heads
    unit = plan.head_tiles if of_keys else 1

    def number(i: Array) -> Array:
        of_list, of_head = divide(i, unit)
        return order[batch, tile, of_list] * unit + of_head

    stop, whole = (x[batch, tile] * unit for x in (found.stop, found.whole))
    zero = jnp.zeros_like(stop)
    return TileRange(zero, stop, zero, whole, number)


def loop_over(
    plan: Plan,
    over: TileRange,
    at: ProgramIndex,
    step: Callable[[Any, Carry, bool], Carry],
    x: Carry,
) -> Carry:
    """`x = step(tile, x, masked)` over this program's share of its tile's range.

    First the tiles that need no mask, then those around them.
    """
    first, stop, begin, end, number = over
    if plan.splits > 1:
        share, _ = divide(jnp.asarray(stop - first + (plan.splits - 1), jnp.int32), plan.splits)
        first = first + at.split * share
        stop = jnp.minimum(first + share, stop)
    if not isinstance(first, np.integer):
        # the run is within the share, even if either is empty
        begin = jnp.minimum(jnp.maximum(begin, first), jnp.maximum(first, stop))
        end = jnp.maximum(jnp.minimum(end, stop), begin)

    def tile_at(i: Array) -> Array:
        return i if number is None else number(i)

    x = lax.fori_loop(begin, end, lambda i, x: step(tile_at(i), x, False), x)
    if isinstance(over.end, np.integer) and over.end == over.stop:
        return x

    def around(i: Array, x: Carry) -> Carry:
        return step(tile_at(jnp.where(i < begin, i, i + (end - begin))), x, True)

    return lax.fori_loop(first, stop - (end - begin), around, x)


def _row_of(ref: Array | Ref, at: ProgramIndex, axis: int = 0) -> Any:
    return 0 if ref.shape[axis] == 1 else at.batch
