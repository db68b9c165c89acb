"""Attention as a maximum a posteriori: the minimiser of the smoothed rate function."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from energy_attn.kernels.internal import check_flag

from ..core._free_energy import Parts
from ..core._solution import Result, Solution, raise_on_failure, without_derivative
from ..observables._at_source import check_row_vectors, covariance_product, prepare_widened
from ..solvers import Mirror, Newton, Optax
from ..solvers._abstract import check_solver
from ._checks import check_regulariser, check_solver_mesh, tolerance_in
from ._descent import RUNNING, Descent, Trial, advance, any_running, initial_descent, newton_descent
from ._exact_optimum import default_start, with_exact_derivative
from ._maximise import SolverInputs, SolverOptions, find_source, norm
from ._optax_descent import optax_descent

# The tolerance of the inner solve for a point's source, as a fraction of the outer one.
_INNER_TOLERANCE = 0.1


def map_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    regulariser: float | Float[Array, ""] | None = None,
    solver: Newton | Mirror | Optax = Newton(),
    start: Float[Array, "*B T N Hv"] | None = None,
    throw: bool = True,
    **options: Any,
) -> Solution:
    r"""Attention as a maximum a posteriori: the point that maximises $e^{-n M_\lambda(z)}$.

    $$M_\lambda(z) = \sup_\zeta \left\{z \cdot \zeta - F(\zeta) - \tfrac{\lambda}{2} |\zeta|^2\right\}, \qquad
      \arg\min_z M_\lambda(z) = \nabla F(0) = \mathrm{attention}$$

    $M_\lambda + F(0)$ is the rate function of the mean of $n$ values drawn by attention and seen through
    Gaussian noise of variance $\lambda / n$. It is finite everywhere, and its minimiser is exactly
    attention for every $\lambda > 0$, because the penalty is flat at $\zeta = 0$. This function finds by
    optimisation what [`attention`][energy_attn.attention] computes in one pass; it is meant for
    study and for experiments with the objective.

    `Newton` steps from $z$ to $z - (\Sigma(\hat\zeta) + \lambda)\, \hat\zeta$, with a searched length; each
    evaluation solves for the point's source $\hat\zeta(z) = \nabla M_\lambda(z)$. `Mirror` halves the
    source in each step and moves the point to $z = \nabla F_\lambda(\zeta)$. `Optax` follows the gradient
    $\hat\zeta$ in $z$.

    Differentiable in reverse mode, as attention is: `point` is $\nabla F(0)$ and `value` is $-F(0)$
    for every regulariser and start.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`.
        key: `[B, S, K, H]` or `[S, K, H]`.
        value: `[B, S, K, Hv]` or `[S, K, Hv]`.
        bias: as in [`free_energy`][energy_attn.free_energy], as is `mask`.
        mask: boolean, True where a key takes part.
        regulariser: $\lambda > 0$, in the unit of the values squared; a number or a floating scalar.
            None is the mean square distance of the values from their mean, with which Newton's
            method takes few steps in any unit.
        solver: [`Newton`][energy_attn.solvers.Newton], [`Mirror`][energy_attn.solvers.Mirror] or
            [`Optax`][energy_attn.solvers.Optax]. Its residual is the remaining step
            $|(\Sigma + \lambda)\, \hat\zeta|$, relative to the size of point and values; its tolerance is
            raised to the rounding error where that is larger.
        start: `[B, T, N, Hv]`, the first point; None is the unweighted mean of the values that a row
            sees.
        throw: whether to raise if a row does not converge.
        **options: those of [`free_energy`][energy_attn.free_energy].

    Returns:
        A [`Solution`][energy_attn.Solution] with `point` `[B, T, N, Hv]`, its `source` (zero up to
        the residual) and `value` $M_\lambda$ `[B, T, N]`, in float32 (float64). `stats`: `steps`,
        `inner_steps` (the sum over a row's inner solves for sources), `residual`, and `path`,
        `[max_steps + 1, B, T, N]`: $M_\lambda$ after each step. A fully masked row has the result
        `no_keys`, the value plus infinity and the point zero.

    Raises:
        TypeError: an argument of the wrong type, another solver, or an unknown option.
        ValueError: shapes that do not match, a regulariser that is not above zero.
        NotImplementedError: an Optax optimiser with arrays that are sharded over explicit mesh axes.
        RuntimeError: a row did not converge and `throw` is set; inside jit, when the program runs.
            Inside jit with keys sharded over a mesh, the row's value is NaN instead.

    Source: Tree Attention (arXiv 2408.04093), equations 22 to 26, which aim at this; the paper's
    own objective has a saddle there, see [`saddle_attention`][energy_attn.saddle_attention].

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 9, 2, 4))
        >>> solution = ea.map_attention(q, k, v)
        >>> bool(jnp.allclose(solution.point, ea.attention(q, k, v), atol=1e-4))
        True
    """
    call, arrays = prepare_widened(query, key, value, bias, mask, **options)
    check_flag("throw", throw)
    dtype = arrays[0].query.dtype
    regulariser = _mean_square_deviation(arrays) if regulariser is None else regulariser
    regulariser, _ = check_regulariser(regulariser, dtype, positive=True)
    solver = check_solver(solver, Newton, Mirror, Optax)
    check_solver_mesh(call, solver)
    static = SolverOptions(call, solver, True)
    point = (
        default_start(call, arrays) if start is None else check_row_vectors("start", start, arrays)
    )
    inputs = SolverInputs(arrays, point, regulariser)
    found = _solve(static, inputs)
    value, point = with_exact_derivative(call, arrays, found.value, found.point)
    stats = without_derivative(found.stats, arrays, "map_attention")
    found = Solution(value, found.source, point, found.result, stats)
    return raise_on_failure(
        found, throw, "map_attention", collective=any(x.plan is not None for x in call)
    )


def _mean_square_deviation(parts: Parts) -> Array:
    value = jnp.concatenate([arrays.value for arrays in parts], -3)
    apart = value - value.mean(-3, keepdims=True)
    square = (apart * apart).sum(-1).mean()
    return jnp.where(square > 0, square, 1.0)  # also if there are no values


@functools.partial(jax.jit, static_argnums=0)
def _solve(static: SolverOptions, inputs: SolverInputs) -> Solution:
    inputs = lax.stop_gradient(inputs)

    def evaluate(point: Array, passes: Array) -> Trial:
        del passes
        return _trial(static, inputs._replace(point=point))

    def objective(point: Array, inputs: SolverInputs) -> tuple[Array, Array]:
        last = _source(static, inputs._replace(point=point)).last
        return -last.value, last.point

    if isinstance(static.solver, Optax):
        found = optax_descent(static.solver, evaluate, objective, inputs, inputs.point)
    elif isinstance(static.solver, Mirror):
        found = _mirror(static, inputs)
    else:
        found = newton_descent(evaluate, inputs.point, static.solver.max_steps)
    last = found.last
    stats = {
        "steps": found.steps,
        "inner_steps": found.inner_steps,
        "residual": last.residual,
        "path": found.path,
    }
    point = jnp.where((last.status == Result.no_keys)[..., None], 0.0, last.point)
    return Solution(last.value, last.gradient, point, last.status, stats)


def _source(static: SolverOptions, inputs: SolverInputs) -> Descent:
    tolerance = _INNER_TOLERANCE * tolerance_in(inputs.point.dtype, static.solver)
    return find_source(static._replace(solver=Newton(tolerance=tolerance)), inputs)


def _trial(static: SolverOptions, inputs: SolverInputs) -> Trial:
    found = _source(static, inputs)
    last = found.last
    ended = jnp.where(last.status == Result.converged, RUNNING, last.status)
    last = last._replace(status=ended, inner_steps=found.steps)
    return _at_source(static, inputs, last, last.point)


# Mirror descent with the mirror map ∇F_λ*: its gradient step of length 1/2 is ζ ← ζ - ζ/2.
def _mirror(static: SolverOptions, inputs: SolverInputs) -> Descent:
    def step(found: Descent) -> Descent:
        last = found.last
        none = last._replace(inner_steps=jnp.zeros_like(last.inner_steps))
        trial = _at_source(static, inputs, none, 0.5 * last.gradient)
        return advance(found, trial, last.status == RUNNING, static.solver.max_steps)

    found = initial_descent(_trial(static, inputs), static.solver.max_steps)
    return lax.while_loop(any_running, step, found)


# The point of a source is known exactly, z = ∇F_λ(ζ), the source of a point only to a tolerance.
# So every trial is moved to the point of the source that was found. There ∇M_λ(z) = ζ and
# ∇²M_λ = (Σ(ζ) + λ)⁻¹, and Newton's step -(Σ + λ) ζ needs no linear solve.
def _at_source(static: SolverOptions, inputs: SolverInputs, trial: Trial, source: Array) -> Trial:
    """`trial`, moved to the point of a source."""
    (out, lse), product = covariance_product(static.call, source, inputs.arrays, source)
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
