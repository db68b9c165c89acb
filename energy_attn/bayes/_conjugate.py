"""The convex conjugate of the free energy, and the rate function, which differs by a constant."""

import jax.numpy as jnp
from jaxtyping import Array

from energy_attn.kernels.internal import check_flag

from ..functional._free_energy import Calls, Parts, state_at
from ..functional._solution import Result, Solution, raise_on_failure, without_derivative
from ..observables._at_source import check_row_vectors
from ..solvers import AbstractSolver, Newton, Optax
from ..solvers._solvers import check_solver
from ._checks import check_regulariser, check_solver_mesh, sends
from ._maximise import SolverInputs, SolverOptions, attained_value, maximum


def conjugate(
    calls: Calls,
    parts: Parts,
    point: Array,
    regulariser: float | Array,
    solver: AbstractSolver,
    throw: bool,
) -> Solution:
    """See `AbstractConjugate.conjugate`."""
    check_flag("throw", throw)
    found = _solve(calls, parts, point, regulariser, solver)
    return raise_on_failure(found, throw, "conjugate", collective=sends(calls))


def rate(
    calls: Calls,
    parts: Parts,
    point: Array,
    regulariser: float | Array,
    solver: AbstractSolver,
    throw: bool,
) -> Solution:
    """See `AbstractConjugate.rate`."""
    check_flag("throw", throw)
    found = _solve(calls, parts, point, regulariser, solver)
    lse = state_at(calls, None, parts).lse
    lse = jnp.where(found.result == Result.no_keys, 0.0, lse)
    stats = found.stats | {"path": found.stats["path"] + lse[None]}
    found = Solution(found.value + lse, found.source, None, found.result, stats)
    return raise_on_failure(found, throw, "rate", collective=sends(calls))


def _solve(
    calls: Calls, parts: Parts, point: Array, regulariser: float | Array, solver: AbstractSolver
) -> Solution:
    point = check_row_vectors("point", point, calls, parts)
    regulariser, bounded = check_regulariser(regulariser, point.dtype)
    solver = check_solver(solver, Newton, Optax)
    check_solver_mesh(calls, solver)
    static = SolverOptions(calls, solver, bounded)
    inputs = SolverInputs(parts, point, regulariser)
    found = maximum(static, inputs)
    stats = {"steps": found.steps, "residual": found.residual, "path": found.path}
    value = attained_value(static, inputs, found)
    return Solution(
        value, found.source, None, found.result, without_derivative(stats, inputs, "conjugate")
    )
