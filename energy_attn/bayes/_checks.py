"""Checks of the arguments that the solvers share."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax
from jaxtyping import Array

from energy_attn.distributed.internal import is_explicit
from energy_attn.kernels.internal import (
    check_finite_number,
    check_floating,
    check_integer,
    check_shape,
    received,
)

from ..core._free_energy import Prepared


def check_regulariser(x: Any, dtype: Any, *, positive: bool = False) -> tuple[Array, bool]:
    """Returns a regulariser as a scalar of `dtype`, and whether it is known to be above zero.

    Raises `TypeError` unless it is a real number or a floating array. Raises `ValueError` for an
    array with axes and for a concrete value that is negative or not finite, or zero if `positive`.
    """
    name, number = "regulariser", x
    if isinstance(x, jax.Array):
        check_shape(name, check_floating(name, x), ())
        number = None if isinstance(x, jax.core.Tracer) else float(x)
    if number is not None:
        number = check_finite_number(name, number)
        if number < 0 or (positive and number == 0):
            raise ValueError(
                f"{name}: wanted a number {'above' if positive else 'of at least'} 0, got {number}"
            )
    return jnp.asarray(x, dtype), positive or bool(number)


def check_solver(x: Any, *names: str) -> Any:
    """Returns the solver; None is `names[0]`.

    Raises `TypeError` unless it is a string or an Optax optimiser, `ValueError` for a string that
    is not one of `names`.
    """
    if x is None:
        return names[0]
    if isinstance(x, optax.GradientTransformation):
        return x
    wanted = f"{', '.join(map(repr, names))} or an optax.GradientTransformation"
    error = ValueError if isinstance(x, str) else TypeError
    if x not in names:
        raise error(f"solver: wanted {wanted}, got {received(x)}")
    return x


def check_optax_mesh(call: Prepared, name: str, x: Any) -> None:
    """Raises `NotImplementedError` if mesh axes are explicit: Optax's branches cannot be batched there.

    `name` is the argument that asks for an Optax solver, and `x` its value.
    """
    if call.plan is not None and is_explicit(call.plan.mesh, call.plan.axes):
        raise NotImplementedError(
            f"{name}: wanted 'newton' where arrays are split over explicit mesh axes, "
            f"got {received(x)}"
        )


def check_max_steps(x: Any) -> int:
    """Returns `max_steps`; raises `TypeError` if it is not an integer, `ValueError` below 1."""
    return check_integer("max_steps", x, least=1)


def check_tolerance(x: Any, dtype: Any) -> Array:
    """Returns the tolerance as a scalar of `dtype`; None is the default for that dtype.

    Raises `TypeError` if it is not a real number, `ValueError` if it is negative or not finite.
    """
    if x is None:
        x = 1e-10 if dtype == jnp.float64 else 2e-6
    number = check_finite_number("tolerance", x)
    if number < 0:
        raise ValueError(f"tolerance: wanted a number of at least 0, got {number}")
    return jnp.asarray(number, dtype)
