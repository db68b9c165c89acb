"""The minimiser of the smoothed rate function, its derivative, and the default start of the solvers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import Operands
from energy_attn.kernels.internal import autodiff

from ..functional._free_energy import Calls, Parts, directional
from ..functional._solution import Result, Solution, raise_on_failure, without_derivative
from ..observables._at_source import covariance_product, state_at
from ..solvers import Mirror, Newton, Optax
from ..solvers._solvers import tolerance_in
from ._descent import RUNNING, Descent, Trial, advance, descend, newton_descent, optax_descent
from ._maximise import SolverInputs, SolverOptions, find_source, norm

# The tolerance of the inner solve for a point's source, as a fraction of the outer one.
_INNER_TOLERANCE = 0.1


def mean_square_deviation(parts: Parts) -> Array:
    values = [x.value for x in parts]
    count = sum(value.shape[-3] for value in values)
    mean = sum(value.sum(-3, keepdims=True) for value in values) / count
    square = sum(((value - mean) ** 2).sum((-3, -1), keepdims=True) for value in values) / count
    square = jnp.asarray(square).mean()
    return jnp.where(square > 0, square, 1.0)  # also if there are no values


@functools.partial(jax.jit, static_argnums=0)
def minimise(static: SolverOptions, inputs: SolverInputs) -> Solution:
    inputs = lax.stop_gradient(inputs)

    def evaluate(point: Array, _: Array) -> Trial:
        return _trial(static, inputs._replace(point=point))

    def objective(point: Array, inputs: SolverInputs) -> tuple[Array, Array]:
        last = _source(static, inputs._replace(point=point)).last
        return -last.value, last.point

    if isinstance(static.solver, Optax):
        result = optax_descent(static.solver, evaluate, objective, inputs, inputs.point)
    elif isinstance(static.solver, Mirror):
        result = _mirror(static, inputs)
    else:
        result = newton_descent(evaluate, inputs.point, static.solver.max_steps)
    last = result.last
    stats = {"steps": result.steps, "inner_steps": result.inner_steps}
    stats |= {"residual": last.residual, "path": result.path}
    point = jnp.where((last.status == Result.no_keys)[..., None], 0.0, last.point)
    return Solution(last.value, last.gradient, point, last.status, stats)


def _source(static: SolverOptions, inputs: SolverInputs) -> Descent:
    tolerance = _INNER_TOLERANCE * tolerance_in(inputs.point.dtype, static.solver)
    return find_source(static._replace(solver=Newton(tolerance=tolerance)), inputs)


def _trial(static: SolverOptions, inputs: SolverInputs) -> Trial:
    result = _source(static, inputs)
    last = result.last
    ended = jnp.where(last.status == Result.converged, RUNNING, last.status)
    last = last._replace(status=ended, inner_steps=result.steps)
    return _at_source(static, inputs, last, last.point)


# Mirror descent with the mirror map ∇F_λ*: its gradient step of length 1/2 is ζ ← ζ - ζ/2.
def _mirror(static: SolverOptions, inputs: SolverInputs) -> Descent:
    def step(result: Descent, _: None) -> tuple[Descent, None]:
        last = result.last
        none = last._replace(inner_steps=jnp.zeros_like(last.inner_steps))
        trial = _at_source(static, inputs, none, 0.5 * last.gradient)
        return advance(result, trial, last.status == RUNNING, most), None

    most = static.solver.max_steps
    return descend(step, _trial(static, inputs), most, None)


# The point of a source is known exactly, z = ∇F_λ(ζ), the source of a point only to a tolerance.
# So every trial is moved to the point of the source that was found. There ∇M_λ(z) = ζ and
# ∇²M_λ = (Σ(ζ) + λ)⁻¹, and Newton's step -(Σ + λ) ζ needs no linear solve.
def _at_source(static: SolverOptions, inputs: SolverInputs, trial: Trial, source: Array) -> Trial:
    (out, lse), product = covariance_product(static.calls, source, inputs.parts, source)
    pushed = inputs.regulariser * source
    point = out + pushed
    residual = norm(product + pushed)
    size = jnp.sqrt((point * point).sum(-1) + (out * out).sum(-1))
    asked = tolerance_in(lse.dtype, static.solver)
    threshold = (asked + 4 * jnp.finfo(lse.dtype).eps) * size
    ended = jnp.where(residual <= threshold, Result.converged, RUNNING)
    return trial._replace(
        point=point,
        value=((out + 0.5 * pushed) * source).sum(-1) - lse,
        gradient=source,
        direction=-product - pushed,
        residual=residual,
        threshold=threshold,
        status=jnp.where(trial.status == RUNNING, ended, trial.status),
    )


# The optimum is at z = ∇F(0), where the objective is -F(0) and the source is zero, for every
# regulariser and start. Its derivatives of every order are therefore those of ∇F(0) and -F(0),
# and the values that the solver found are returned unchanged.
def with_exact_derivative(
    result: Solution, calls: Calls, parts: Parts, throw: bool, what: str
) -> Solution:
    """A solver's solution with the derivatives of the exact one; raises if the solver failed."""
    value, point = autodiff.function_call(_Optimum(calls), (parts, result.value, result.point))
    stats = without_derivative(result.stats, parts, what)
    result = Solution(value, result.source, point, result.result, stats)
    return raise_on_failure(result, throw, what, calls)


@dataclasses.dataclass(frozen=True)
class _Optimum(autodiff.AbstractFunction):
    calls: Calls

    def apply(self, args: tuple[Parts, Array, Array]) -> tuple[Array, Array]:
        return args[1:]

    def jvp(self, primals: tuple[Parts, Array, Array], tangents: Any) -> tuple[Any, Any]:
        result = autodiff.function_call(self, primals)
        state = directional(functools.partial(state_at, self.calls, None), primals[0], tangents[0])
        return result, (None, None) if state is None else (-state[1].lse, state[1].out)


def default_start(calls: Calls, parts: Parts) -> Array:
    """The unweighted mean of the values that each row sees, a point of their hull.

    Raises as the kernels do.
    """
    return state_at(calls, None, tuple(map(_without_scores, parts))).out


def _without_scores(operands: Operands) -> Operands:
    bias = operands.bias
    if bias is not None:  # a bias of minus infinity hides a key
        bias = jnp.where(jnp.isneginf(bias), bias, 0.0)
    return operands._replace(query=jnp.zeros_like(operands.query), bias=bias)
