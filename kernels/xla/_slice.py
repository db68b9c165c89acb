"""Parts of arrays, without copies of the whole."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def slice_of(x: Array, axis: int, first: Array, size: int) -> Array:
    """`size` entries of an axis from `first` on."""
    if x.dtype.itemsize != 2:
        return lax.dynamic_slice_in_dim(x, first, size, axis)
    # In JAX 0.8 to 0.10 XLA:CPU slices 16-bit floats through a float32 copy of the whole array (see the
    # compiled HLO), but integers without.
    bits = lax.bitcast_convert_type(x, jnp.uint16)
    return lax.bitcast_convert_type(lax.dynamic_slice_in_dim(bits, first, size, axis), x.dtype)
