"""Attention as the most probable point: the minimiser of the smoothed rate function."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float

from energy_attn.kernels.internal import check_flag

from ..core._solution import Result, Solution, checked, held
from ..observables._observe import check_line, covariance_product, prepare_wide
from ._arguments import (
    check_follows,
    check_max_steps,
    check_regulariser,
    check_solver,
    check_tolerance,
)
from ._descent import RUNNING, Descent, Trial, advance, begin, descend, running
from ._follow import follow
from ._maximise import Given, Method, length, search
from ._optimum import at_optimum, plain_mean

# A point's source is found by so many steps of Newton's method at most, and so much more exactly
# than the point.
_INNER_STEPS, _INNER_TOLERANCE = 64, 0.1


def map_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    regulariser: float | Float[Array, ""] | None = None,
    solver: str | optax.GradientTransformation | None = None,
    start: Float[Array, "*B T N Hv"] | None = None,
    max_steps: int = 64,
    tolerance: float | None = None,
    throw: bool = True,
    **options: Any,
) -> Solution:
    r"""Attention as a maximum a posteriori: the point that maximises $e^{-n M_\lambda(z)}$.

    $$M_\lambda(z) = \sup_\zeta \left\{z \cdot \zeta - F(\zeta) - \tfrac{\lambda}{2} |\zeta|^2\right\}, \qquad
      \arg\min_z M_\lambda(z) = \nabla F(0) = \mathrm{attention}$$

    $M_\lambda + F(0)$ is the rate function of the mean of $n$ values drawn by attention and seen through
    Gaussian noise of variance $\lambda / n$. It is finite everywhere, and its minimiser is exactly
    attention for every $\lambda > 0$: the penalty is flat at $\zeta = 0$. This finds by optimisation what
    [`attention`][energy_attn.attention] computes in one pass; it is there to be studied, and to be
    changed.

    `"newton"` goes from $z$ to $z - (\Sigma(\hat\zeta) + \lambda)\, \hat\zeta$, damped; each evaluation solves
    for the point's source $\hat\zeta(z) = \nabla M_\lambda(z)$. `"mirror"` is mirror descent, which halves the
    source in each step and takes the point along, $z = \nabla F_\lambda(\zeta)$. An optimiser of Optax's follows
    the gradient $\hat\zeta$ in $z$.

    Differentiable, in reverse mode, as attention itself: `point` is $\nabla F(0)$ and `value` is
    $-F(0)$ whatever the regulariser and the start.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`.
        key: `[B, S, K, H]` or `[S, K, H]`.
        value: `[B, S, K, Hv]` or `[S, K, Hv]`.
        bias: as in [`free_energy`][energy_attn.free_energy], as is `mask`.
        mask: boolean, True where a key takes part.
        regulariser: $\lambda > 0$, in the unit of the values squared; a number or a floating scalar.
            None is the mean square of the values about their middle: about as much noise as there
            is spread, with which Newton's method takes few steps, whatever the unit.
        solver: None or `"newton"`, `"mirror"`, or an `optax.GradientTransformation`.
        start: `[B, T, N, Hv]`, where to begin; None is the plain mean of the values that a row sees.
        max_steps: how many steps a row may take.
        tolerance: what is accepted of the step $|(\Sigma + \lambda)\, \hat\zeta|$ still to go, relative to
            the size of point and values. None is 1e-10 in float64 and 2e-6 in float32; more is
            accepted where rounding asks for it.
        throw: whether to raise if a row does not converge.
        **options: those of [`free_energy`][energy_attn.free_energy].

    Returns:
        A [`Solution`][energy_attn.Solution] with `point` `[B, T, N, Hv]`, its `source` (zero, but for
        the residual) and `value` $M_\lambda$ `[B, T, N]`, in float32 (float64). `stats`: `steps`,
        `inner_steps` (all of a row's steps in search of sources), `residual`, and `path`,
        `[max_steps + 1, B, T, N]`: $M_\lambda$ after each step. A row that sees no key has the result
        `no_keys`, the value plus infinity and the point zero.

    Raises:
        TypeError: an argument of the wrong type, or an unknown option.
        ValueError: shapes that do not belong together, a regulariser that is not above zero, an
            unknown solver.
        NotImplementedError: an optimiser of Optax's where arrays are split over explicit mesh axes.
        RuntimeError: a row did not converge and `throw` is set; inside jit, when the program runs.
            Where keys are spread over a mesh, inside jit, the row's value is NaN instead.

    Source: what equations 22 to 26 of Tree Attention (arXiv 2408.04093) aim at; their own objective
    has a saddle there, see [`saddle_attention`][energy_attn.saddle_attention].

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 9, 2, 4))
        >>> solution = ea.map_attention(q, k, v)
        >>> bool(jnp.allclose(solution.point, ea.attention(q, k, v), atol=1e-4))
        True
    """
    call, arrays = prepare_wide(query, key, value, bias, mask, **options)
    check_flag("throw", throw)
    dtype = arrays.query.dtype
    regulariser = _spread(arrays.value) if regulariser is None else regulariser
    regulariser, _ = check_regulariser(regulariser, dtype, positive=True)
    solver = check_solver(solver, "newton", "mirror")
    if not isinstance(solver, str):
        check_follows(call, "solver", solver)
    method = Method(call, solver, check_max_steps(max_steps), True)
    point = plain_mean(call, arrays) if start is None else check_line("start", start, arrays)
    given = Given(arrays, point, regulariser, check_tolerance(tolerance, dtype))
    found = _found(method, given)
    value, point = at_optimum(call, arrays, found.value, found.point)
    stats = held(found.stats, arrays, "map_attention")
    found = Solution(value, found.source, point, found.result, stats)
    return checked(found, throw, "map_attention", collective=call.place is not None)


def _spread(value: Array) -> Array:
    apart = value - value.mean(-3, keepdims=True)
    square = (apart * apart).sum(-1).mean()
    return jnp.where(square > 0, square, 1.0)  # also where there are no values


@functools.partial(jax.jit, static_argnums=0)
def _found(method: Method, given: Given) -> Solution:
    given = lax.stop_gradient(given)

    def evaluate(point: Array, passes: Array) -> Trial:
        del passes
        return _trial(method, given._replace(point=point))

    if method.solver == "newton":
        found = descend(evaluate, given.point, method.max_steps)
    elif method.solver == "mirror":
        found = _mirror(method, given)
    else:

        def objective(point: Array, given: Given) -> tuple[Array, Array]:
            last = _source(method, given._replace(point=point)).last
            return -last.value, last.at

        start = given.point
        found = follow(method.solver, evaluate, objective, given, start, method.max_steps)
    last = found.last
    stats = {
        "steps": found.steps,
        "inner_steps": found.inner,
        "residual": last.residual,
        "path": found.path,
    }
    point = jnp.where((last.verdict == Result.no_keys)[..., None], 0.0, last.at)
    return Solution(last.value, last.gradient, point, last.verdict, stats)


def _source(method: Method, given: Given) -> Descent:
    method = method._replace(solver=None, max_steps=_INNER_STEPS)
    return search(method, given._replace(tolerance=_INNER_TOLERANCE * given.tolerance))


def _trial(method: Method, given: Given) -> Trial:
    found = _source(method, given)
    last = found.last
    ended = jnp.where(last.verdict == Result.converged, RUNNING, last.verdict)
    last = last._replace(verdict=ended, inner=found.steps)
    return _at_source(method, given, last, last.at)


# Mirror descent in the mirror ∇F_λ*, whose gradient step of length 1/2 is ζ ← ζ - ζ/2.
def _mirror(method: Method, given: Given) -> Descent:
    def step(found: Descent) -> Descent:
        last = found.last
        none = last._replace(inner=jnp.zeros_like(last.inner))
        trial = _at_source(method, given, none, 0.5 * last.gradient)
        return advance(found, trial, last.verdict == RUNNING, method.max_steps)

    found = begin(_trial(method, given), method.max_steps)
    return lax.while_loop(running, step, found)


# The point of a source is known exactly, z = ∇F_λ(ζ), which cannot be said of the source of a
# point: so every trial stands at the point of the source that was found. There ∇M_λ(z) = ζ and
# ∇²M_λ = (Σ(ζ) + λ)⁻¹, and Newton's step needs no solving: -(Σ + λ) ζ.
def _at_source(method: Method, given: Given, trial: Trial, source: Array) -> Trial:
    """`trial`, moved to the point of a source. Raises nothing."""
    (out, lse), product = covariance_product(method.call, source, given.arrays, source)
    pushed = given.regulariser * source
    point = out + pushed
    residual = length(product + pushed)
    size = jnp.sqrt((point * point).sum(-1) + (out * out).sum(-1))
    accepted = (given.tolerance + 4 * jnp.finfo(lse.dtype).eps) * size
    ended = jnp.where(residual <= accepted, Result.converged, RUNNING)
    return trial._replace(
        at=point,
        value=((out + 0.5 * pushed) * source).sum(-1) - lse,
        gradient=source,
        direction=-product - pushed,
        residual=residual,
        accepted=accepted,
        verdict=jnp.where(trial.verdict == RUNNING, ended, trial.verdict),
    )
