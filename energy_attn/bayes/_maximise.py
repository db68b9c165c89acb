"""The conjugate of the free energy: its source, solved for all rows at once, with a custom derivative."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array

from energy_attn.kernels.internal import autodiff, checks, holds_keys

from ..functional._free_energy import Calls, Parts, directional, unmoved
from ..functional._solution import Result, Solution, without_derivative
from ..observables._at_source import check_row_vectors, covariance_at, state_at, support_at
from ..solvers import AbstractSolver, Newton, Optax
from ..solvers._solvers import check_solver, tolerance_in
from ._descent import RUNNING, Descent, Trial, newton_descent, optax_descent


class SolverOptions(NamedTuple):
    """The static options of a maximisation."""

    calls: Calls
    solver: AbstractSolver
    # whether the conjugate is known to be finite everywhere: for a positive regulariser
    bounded: bool


class SolverInputs(NamedTuple):
    parts: Parts
    point: Array  # [*B, T, N, V]
    regulariser: Array  # a scalar


class Maximum(NamedTuple):
    """The source that attains a conjugate, and its statistics; see `Descent`."""

    source: Array
    value: Array
    result: Array
    residual: Array
    steps: Array
    path: Array


def norm(x: Array) -> Array:
    return jnp.sqrt((x * x).sum(-1))


def check_regulariser(
    x: float | Array, dtype: jnp.dtype, *, positive: bool = False
) -> tuple[Array, bool]:
    """Returns a regulariser as a scalar of `dtype`, and whether it is known to be above zero.

    Raises `TypeError` unless it is a real number or a floating array. Raises `ValueError` for an
    array with axes and for a concrete value that is negative or not finite, or zero if `positive`.
    """
    name, number = "regulariser", x
    if isinstance(x, jax.Array):
        checks.check_shape(name, checks.check_floating(name, x), ())
        number = None if isinstance(x, jax.core.Tracer) else float(x)
    if number is not None:
        number = checks.check_finite_number(name, number)
        if number < 0 or (positive and number == 0):
            raise ValueError(
                f"{name}: wanted a number {'above' if positive else 'of at least'} 0, got {number}"
            )
    return jnp.asarray(x, dtype), positive or bool(number)


def conjugate(
    calls: Calls,
    parts: Parts,
    point: Array,
    regulariser: float | Array,
    solver: AbstractSolver,
    throw: bool,
) -> Solution:
    """Computes `AbstractConjugate.conjugate`, without raising for rows that failed."""
    checks.check_flag("throw", throw)
    point = check_row_vectors("point", point, calls, parts)
    regulariser, bounded = check_regulariser(regulariser, point.dtype)
    solver = check_solver(solver, calls, Newton, Optax)
    static = SolverOptions(calls, solver, bounded)
    inputs = SolverInputs(parts, point, regulariser)
    maximum: Maximum = autodiff.function_call(_Maximisation(static), inputs)
    value = autodiff.function_call(_AttainedValue(static), (inputs, maximum))
    stats = {"steps": maximum.steps, "residual": maximum.residual, "path": maximum.path}
    stats = without_derivative(stats, inputs, "conjugate")
    return Solution(value, maximum.source, None, maximum.result, stats)


# F_λ(ζ) - z·ζ is convex in ζ, with gradient ∇F(ζ) + λζ - z and Hessian Σ(ζ) + λ. Undamped, Newton's
# method diverges where one key has all the weight and Σ vanishes; too much damping makes it slow.
# The damping is proportional to the gradient, so that it vanishes near the solution, and to the
# root mean square distance of the values from the point,
#
#     E|v - z|² = tr Σ + |∇F - z|²,
#
# so that it does not depend on the unit or the origin of the values.
def _newton_step(
    inputs: SolverInputs, covariance: Array, gradient: Array, residual: Array
) -> tuple[Array, Array]:
    """The step of damped Newton, and the trace of the covariance."""
    variance = jnp.maximum(jnp.trace(covariance, axis1=-2, axis2=-1), 0.0)
    kind = jnp.finfo(gradient.dtype)
    damping = 1e-3 * residual * jnp.sqrt(variance + residual**2) + 10 * kind.eps * variance
    damping = damping + inputs.regulariser + kind.tiny
    matrix = plus_diagonal(covariance, damping[..., None, None])
    step = -jnp.linalg.solve(matrix, gradient[..., None])[..., 0]
    # rounding may have made the matrix indefinite: then the step is along the negative gradient
    descends = (step * gradient).sum(-1) < 0
    downhill = -gradient / (damping + variance)[..., None]
    return jnp.where(descends[..., None], step, downhill), variance


def _trial(static: SolverOptions, inputs: SolverInputs, source: Array, passes: Array) -> Trial:
    """Evaluates every row at a source; without the covariance for Optax, which only uses gradients."""
    point, covariance = inputs.point, None
    if isinstance(static.solver, Optax):
        out, lse = state_at(static.calls, source, inputs.parts)
    else:
        covariance, out, lse = covariance_at(static.calls, source, inputs.parts)
    value, gradient = _objective(inputs, source, out, lse)
    residual = norm(gradient)
    step, variance = -gradient, jnp.zeros_like(lse)
    if covariance is not None:
        step, variance = _newton_step(inputs, covariance, gradient, residual)
    size = jnp.sqrt((point * point).sum(-1) + (out * out).sum(-1) + variance)
    far = norm(source)
    eps = 4 * jnp.finfo(out.dtype).eps
    scores = jnp.where(holds_keys(lse), abs(lse), 0.0) + abs((source * point).sum(-1))
    noise = eps * (1.0 + scores + far * size + inputs.regulariser * far**2)
    # As accurate as asked for, or as rounding allows: an error of ε in the scores moves the mean by
    # at most ε times the standard deviation of the values.
    asked = (tolerance_in(out.dtype, static.solver) + eps) * size
    threshold = asked + eps * scores * jnp.sqrt(variance)
    statuses = {Result.no_keys: jnp.isneginf(lse), Result.not_finite: ~jnp.isfinite(value)}
    if not static.bounded:
        # A point is outside the hull of the values if a hyperplane separates it from all of them by
        # more than the tolerance. Two normals are tried in turn: the step, in which the part of the
        # residual that can still be removed is small; and the source, which outside the hull grows
        # without bound along such a normal. A row that would end otherwise tries the first.
        first = (passes % 2 == 0) | (residual <= threshold)
        normal = jnp.where(first[..., None], step, source)
        beyond = (normal * point).sum(-1) - support_at(static.calls, inputs.parts, normal)
        separated = (beyond > asked * norm(normal)) & (inputs.regulariser == 0)
        statuses[Result.outside_hull] = separated
        source = jnp.where(separated[..., None], normal, source)
    statuses[Result.converged] = residual <= threshold
    status = jnp.select(list(statuses.values()), [jnp.int32(x) for x in statuses], RUNNING)
    zero = jnp.zeros_like(status)
    return Trial(source, value, gradient, step, noise, residual, threshold, status, zero)


def _objective(inputs: SolverInputs, source: Array, out: Array, lse: Array) -> tuple[Array, Array]:
    linear = ((0.5 * inputs.regulariser * source - inputs.point) * source).sum(-1)
    return lse + linear, out + inputs.regulariser * source - inputs.point


def find_source(static: SolverOptions, inputs: SolverInputs) -> Descent:
    """Descends from zero to the source that attains the conjugate of every row."""
    start, evaluate = jnp.zeros_like(inputs.point), functools.partial(_trial, static, inputs)
    if not isinstance(static.solver, Optax):
        return newton_descent(evaluate, start, static.solver.max_steps)

    def objective(source: Array, inputs: SolverInputs) -> tuple[Array, Array]:
        return _objective(inputs, source, *state_at(static.calls, source, inputs.parts))

    return optax_descent(static.solver, evaluate, objective, inputs, start)


@functools.partial(jax.jit, static_argnums=0)
def _find_maximum(static: SolverOptions, inputs: SolverInputs) -> Maximum:
    descent = find_source(static, lax.stop_gradient(inputs))
    last = descent.last
    result = jnp.where(last.status == RUNNING, Result.max_steps_reached, last.status)
    return Maximum(last.point, -last.value, result, last.residual, descent.steps, -descent.path)


# The source ζ(z, λ, θ) solves  G = ∇F(ζ; θ) + λζ - z = 0,  and so  (Σ + λ) dζ = dz - ζ dλ - d_θ ∇F,
# solved by the pseudo-inverse: in a hull of lower dimension the source is undetermined across the
# hull. The rule can itself be differentiated, since it is a function of the source that is found.
@dataclasses.dataclass(frozen=True)
class _Maximisation(autodiff.AbstractFunction):
    static: SolverOptions

    def apply(self, args: SolverInputs) -> Maximum:
        return _find_maximum(self.static, args)

    def jvp(self, primals: SolverInputs, tangents: SolverInputs) -> tuple[Maximum, Maximum]:
        maximum: Maximum = autodiff.function_call(self, primals)
        some = has_source(maximum.result)[..., None]
        source = jnp.where(some, maximum.source, 0.0)
        parts, point, regulariser = tangents
        tangent = autodiff.with_zeros(point, primals.point)
        if regulariser is not None:
            tangent = tangent - regulariser * source
        at_source = functools.partial(state_at, self.static.calls, source)
        state = directional(at_source, primals.parts, parts)
        if state is not None:
            tangent = tangent - state[1].out
        matrix = covariance_at(self.static.calls, source, primals.parts).covariance
        matrix = plus_diagonal(matrix, primals.regulariser)
        along = pseudo_solve(matrix, jnp.where(some, tangent, 0.0))
        return maximum, unmoved(maximum)._replace(source=along)


# A conjugate is an extremum in its source, so its derivative is that at a fixed source (the
# envelope theorem): ζ in z, -|ζ|²/2 in λ and -dF(ζ) in the rest. This holds at every source, so
# the rule can be differentiated again, through the source.
@dataclasses.dataclass(frozen=True)
class _AttainedValue(autodiff.AbstractFunction):
    static: SolverOptions

    def apply(self, args: tuple[SolverInputs, Maximum]) -> Array:
        _, maximum = args
        infinite = (maximum.result == Result.outside_hull) | (maximum.result == Result.no_keys)
        return jnp.where(infinite, jnp.inf, maximum.value)

    def jvp(
        self, primals: tuple[SolverInputs, Maximum], tangents: tuple[SolverInputs, Any]
    ) -> tuple[Array, Array | None]:
        (inputs, maximum), ((parts, point, regulariser), _) = primals, tangents
        some = has_source(maximum.result)
        source = jnp.where(some[..., None], maximum.source, 0.0)
        tangent = autodiff.with_zeros(point, inputs.point)
        if regulariser is not None:
            tangent = tangent - 0.5 * regulariser * source
        along = (tangent * source).sum(-1)
        at_source = functools.partial(state_at, self.static.calls, source)
        state = directional(at_source, inputs.parts, parts)
        if state is not None:
            along = along - state[1].lse
        return autodiff.function_call(self, primals), jnp.where(some, along, 0.0)


def has_source(result: Array) -> Array:
    # whether a row ended with a source, converged or not
    return (result == Result.converged) | (result == Result.max_steps_reached)


def plus_diagonal(matrix: Array, diagonal: ArrayLike) -> Array:
    eye = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
    return matrix + diagonal * eye


def pseudo_solve(matrix: Array, x: Array) -> Array:
    """Multiplies vectors by the pseudo-inverse of symmetric matrices.

    The derivative assumes a constant rank and vectors in the matrix's range.
    """

    def multiply(x: Array) -> Array:
        return (matrix * x[..., None, :]).sum(-1)

    def solve(_: Any, x: Array) -> Array:
        values, vectors = jnp.linalg.eigh(matrix)
        least = 16 * values.shape[-1] * jnp.finfo(values.dtype).eps * values[..., -1:]
        some = values > jnp.maximum(least, 0.0)
        inverse = jnp.where(some, 1 / jnp.where(some, values, 1.0), 0.0)
        along = (vectors * x[..., :, None]).sum(-2) * inverse
        return (vectors * along[..., None, :]).sum(-1)

    return lax.custom_linear_solve(multiply, x, solve, symmetric=True)
