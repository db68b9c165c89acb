"""Checks of single arguments. Each error names the argument, what came and what was wanted."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def received(x: Any) -> str:
    """How an argument is shown in an error: `float32[2,3]` for arrays, else its type and value.

    Raises nothing; a value whose text is long is cut.
    """
    if isinstance(x, (jax.Array, np.ndarray)):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    text = repr(x)
    return f"{type(x).__name__} {text if len(text) < 60 else text[:57] + '...'}"


def check_array(name: str, x: Any) -> jax.Array:
    """Returns `x` if it is an array (JAX or NumPy); nothing is converted silently.

    Raises `TypeError` for lists, numbers and anything else.
    """
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"{name}: wanted a JAX or NumPy array, got {received(x)}")
    return x  # pyright: ignore[reportReturnType]  # NumPy arrays serve wherever JAX's do


def check_floating(name: str, x: Any) -> jax.Array:
    """Returns `x` if it is an array of float16, bfloat16, float32 or float64.

    Raises `TypeError` otherwise: integers, booleans, complex numbers and 8-bit floats included.
    """
    x = check_array(name, x)
    if x.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        raise TypeError(
            f"{name}: wanted a float16, bfloat16, float32 or float64 array, got {received(x)}"
        )
    return x


def check_shape(name: str, x: Any, shape: tuple[int | str, ...]) -> None:
    """Checks `x.shape` against `shape`, whose strings name sizes that may be anything.

    Raises `ValueError` naming the argument, its shape and the wanted one.
    """
    fits = len(x.shape) == len(shape) and all(
        isinstance(want, str) or want == have for want, have in zip(shape, x.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: wanted shape ({', '.join(map(str, shape))}), got {received(x)}")


def check_broadcastable(name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Checks that `x` has the rank of `shape` and, on each axis, its size or 1.

    Raises `ValueError` naming the argument, its shape and the wanted one.
    """
    fits = len(x.shape) == len(shape) and all(
        have in (1, want) for want, have in zip(shape, x.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name}: wanted a shape broadcastable to "
            f"({', '.join(map(str, shape))}) with each axis given, got {received(x)}"
        )


def check_finite_number(name: str, x: Any) -> float:
    """Returns `x` as a Python float.

    Raises `TypeError` if it is no real number and `ValueError` if it is infinite or NaN.
    """
    if isinstance(x, bool) or not isinstance(x, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: wanted a real number, got {received(x)}")
    if not math.isfinite(x):
        raise ValueError(f"{name}: wanted a finite number, got {x}")
    return float(x)
