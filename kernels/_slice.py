"""Primitives that slice an array, and add to a slice, which remain slices under `jax.vmap`.

Under `jax.vmap` JAX turns `lax.dynamic_slice` into a gather, and an update into a scatter, even if all batch entries
are sliced at the same index. XLA's partitioner aborts on such a gather of an array that is sharded along several axes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike
from jaxtyping import Array

Corner = tuple[ArrayLike, ...]


def slice_at(x: Array, corner: Corner, sizes: tuple[int, ...]) -> Array:
    return slice_p.bind(x, *corner, sizes=sizes)


def add_at(total: Array, part: Array, corner: Corner) -> Array:
    """Adds `part` to the slice of `total` that begins at a corner."""
    return add_p.bind(total, part, *corner)


def _slice(x: Array, *corner: ArrayLike, sizes: tuple[int, ...]) -> Array:
    if x.dtype.itemsize != 2:
        return lax.dynamic_slice(x, corner, sizes)
    # Older versions of XLA:CPU slice 16-bit floats, but not integers, through a float32 copy of the whole array. The
    # barrier ties it to the corner: else XLA hoists the cast of the whole array out of a loop, which copies it, too.
    # Without this, `test_loops_copy_no_keys` fails on the oldest JAX.
    x, corner = lax.optimization_barrier((x, corner))
    bits = lax.bitcast_convert_type(x, jnp.uint16)
    return lax.bitcast_convert_type(lax.dynamic_slice(bits, corner, sizes), x.dtype)


def _add(total: Array, part: Array, *corner: ArrayLike) -> Array:
    old = lax.dynamic_slice(total, corner, part.shape)
    return lax.dynamic_update_slice(total, old + part, corner)


def _slice_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, sizes: tuple[int, ...]) -> Any:
    (x, *corner), (change, *_) = primals, tangents
    out = slice_at(x, tuple(corner), sizes)
    if isinstance(change, ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())  # pyright: ignore[reportAttributeAccessIssue]
    return out, slice_at(change, tuple(corner), sizes)


def _slice_transpose(
    cotangent: Array | ad.Zero, x: Any, *corner: ArrayLike, sizes: tuple[int, ...]
) -> list[Any]:
    none = [None] * len(corner)
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval), *none]
    zeros = lax.full_like(cotangent, 0, shape=x.aval.shape)
    return [add_at(zeros, cotangent, tuple(corner)), *none]


def _add_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    (total, part, *corner), (d_total, d_part, *_) = primals, tangents
    out = add_at(total, part, tuple(corner))
    if isinstance(d_part, ad.Zero):
        return out, d_total
    d_total = ad.instantiate_zeros(d_total)
    return out, add_at(d_total, d_part, tuple(corner))


def _add_transpose(
    cotangent: Array | ad.Zero, total: Any, part: Any, *corner: ArrayLike
) -> list[Any]:
    result: list[Any] = [None] * (2 + len(corner))
    for i, x in enumerate((total, part)):
        if not ad.is_undefined_primal(x):
            continue
        if isinstance(cotangent, ad.Zero):
            result[i] = ad.Zero(x.aval)
        else:
            result[i] = slice_at(cotangent, tuple(corner), x.aval.shape) if i else cotangent
    return result


def _slice_batch(
    flat: Sequence[Any], axes: Sequence[int | None], *, sizes: tuple[int, ...]
) -> tuple[Array, int]:
    (x, *corner), (axis, *of_corner) = flat, axes
    # JAX's own rule is a gather (https://github.com/jax-ml/jax/pull/504), also where all entries have one corner
    if axis is None or any(y is not None for y in of_corner):
        return jax.vmap(lambda *y: _slice(*y, sizes=sizes), in_axes=tuple(axes))(*flat), 0
    x = jnp.moveaxis(x, axis, 0)
    return slice_at(x, _with_batch(corner), (len(x), *sizes)), 0


def _add_batch(flat: Sequence[Any], axes: Sequence[int | None]) -> tuple[Array, int]:
    if any(y is not None for y in axes[2:]):
        return jax.vmap(_add, in_axes=tuple(axes))(*flat), 0
    count = next(x.shape[y] for x, y in zip(flat, axes, strict=True) if y is not None)
    pairs = zip(flat[:2], axes[:2], strict=True)
    total, part = (batching.bdim_at_front(x, y, count) for x, y in pairs)
    return add_at(total, part, _with_batch(flat[2:])), 0


def _with_batch(corner: Sequence[Any]) -> Corner:
    return (np.zeros((), corner[0].dtype), *corner)


def _primitive(
    name: str,
    function: Callable[..., Array],
    jvp: Callable[..., Any],
    transpose: Callable[..., Any],
    batch: Callable[..., Any],
    static: Sequence[str] = (),
) -> Primitive:
    primitive = Primitive(name)

    @primitive.def_abstract_eval
    def _(*flat: jax.core.ShapedArray, **params: Any) -> Any:
        return jax.make_jaxpr(lambda *x: function(*x, **params))(*flat).out_avals[0]

    primitive.def_impl(jax.jit(function, static_argnames=static))
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    return primitive


slice_p = _primitive("block_slice", _slice, _slice_jvp, _slice_transpose, _slice_batch, ["sizes"])
add_p = _primitive("block_add", _add, _add_jvp, _add_transpose, _add_batch)
