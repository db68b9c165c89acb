"""Parts of arrays, without copies of the whole."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

Corner = tuple[Array | np.ndarray, ...]


def slice_of(x: Array, axis: int, first: Array, size: int) -> Array:
    """`size` entries of an axis from `first` on."""
    zero = np.zeros((), first.dtype)
    corner = tuple(first if i == axis else zero for i in range(x.ndim))
    return slice_at(x, corner, (*x.shape[:axis], size, *x.shape[axis + 1 :]))


def slice_at(x: Array, corner: Corner, sizes: tuple[int, ...]) -> Array:
    """The part of these sizes that begins at a corner."""
    return (
        _slice_bits(x, corner, sizes)
        if x.dtype.itemsize == 2
        else lax.dynamic_slice(x, corner, sizes)
    )


def add_at(total: Array, part: Array, corner: Corner) -> Array:
    """`total` with `part` added to its entries from a corner on."""
    old = lax.dynamic_slice(total, corner, part.shape)
    return lax.dynamic_update_slice(total, old + part, corner)


# In JAX 0.8 to 0.10 XLA:CPU slices 16-bit floats through a float32 copy of the whole array (see the
# compiled HLO), but integers without.
@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _slice_bits(x: Array, corner: Corner, sizes: tuple[int, ...]) -> Array:
    bits = lax.bitcast_convert_type(x, jnp.uint16)
    return lax.bitcast_convert_type(lax.dynamic_slice(bits, corner, sizes), x.dtype)


@_slice_bits.defjvp
def _slice_bits_jvp(sizes: tuple[int, ...], primals: Any, tangents: Any) -> tuple[Array, Array]:
    (x, corner), (change, _) = primals, tangents
    return _slice_bits(x, corner, sizes), lax.dynamic_slice(change, corner, sizes)
