"""The GPU kernels' programs and their operations on tiles: launch, load and store, iterate, and mask scores.

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
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..._varying import result_like
from ...call._operands import Operands
from ...call._state import unfused
from ...masks._visibility import visible
from .._rows import BlockList, Visibility
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
from ._plan import TritonPlan, power

Carry = TypeVar("Carry")


def launch(
    kernel: Callable[..., None],
    plan: TritonPlan,
    operands: Operands,
    arrays: tuple[Any, ...],
    numbers: tuple[Any, ...],
    results: PyTree[jax.ShapeDtypeStruct],
    *,
    of_keys: bool = False,
    interpret: bool,
    name: str,
) -> Any:
    """Runs `kernel(program, *arrays, *numbers, *results)`.

    Results have a first axis of the programs that share a loop, and are float32 if there are several.
    """
    visibility, count = visibility_of(operands, plan), len(arrays)

    def run(*refs: Any) -> None:
        visibility, ranges = refs[count : count + 2]
        program = TritonProgram(plan, visibility, ranges, of_keys, interpret)
        kernel(program, *refs[:count], *refs[count + 2 :])

    def part(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = x.dtype if plan.splits == 1 else jnp.float32
        return result_like(operands.query, (plan.splits, *x.shape), dtype)

    tiles = plan.key_tiles if of_keys else plan.row_tiles
    return pl.pallas_call(
        run,
        grid=(tiles * plan.kv_heads * plan.batch * plan.splits,),
        out_shape=jax.tree.map(part, results),
        compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret,
        name=name,
    )(*arrays, visibility, tile_ranges(operands, visibility, plan, of_keys=of_keys), *numbers)


def numbers(size: int) -> Int[Array, " size"]:
    return lax.iota(jnp.int32, size)


def load(
    ref: Array | Ref, index: tuple[Any, ...], in_bounds: Array | None, other: float = 0
) -> Array:
    """Loads the elements at `index`, or `other` where `in_bounds` is false; None if all are in bounds."""
    ref_slice: Any = ref.at[index]
    if in_bounds is None:
        return triton.load(ref_slice)
    return triton.load(ref_slice, mask=in_bounds, other=other)


class TritonRows(NamedTuple):
    """Times and heads of the rows of a tile, and which rows exist (None: all)."""

    time: Int[Array, " rows"]
    head: Int[Array, " rows"]
    in_bounds: Bool[Array, " rows"] | None


class TritonProgram:
    """The running Triton program, which holds a tile of rows or of keys.

    Tiles with the longest loops under a causal mask start first: the last rows, the first keys.
    """

    def __init__(
        self,
        plan: TritonPlan,
        visibility: Visibility,
        ranges: Ref | BlockList | None,
        of_keys: bool,
        interpret: bool,
    ):
        self.plan, self.visibility, self.ranges = plan, visibility, ranges
        self.of_keys, self.interpret = of_keys, interpret
        tiles = plan.key_tiles if of_keys else plan.row_tiles
        heads, last_first = plan.kv_heads, not of_keys
        self.index = tile_index(plan, pl.program_id(0), tiles, heads, last_first=last_first)
        self.tile, self.kv_head, self.batch, self.split = self.index

    def rows(self, tile: Array) -> TritonRows:
        plan = self.plan
        time, head = divide(numbers(plan.rows), plan.row_heads)
        in_bounds = None if plan.full_rows else time < plan.row_times
        of_time, of_head = divide(tile, plan.head_tiles)
        time += of_time * plan.row_times
        head += of_head * plan.row_heads
        if in_bounds is not None:
            in_bounds &= (time < plan.query_len) & (head < plan.group)
        return TritonRows(time, head + self.kv_head * plan.group, in_bounds)

    def key_numbers(self, tile: Array) -> Int[Array, " keys"]:
        return tile * self.plan.keys + numbers(self.plan.keys)

    def load_rows(self, ref: Ref, rows: TritonRows, width: int) -> Array:
        """`[rows, width]` of an array `[B, T, N, width]`, zero outside of it."""
        index, in_bounds = _row_index(rows, width)
        return load(ref, (self.batch, *index), in_bounds)

    def store_rows(self, ref: Ref, rows: TritonRows, x: Array, width: int) -> None:
        """Stores `[rows, width]` to this program's share of `[splits, B, T, N, width]`."""
        index, in_bounds = _row_index(rows, width)
        self._store(ref, index, x.astype(ref.dtype), in_bounds)

    def load_numbers(self, ref: Ref, rows: TritonRows, other: float) -> Float[Array, " rows"]:
        """Loads one number per row of an array `[B, T, N]`; `other` outside of it."""
        return load(ref, (self.batch, rows.time, rows.head), rows.in_bounds, other)

    def store_numbers(self, ref: Ref, rows: TritonRows, x: Array) -> None:
        """Stores one number per row in this program's part of `[splits, B, T, N]`."""
        self._store(ref, (rows.time, rows.head), x, rows.in_bounds)

    def load_keys(self, ref: Array | Ref, tile: Array, width: int, full: bool) -> Array:
        """`[keys, width]` of an array `[B, S, K, width]`, zero outside of it unless the tile is `full`."""
        index, in_bounds = self._key_index(tile, width, full)
        return load(ref, (self.batch, *index), in_bounds)

    def store_keys(self, ref: Ref, x: Array, width: int) -> None:
        """Stores `[keys, width]` to this program's share of `[splits, B, S, K, width]`."""
        index, in_bounds = self._key_index(self.tile, width, False)
        self._store(ref, index, x.astype(ref.dtype), in_bounds)

    def _store(self, ref: Ref, index: tuple[Any, ...], x: Array, in_bounds: Array | None) -> None:
        triton.store(ref.at[(self.split, self.batch, *index)], x, mask=in_bounds)

    def _key_index(self, tile: Array, width: int, full: bool) -> tuple[Any, Any]:
        key, (column, in_width) = self.key_numbers(tile), _columns(width)
        in_bounds = None if full or self.plan.full_keys else (key < self.plan.key_len)[:, None]
        return (key[:, None], self.kv_head, column), _both(in_bounds, in_width, self.plan.keys)

    def read(self, x: Array | Ref, number: Array, in_bounds: Array | None) -> Array:
        """Loads per-query or per-key numbers of an array `[B or 1, T or S]`; -1 outside of it."""
        return load(x, (batch_of(x, self.index), number), in_bounds, -1)

    def seen(self, rows: TritonRows, tile: Array) -> Bool[Array, "i j"]:
        """Visibility `[rows, keys]` of a tile of keys, or `[keys, rows]` in a program of keys."""
        plan, visibility, key = self.plan, self.visibility, self.key_numbers(tile)
        i, j = (-2, -1) if self.of_keys else (-1, -2)

        def facing(of_rows: Array, of_keys: Array) -> tuple[Array, Array]:
            return jnp.expand_dims(of_rows, i), jnp.expand_dims(of_keys, j)

        def of_rows(x: Array | Ref | None) -> Array:  # without positions, count from 0
            return rows.time if x is None else self.read(x, rows.time, rows.in_bounds)

        def of_keys(x: Array | Ref | None) -> Array:
            return key if x is None else self.read(x, key, None)

        is_visible = facing(rows.time, key)[1] < plan.key_len
        if plan.settings.mask.constrains or visibility.row_positions is not None:
            positions = facing(of_rows(visibility.row_positions), of_keys(visibility.key_positions))
            if plan.pairs is None:
                is_visible &= visible(plan.settings.mask.bind(), *positions)
            else:
                is_visible &= plan.pairs.visible(
                    *positions,
                    [jnp.expand_dims(of_rows(x), i) for x in visibility.features.queries],
                    [jnp.expand_dims(of_keys(x), j) for x in visibility.features.keys],
                )
        if visibility.row_segments is not None:
            segments = of_rows(visibility.row_segments), of_keys(visibility.key_segments)
            is_visible &= jnp.equal(*facing(*segments))
        return is_visible

    def zero_hidden(self, tile: Array, *arrays: Array) -> tuple[Array, ...]:
        """Zeros the keys of a tile that no row of the call sees, whose memory may hold NaN."""
        plan, positions = self.plan, self.visibility.key_positions
        key, right = self.key_numbers(tile), plan.settings.mask.window[1]
        if positions is not None:
            present = load(positions, (batch_of(positions, self.index), key), None) >= 0
        elif plan.key_len > plan.query_len + right:  # positions count from 0
            present = key < plan.query_len + right
        else:
            return arrays
        return tuple(
            jnp.where(jnp.expand_dims(present, tuple(range(1, x.ndim))), x, jnp.zeros_like(x))
            for x in arrays
        )

    def exp2(self, x: Array, unit: float, shift: Array) -> Array:
        """The function $2^{x u - m}$ of float32 tiles, by two instructions for each element.

        Flushes subnormal results to zero. JAX would emit six instructions, with guards for subnormal numbers, which
        do not matter next to the largest weight, 1.
        """
        if self.interpret:
            return jnp.exp2(x * unit - shift)
        return _ptx_exp2(f"fma.rn.ftz.f32 %x, $1, 0f{_bits(unit)}, $2", x, -shift)

    def exp2_from(self, x: Array, unit: float, shift: Array) -> Array:
        """The function $2^{(x - m) u}$, exactly 1 where `x` equals `m`, unlike `exp2` for large numbers."""
        if self.interpret:
            return jnp.exp2((unfused(x) - shift) * unit)
        scaled = f"sub.rn.ftz.f32 %x, $1, $2; mul.rn.ftz.f32 %x, %x, 0f{_bits(unit)}"
        return _ptx_exp2(scaled, x, shift)

    def loop(self, step: Callable[[Any, Carry, bool], Carry], x: Carry) -> Carry:
        """`x = step(tile, x, masked)` over this program's share of its tile's range of `tile_ranges`.

        First the tiles that need no mask, then those around them.
        """
        whole, number = self._range()
        first, stop, begin, end = split_bounds(self.plan, whole, self.split)
        x = lax.fori_loop(begin, end, lambda i, x: step(number(i), x, False), x)
        if isinstance(whole.end, np.integer) and whole.end == whole.stop:
            return x

        def around(i: Array, x: Carry) -> Carry:
            return step(number(jnp.where(i < begin, i, i + (end - begin))), x, True)

        return lax.fori_loop(first, stop - (end - begin), around, x)

    def _range(self) -> tuple[Bounds, Callable[[Array], Array]]:
        """Returns the loop bounds of this program's tile, and the function from loop index to tile."""
        plan, ranges, of_keys = self.plan, self.ranges, self.of_keys
        tile = self.tile if of_keys else divide(self.tile, plan.head_tiles)[0]
        if ranges is None:
            return counted_bounds(plan, tile, of_keys=of_keys), lambda i: i
        if not isinstance(ranges, BlockList):
            batch = batch_of(ranges, self.index, 1)
            return Bounds(*(ranges[i, batch, tile] for i in range(4))), lambda i: i
        order: Any = ranges.order
        batch = batch_of(order, self.index)
        # the same queries are in a tile for each group of heads
        unit = plan.head_tiles if of_keys else 1

        def number(i: Array) -> Array:
            of_list, of_head = divide(i, unit)
            return order[batch, tile, of_list] * unit + of_head

        stop, unmasked = (x[batch, tile] * unit for x in (ranges.stop, ranges.unmasked))
        zero = jnp.zeros_like(stop)
        return Bounds(zero, stop, zero, unmasked), number


