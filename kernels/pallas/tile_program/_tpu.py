"""Products, sums and functions on TPUs, of tiles of one shape: the same bits in all surroundings."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ..._varying import result_like
from .._tiles import dot

LANES = 128
# Rows, columns and the depth of a step at most: constants of the format.
HEIGHT, WIDTH, STEP = 128, 512, 1024
ENTRIES = 64, 512  # of a function
# of angles of any size; nobody has seen Mosaic's
_OF_XLA = "sin", "cos"


def product(
    a: Float[Array, "m k"], b: Float[Array, "..."], is_transposed: bool, *, interpret: bool
) -> Float[Array, "m n"]:
    """`a` times `b` `[K, N]`, or the transpose of `b` `[N, K]`, summed in float32."""
    (rows, depth), columns = a.shape, b.shape[0 if is_transposed else 1]
    width, step = (
        min(most, size + -size % LANES) for most, size in ((WIDTH, columns), (STEP, depth))
    )
    a = jnp.pad(a, ((0, -rows % HEIGHT), (0, 0)))
    of_b = pl.BlockSpec((step, width), lambda i, j, k: (k, j))
    if is_transposed:
        of_b = pl.BlockSpec((width, step), lambda i, j, k: (j, k))
    result = pl.pallas_call(
        functools.partial(_product, depth, is_transposed),
        grid=(len(a) // HEIGHT, pl.cdiv(columns, width), pl.cdiv(depth, step)),
        in_specs=[pl.BlockSpec((HEIGHT, step), lambda i, j, k: (i, k)), of_b],
        out_specs=pl.BlockSpec((HEIGHT, width), lambda i, j, k: (i, j)),
        out_shape=result_like(a, (len(a), columns), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="tile_program_product",
    )(a, b)
    return result[:rows]


def sums(x: Float[Array, "m n"], *, interpret: bool) -> Float[Array, " m"]:
    rows, count = x.shape
    x = jnp.pad(x, ((0, -rows % HEIGHT), (0, -count % WIDTH)))
    result = pl.pallas_call(
        _sums,
        grid=(len(x) // HEIGHT, x.shape[1] // WIDTH),
        in_specs=[pl.BlockSpec((HEIGHT, WIDTH), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((HEIGHT, 1), lambda i, j: (i, 0)),
        out_shape=result_like(x, (len(x), 1), jnp.float32),
        scratch_shapes=[pltpu.VMEM((HEIGHT, WIDTH), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="tile_program_sums",
    )(x)
    return result[:rows, 0]


def entries(
    name: str, f: Callable[..., Array], *arrays: Float[Array, "..."], interpret: bool
) -> Float[Array, "..."]:
    if name in _OF_XLA:
        return f(*arrays)
    shape, width = arrays[0].shape, arrays[0].shape[-1] if arrays[0].ndim else 1
    rows = [x.reshape(-1, width) for x in arrays]
    rows = [jnp.pad(x, ((0, -len(x) % ENTRIES[0]), (0, 0))) for x in rows]

    def kernel(*refs: Ref) -> None:
        refs[-1][...] = f(*(x[...] for x in refs[:-1]))

    block = ENTRIES[0], min(width, ENTRIES[1])
    spec = pl.BlockSpec(block, lambda i, j: (i, j))
    result = pl.pallas_call(
        kernel,
        grid=(len(rows[0]) // block[0], pl.cdiv(width, block[1])),
        in_specs=[spec] * len(rows),
        out_specs=spec,
        out_shape=result_like(rows[0], rows[0].shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="tile_program_entries",
    )(*rows)
    return lax.collapse(result, 0)[: arrays[0].size].reshape(shape)


def _product(depth: int, is_transposed: bool, a: Ref, b: Ref, out: Ref) -> None:
    # One grid step: adds a partial product to the result block, which stays in VMEM.
    k, axis = pl.program_id(2), 1 if is_transposed else 0
    x, y = a[...], b[...]
    if depth % a.shape[1]:  # behind the last number there is anything
        left = depth - k * a.shape[1]
        x, y = _first(x, 1, left), _first(y, axis, left)
    part = dot(x.astype(a.dtype), y.astype(b.dtype), (1, axis))

    @pl.when(k == 0)
    def _() -> None:
        out[...] = part

    @pl.when(k > 0)
    def _() -> None:
        out[...] += part


def _sums(x: Ref, out: Ref, total: Ref) -> None:
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _() -> None:
        total[...] = x[...]

    @pl.when(j > 0)
    def _() -> None:
        total[...] += x[...]

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        out[...] = total[...].sum(1, keepdims=True)


def _first(x: Array, axis: int, count: Array) -> Array:
    # Zeros a block after `count` entries of an axis; in float32, as Mosaic lacks 16-bit masks on some chips.
    present = lax.broadcasted_iota(jnp.int32, x.shape, axis) < count
    return jnp.where(present, x.astype(jnp.float32), 0.0)
