"""The parameters of ready-made scores."""

from typing import Any

import jax
import jax.core

from .._checks import check_finite_number, check_floating, check_shape, received


def check_parameter(
    name: str, x: object, shape: tuple[int | str, ...], *, above_zero: bool = False
) -> Any:
    """Returns `x`: a floating array of `shape`, or, for a shape without axes, a finite number.

    Raises `TypeError` for anything else and `ValueError` for another shape or, where values are known,
    for a number that is not above zero.
    """
    if shape or hasattr(x, "shape"):
        check_shape(name, check_floating(name, x), shape)
        is_number = not isinstance(x, jax.core.Tracer) and not shape
    else:
        check_finite_number(name, x)
        is_number = True
    if above_zero and is_number and not float(x) > 0:  # pyright: ignore[reportArgumentType]  # a number
        raise ValueError(f"{name}: wanted a number above zero, got {received(x)}")
    return x