def _columns(width: int) -> tuple[Int[Array, "1 width"], Bool[Array, "1 width"] | None]:
    """Returns the columns of a tile over an array's last axis, and which exist (None: all)."""
    number = numbers(power(width))[None, :]
    return number, None if power(width) == width else number < width


def _row_index(rows: TritonRows, width: int) -> tuple[tuple[Array, Array, Array], Any]:
    (column, in_width), in_bounds = _columns(width), rows.in_bounds
    time, head = rows.time[:, None], rows.head[:, None]
    in_bounds = None if in_bounds is None else in_bounds[:, None]
    return (time, head, column), _both(in_bounds, in_width, len(rows.time))


def _both(a: Array | None, b: Array | None, size: int) -> Array | None:
    if a is None:
        return None if b is None else jnp.broadcast_to(b, (size, b.shape[1]))
    return a if b is None else a & b


def _bits(x: float) -> str:
    return struct.pack(">f", x).hex().upper()


def _ptx_exp2(instructions: str, x: Array, shift: Array) -> Array:
    """Returns 2^x elementwise, with `%x` computed by PTX instructions from an element and its shift."""
    (out,) = triton.elementwise_inline_asm(
        f"{{ .reg .f32 %x; {instructions}; ex2.approx.ftz.f32 $0, %x; }}",
        args=[x, jnp.broadcast_to(shift, x.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return out


def product(a: Array, b: Array, a_axis: int, b_axis: int) -> Float[Array, "i j"]:
    """Contracts two tiles over an axis of each; float32 in full precision, sums in float32."""
    axes = ((a_axis,), (b_axis,)), ((), ())
    return lax.dot_general(a, b, axes, lax.Precision.HIGHEST, jnp.float32)
