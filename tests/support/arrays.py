"""Arrays of JAX from NumPy's, without a program for each shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def array(x: Any, dtype: Any = None) -> jax.Array:
    """`x` as an array of JAX, cast by NumPy.

    `jnp.asarray` compiles a program for each new shape, 20 ms, unless it is told the dtype that NumPy's array has.
    """
    x = np.asarray(x, None if dtype is None else jnp.dtype(dtype))
    return jnp.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))
