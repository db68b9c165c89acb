"""Attention as an extremum: the minimum of the smoothed rate function, and the saddle of the paper's Γ."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from energy_attn.kernels import Operands
from energy_attn.kernels.internal import autodiff, checks

from ..functional._free_energy import Calls, Parts, directional
from ..functional._solution import Result, Solution, raise_on_failure, without_derivative
from ..observables._at_source import check_row_vectors, covariance_product, state_at
from ..observables._measure import AbstractMeasure
from ..solvers import AbstractSolver, Extragradient, Mirror, Newton, Optax, Optimistic
from ..solvers._solvers import check_solver, tolerance_in
from ._descent import (
    RUNNING,
    Descent,
    Evaluate,
    Trial,
    advance,
    descend,
    newton_descent,
    optax_descent,
    select,
)
from ._maximise import SolverInputs, SolverOptions, find_source, norm

# The tolerance of the inner solve for a point's source, as a fraction of the outer one.
_INNER_TOLERANCE = 0.1


def gamma(
    F: AbstractMeasure,
    source: Float[Array, "*B T N Hv"],
    point: Float[Array, "*B T N Hv"],
) -> Float[Array, "*B T N"]:
    r"""The function that the paper calls the log-likelihood of a point and a source.

    $$\Gamma(\zeta, z) = \zeta \cdot z - F(\zeta)$$

    Its supremum over sources is the conjugate. In both arguments it has one stationary point,
    $\zeta = 0$ and $z = \nabla F(0)$, which is attention. Since $\Gamma$ is concave in $\zeta$ and linear in
    $z$, that point is a saddle; $\Gamma$ has neither a minimum nor a maximum.

    Args:
        F: a [`Gibbs`][energy_attn.Gibbs].
        source: $\zeta$, `[B, T, N, Hv]` or `[T, N, Hv]`.
        point: $z$, of the same shape.

    Returns:
        `[B, T, N]` in nats, float32 (float64); plus infinity for a fully masked row.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes that do not match.

    Source: Tree Attention (arXiv 2408.04093), equation 30 of the later text. Equation 21 of the
    first text also sums $F$ over the components of $\zeta$, which counts it too often.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 9, 2, 4))
        >>> F = ea.FreeEnergy().at(q, k, v)
        >>> f = lambda source, point: ea.bayes.gamma(F, source, point).sum()
        >>> slopes = jax.grad(f, argnums=(0, 1))(jnp.zeros_like(q), F.attention())
        >>> bool(jnp.allclose(jnp.stack(slopes), 0, atol=1e-5))
        True
    """
    calls, parts = _check_measure(F)._prepared()
    source = check_row_vectors("source", source, calls, parts)
    point = check_row_vectors("point", point, calls, parts)
    return (source * point).sum(-1) - state_at(calls, source, parts).lse


def saddle_attention(
    F: AbstractMeasure,
    *,
    solver: Extragradient | Optimistic | Newton = Extragradient(),
    start: tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N Hv"]] | None = None,
    throw: bool = True,
) -> Solution:
    r"""Attention as the saddle of $\Gamma$: a maximum in the source, a minimum in the point.

    $$\max_\zeta \min_z\; \Gamma(\zeta, z): \qquad \hat\zeta = 0, \quad \hat z = \nabla F(0) = \mathrm{attention}$$

    Gradient *descent* in both variables leaves the saddle exponentially fast, since $\Gamma$ is unbounded
    below in $\zeta$. The objective of `F.map` has a minimum, and its solvers take a few steps where these
    take hundreds.

    `Newton` solves the linearised equations, $\zeta = 0$ and
    $z = \nabla F(\zeta) - \Sigma(\zeta)\,\zeta$, and takes two steps from any start.

    Differentiable as attention is, in both modes and to any order.

    Args:
        F: a [`Gibbs`][energy_attn.Gibbs].
        solver: [`Extragradient`][energy_attn.solvers.Extragradient],
            [`Optimistic`][energy_attn.solvers.Optimistic] or [`Newton`][energy_attn.solvers.Newton].
            Its residual is $|(\nabla_\zeta \Gamma, \nabla_z \Gamma)|$, relative to $\sqrt{1 + |z|^2}$.
        start: `(source, point)`, `[B, T, N, Hv]` each; None is zero and the unweighted mean of the
            values that a row sees.
        throw: whether to raise if a row does not converge.

    Returns:
        A [`Solution`][energy_attn.Solution] with `value` $\Gamma$ `[B, T, N]`, `source` and `point`
        `[B, T, N, Hv]`, in float32 (float64). `stats`: `steps` and `residual`. A fully masked row
        has the result `no_keys`, the value plus infinity, and zeros.

    Raises:
        TypeError: an argument of the wrong type, or another solver.
        ValueError: shapes that do not match.
        NotImplementedError: `Optimistic` with arrays that are sharded over explicit mesh axes.
        RuntimeError: a row did not converge and `throw` is set; inside jit, when the program runs.
            Inside jit with keys sharded over a mesh, the row's value is NaN instead.

    Source: Tree Attention (arXiv 2408.04093), equations 22 to 26; Korpelevich (1976); Daskalakis et
    al. (arXiv 1711.00141).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> F = ea.FreeEnergy().at(*jax.random.normal(jax.random.key(0), (3, 9, 2, 4)))
        >>> bool(jnp.allclose(ea.bayes.saddle_attention(F).point, F.attention(), atol=1e-4))
        True
    """
    calls, parts = _check_measure(F)._prepared()
    solver = check_solver(solver, calls, Extragradient, Optimistic, Newton)
    checks.check_flag("throw", throw)
    if start is None:
        point = default_start(calls, parts)
        pair = jnp.concatenate([jnp.zeros_like(point), point], -1)
    else:
        if not isinstance(start, tuple) or len(start) != 2:
            raise TypeError(f"start: wanted a pair (source, point), got {checks.received(start)}")
        pair = jnp.concatenate([check_row_vectors("start", x, calls, parts) for x in start], -1)
    solution = _solve(calls, solver, parts, pair)
    return with_exact_derivative(solution, calls, parts, throw, "saddle_attention")


def _check_measure(F: object) -> AbstractMeasure:
    if not isinstance(F, AbstractMeasure):
        raise TypeError(f"F: wanted an energy_attn.Gibbs, got {checks.received(F)}")
    return F


@functools.partial(jax.jit, static_argnums=(0, 1))
def _solve(calls: Calls, solver: AbstractSolver, parts: Parts, start: Array) -> Solution:
    # source and point are concatenated, `[*B, T, N, 2 Hv]`
    parts, start = lax.stop_gradient((parts, start))

    def evaluate(pair: Array, _: Array) -> Trial:
        return _saddle_trial(calls, solver, parts, pair)

    def objective(pair: Array, parts: Parts) -> tuple[Array, Array]:
        trial = _saddle_trial(calls, solver, parts, pair)
        return trial.value, trial.gradient

    def newton(descent: Descent, _: None) -> tuple[Descent, None]:
        last = descent.last
        source = jnp.split(last.point, 2, -1)[0]
        state, product = covariance_product(calls, source, parts, source)
        pair = jnp.concatenate([jnp.zeros_like(source), state.out - product], -1)
        active = last.status == RUNNING
        trial = evaluate(select(active, pair, last.point), descent.passes)
        return advance(descent, trial, active, solver.max_steps), None

    if isinstance(solver, Optimistic):
        optimiser = optax.optimistic_gradient_descent(solver.step_size)
        by_optax = Optax(optimiser, solver.max_steps)
        descent = optax_descent(by_optax, evaluate, objective, parts, start, recorded=0)
    elif isinstance(solver, Extragradient):
        descent = _extragradient(solver, evaluate(start, jnp.int32(0)), evaluate)
    else:
        descent = descend(newton, evaluate(start, jnp.int32(0)), 0, None)
    last = descent.last
    none = (last.status == Result.no_keys)[..., None]
    source, point = jnp.split(jnp.where(none, 0.0, last.point), 2, -1)
    stats = {"steps": descent.steps, "residual": last.residual}
    return Solution(last.value, source, point, last.status, stats)


def _saddle_trial(calls: Calls, solver: AbstractSolver, parts: Parts, pair: Array) -> Trial:
    # the gradient of Γ with the sign of its first half reversed, since the source maximises
    source, point = jnp.split(pair, 2, -1)
    out, lse = state_at(calls, source, parts)
    gradient = jnp.concatenate([out - point, source], -1)
    residual = norm(gradient)
    value = (source * point).sum(-1) - lse
    rounding = 4 * jnp.finfo(lse.dtype).eps
    size = jnp.sqrt(1.0 + (point * point).sum(-1))
    threshold = (tolerance_in(lse.dtype, solver) + rounding) * size
    noise = rounding * size * (1.0 + abs(lse))  # of the gradient, from the rounding of the scores
    statuses = [jnp.isneginf(lse), ~jnp.isfinite(value), residual <= threshold]
    codes = (Result.no_keys, Result.not_finite, Result.converged)
    status = jnp.select(statuses, [jnp.int32(x) for x in codes], RUNNING)
    zero = jnp.zeros_like(status)
    return Trial(pair, value, gradient, gradient, noise, residual, threshold, status, zero)


def _extragradient(solver: Extragradient, first: Trial, evaluate: Evaluate) -> Descent:
    adapts = solver.step_size is None

    def step(descent: Descent, size: Array) -> tuple[Descent, Array]:
        last = descent.last
        active = last.status == RUNNING
        half = evaluate(last.point - size[..., None] * last.gradient, descent.passes)
        trial = evaluate(last.point - size[..., None] * half.gradient, descent.passes)
        accepted = active
        if adapts:  # the two gradients must not differ by more than 0.7 of the first
            near = norm(half.gradient - last.gradient) <= 0.7 * last.residual
            blurred = last.residual <= 8 * last.noise  # then their difference is rounding
            accepted = active & (near | blurred)
            size = size * jnp.where(blurred, 1.0, jnp.where(near, 1.1, 0.6))
        descent = advance(descent, trial, accepted, solver.max_steps)
        over = descent.passes > 2 * solver.max_steps
        status = descent.last.status
        status = jnp.where(over & (status == RUNNING), Result.max_steps_reached, status)
        return descent._replace(last=descent.last._replace(status=status)), size

    size = jnp.full_like(first.value, 0.5 if solver.step_size is None else solver.step_size)
    return descend(step, first, 0, size)


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
        return _rate_trial(static, inputs._replace(point=point))

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


def _rate_trial(static: SolverOptions, inputs: SolverInputs) -> Trial:
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
    return descend(step, _rate_trial(static, inputs), most, None)


# The point of a source is known exactly, z = ∇F_λ(ζ), the source of a point only to a tolerance.
# So every trial is moved to the point of the source that was found. There ∇M_λ(z) = ζ and
# ∇²M_λ = (Σ(ζ) + λ)⁻¹, and Newton's step -(Σ + λ) ζ needs no linear solve.
def _at_source(static: SolverOptions, inputs: SolverInputs, trial: Trial, source: Array) -> Trial:
    (out, lse), product = covariance_product(static.calls, source, inputs.parts, source)
    pushed = inputs.regulariser * source
    point = out + pushed
    residual = norm(product + pushed)
    size = jnp.sqrt((point * point).sum(-1) + (out * out).sum(-1))
    threshold = (tolerance_in(lse.dtype, static.solver) + 4 * jnp.finfo(lse.dtype).eps) * size
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
    """The unweighted mean of the values that each row sees, a point of their hull."""

    def without_scores(operands: Operands) -> Operands:
        bias = operands.bias
        if bias is not None:  # a bias of minus infinity hides a key
            bias = jnp.where(jnp.isneginf(bias), bias, 0.0)
        return operands._replace(query=jnp.zeros_like(operands.query), bias=bias)

    return state_at(calls, None, tuple(map(without_scores, parts))).out
