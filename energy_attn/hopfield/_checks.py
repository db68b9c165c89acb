"""A check that `retrieve`, the block and `landscape` share."""

from typing import Any

import jax
import jax.core

from energy_attn.kernels.internal import check_finite_number, check_floating, received


def check_positive(name: str, x: object) -> Any:
    """Returns `x`, a number or a floating scalar array; if it is concrete, it is above zero.

    Raises `TypeError` for another type or dtype, `ValueError` for another value or an array with
    axes.
    """
    if isinstance(x, jax.Array):
        if x.ndim != 0:
            raise ValueError(f"{name}: wanted a number or a floating scalar, got {received(x)}")
        check_floating(name, x)
        number = None if isinstance(x, jax.core.Tracer) else check_finite_number(name, float(x))
    else:
        number = x = check_finite_number(name, x)
    if number is not None and number <= 0:
        raise ValueError(f"{name}: wanted a number above zero, got {number}")
    return x
