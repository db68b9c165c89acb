"""Arrays and modules of NumPy's random numbers, without a program for each shape."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


def array(x: Any, dtype: Any = None) -> jax.Array:
    """`x` as an array of JAX, cast by NumPy.

    `jnp.asarray` compiles a program for each new shape, 20 ms, unless it is told the dtype that NumPy's array has.
    """
    x = np.asarray(x, None if dtype is None else jnp.dtype(dtype))
    return jnp.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))


def drawn(make: Callable[..., Any], scale: float = 0.5, seed: int = 0, **options: Any) -> Any:
    """The result of `make(**options, key=...)`, with normal numbers of standard deviation `scale` in every array."""
    shapes = eqx.filter_eval_shape(lambda key: make(**options, key=key), jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def weight(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"wanted no array but of weights, got {x}")
        return jnp.asarray((scale * rng.standard_normal(x.shape)).astype(x.dtype))

    return jax.tree.map(weight, shapes)
