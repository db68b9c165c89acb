"""Products, sums and functions on NVIDIA's GPUs, of tiles of one shape: the same bits in all surroundings."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float

from ..._varying import result_like
from .._tiles import dot

# Rows, columns and the depth of a step of a product, by the bytes of a number: constants of the format, as are the
# others. Products of float32 are made of single instructions, of which larger tiles have too many.
TILES = {2: (64, 64, 64), 4: (16, 64, 32)}
SUMMED = 8, 512  # rows and columns that are added at once
ENTRIES = 1024  # of a function
WARPS, STAGES = 4, 4


def product(
    a: Float[Array, "m k"], b: Float[Array, "..."], is_transposed: bool, *, interpret: bool
) -> Float[Array, "m n"]:
    """`a` times `b` `[K, N]`, or the transpose of `b` `[N, K]`, summed in float32."""
    rows, columns = len(a), b.shape[0 if is_transposed else 1]
    tile = TILES[_bytes(a, b)]
    a = _padded(a, tile[0])
    result = pl.pallas_call(
        functools.partial(_product, tile, is_transposed),
        grid=(len(a) // tile[0], pl.cdiv(columns, tile[1])),
        out_shape=result_like(a, (len(a), columns), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="tile_program_product",
    )(a, b)
    return result[:rows]


def sums(x: Float[Array, "m n"], *, interpret: bool) -> Float[Array, " m"]:
    rows, x = len(x), _padded(x, SUMMED[0])
    result = pl.pallas_call(
        _sums,
        grid=(len(x) // SUMMED[0],),
        out_shape=result_like(x, (len(x),), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="tile_program_sums",
    )(x)
    return result[:rows]


def entries(
    name: str, f: Callable[..., Array], *arrays: Float[Array, "..."], interpret: bool
) -> Float[Array, "..."]:
    """A function of arrays of one shape, entry by entry: XLA:GPU has two compilers of what it fuses."""
    del name
    size, shape = arrays[0].size, arrays[0].shape
    flat = [_padded(x.reshape(-1), ENTRIES) for x in arrays]

    def kernel(*refs: Ref) -> None:
        refs[-1][...] = f(*(x[...] for x in refs[:-1]))

    spec = pl.BlockSpec((ENTRIES,), lambda i: (i,))
    result = pl.pallas_call(
        kernel,
        grid=(len(flat[0]) // ENTRIES,),
        in_specs=[spec] * len(flat),
        out_specs=spec,
        out_shape=result_like(flat[0], flat[0].shape, jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="tile_program_entries",
    )(*flat)
    return result[:size].reshape(shape)


def _bytes(a: Array, b: Array) -> int:
    # Bytes per number of the operands of a product; float32 times bfloat16 is split into bfloat16.
    kinds = {x.dtype.name for x in (a, b)}
    of_thirds = kinds == {"bfloat16", "float32"}
    return 2 if of_thirds or (len(kinds) == 1 and "float32" not in kinds) else 4


def _padded(x: Array, block: int) -> Array:
    # Pads `x` to an even number of blocks, so that a kernel needs no mask and is the same code for all lengths.
    return jnp.pad(x, ((0, -len(x) % (2 * block)), *[(0, 0)] * (x.ndim - 1)))


def _product(tile: tuple[int, int, int], is_transposed: bool, a: Ref, b: Ref, out: Ref) -> None:
    height, width, step = tile
    depth, columns = a.shape[1], out.shape[1]
    rows = pl.program_id(0) * height + lax.iota(jnp.int32, height)
    places = pl.program_id(1) * width + lax.iota(jnp.int32, width)
    is_column = _is_inside(places, columns, width)

    def add(index: Array, total: Array) -> Array:
        at = index * step + lax.iota(jnp.int32, step)
        is_term = _is_inside(at, depth, step)
        x = _load(a, (rows, None), (at, is_term))
        sides = (places, is_column), (at, is_term)
        y = _load(b, *(sides if is_transposed else reversed(sides)))
        return total + dot(x, y, (1, 1 if is_transposed else 0))

    steps = jnp.int32(pl.cdiv(depth, step))  # summed in one order, whatever the number of rows
    total = lax.fori_loop(jnp.int32(0), steps, add, jnp.zeros((height, width), jnp.float32))
    mask = None if is_column is None else jnp.broadcast_to(is_column[None], total.shape)
    triton.store(out.at[rows[:, None], places[None]], total, mask=mask)


def _sums(x: Ref, out: Ref) -> None:
    height, width = SUMMED
    rows, columns = pl.program_id(0) * height + lax.iota(jnp.int32, height), x.shape[1]

    def add(index: Array, total: Array) -> Array:
        at = index * width + lax.iota(jnp.int32, width)
        return total + _load(x, (rows, None), (at, _is_inside(at, columns, width)))

    steps = jnp.int32(pl.cdiv(columns, width))
    total = lax.fori_loop(jnp.int32(0), steps, add, jnp.zeros(SUMMED, jnp.float32))
    triton.store(out.at[rows], total.sum(1))


def _is_inside(index: Array, size: int, block: int) -> Bool[Array, " block"] | None:
    """Whether indices are below `size`; None if `block` divides it, so that all are."""
    return None if size % block == 0 else index < size


def _load(ref: Ref, first: tuple[Array, Array | None], second: tuple[Array, Array | None]) -> Array:
    """Loads the numbers at pairs of indices; zeros outside the array."""
    shape = len(first[0]), len(second[0])
    at = ref.at[first[0][:, None], second[0][None]]
    masks = [
        jnp.broadcast_to(jnp.expand_dims(inside, axis), shape)
        for (_, inside), axis in ((first, 1), (second, 0))
        if inside is not None
    ]
    if not masks:
        return triton.load(at)
    return triton.load(at, mask=functools.reduce(jnp.logical_and, masks), other=0)
