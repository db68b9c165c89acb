"""Checks of the arguments that iterative functions share."""

import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import Array

from energy_attn.distributed.internal import is_explicit
from energy_attn.kernels.internal import (
    check_finite_number,
    check_floating,
    check_shape,
    received,
)

from ..functional._free_energy import Calls
from ..observables._measure import AbstractMeasure
from ..solvers import AbstractSolver, Newton, Optax, Optimistic


def check_regulariser(
    x: float | Array, dtype: jnp.dtype, *, positive: bool = False
) -> tuple[Array, bool]:
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


def check_measure(F: object) -> AbstractMeasure:
    """Returns the measure; raises `TypeError` for anything else."""
    if not isinstance(F, AbstractMeasure):
        raise TypeError(f"F: wanted an energy_attn.Gibbs, got {received(F)}")
    return F


def sends(calls: Calls) -> bool:
    """Whether the program of the calls has collectives."""
    return any(call.plan is not None for call in calls)


def check_solver_mesh(calls: Calls, solver: AbstractSolver) -> None:
    """Raises `NotImplementedError` for Optax's methods on explicit mesh axes, where their branches
    cannot be batched.
    """
    optax = isinstance(solver, (Optax, Optimistic))
    plans = [call.plan for call in calls if call.plan is not None]
    if optax and any(is_explicit(plan.mesh, plan.axes) for plan in plans):
        raise NotImplementedError(
            f"solver: wanted energy_attn.solvers.{Newton.__name__}(...) where arrays are split over "
            f"explicit mesh axes, got {received(solver)}"
        )


def tolerance_in(dtype: jnp.dtype, solver: AbstractSolver) -> float:
    """The tolerance of a solver; None is the default for the dtype."""
    if solver.tolerance is None:
        return 1e-10 if dtype == jnp.float64 else 2e-6
    return float(solver.tolerance)
