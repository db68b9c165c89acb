"""Γ, the "log-likelihood" of the paper, and attention as its saddle point."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from energy_attn.kernels.internal import check_flag, received

from ..functional._free_energy import Calls, Parts
from ..functional._solution import Result, Solution, raise_on_failure, without_derivative
from ..observables._at_source import (
    check_row_vectors,
    covariance_product,
    state_at,
)
from ..observables._measure import AbstractMeasure
from ..solvers import AbstractSolver, Extragradient, Newton, Optax, Optimistic
from ..solvers._solvers import check_solver
from ._checks import check_measure, check_solver_mesh, sends, tolerance_in
from ._descent import (
    RUNNING,
    Descent,
    Evaluate,
    Trial,
    advance,
    any_running,
    initial_descent,
    select,
)
from ._map import default_start, with_exact_derivative
from ._maximise import norm
from ._optax_descent import optax_descent


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
        point: $z$, likewise.

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
    calls, parts = check_measure(F)._prepared()
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

    The saddle is the stationary point of the paper's $\Gamma$, found here by solvers for saddle points.
    Gradient *descent* in both variables leaves it exponentially fast, since $\Gamma$ is unbounded below
    in $\zeta$. The objective of `F.map` has a minimum, and its
    solvers take a few steps where these take hundreds.

    `Extragradient` steps by the gradient at a trial point one step ahead; `Optimistic` extrapolates
    from the gradient before; `Newton` solves the linearised equations, $\zeta = 0$ and
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
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 9, 2, 4))
        >>> F = ea.FreeEnergy().at(q, k, v)
        >>> bool(jnp.allclose(ea.bayes.saddle_attention(F).point, F.attention(), atol=1e-4))
        True
    """
    calls, parts = check_measure(F)._prepared()
    solver = check_solver(solver, Extragradient, Optimistic, Newton)
    check_solver_mesh(calls, solver)
    check_flag("throw", throw)
    if start is None:
        point = default_start(calls, parts)
        pair = jnp.concatenate([jnp.zeros_like(point), point], -1)
    else:
        if not isinstance(start, tuple) or len(start) != 2:
            raise TypeError(f"start: wanted a pair (source, point), got {received(start)}")
        pair = jnp.concatenate([check_row_vectors("start", x, calls, parts) for x in start], -1)
    found = _solve(_SaddleOptions(calls, solver), _SaddleInputs(parts, pair))
    value, point = with_exact_derivative(calls, parts, found.value, found.point)
    stats = without_derivative(found.stats, parts, "saddle_attention")
    found = Solution(value, found.source, point, found.result, stats)
    return raise_on_failure(found, throw, "saddle_attention", collective=sends(calls))


class _SaddleOptions(NamedTuple):
    calls: Calls
    solver: AbstractSolver


class _SaddleInputs(NamedTuple):
    """The traced inputs. `start` is source and point concatenated, `[*B, T, N, 2 Hv]`."""

    parts: Parts
    start: Array


@functools.partial(jax.jit, static_argnums=0)
def _solve(static: _SaddleOptions, inputs: _SaddleInputs) -> Solution:
    inputs = lax.stop_gradient(inputs)

    def evaluate(pair: Array, passes: Array) -> Trial:
        del passes
        return _trial(static, inputs, pair)

    def objective(pair: Array, inputs: _SaddleInputs) -> tuple[Array, Array]:
        trial = _trial(static, inputs, pair)
        return trial.value, trial.gradient

    if isinstance(static.solver, Optimistic):
        optimiser = optax.optimistic_gradient_descent(static.solver.step_size)
        solver = Optax(optimiser, static.solver.max_steps)
        found = optax_descent(solver, evaluate, objective, inputs, inputs.start, recorded=0)
    elif isinstance(static.solver, Extragradient):
        found = _extragradient(static.solver, evaluate(inputs.start, jnp.int32(0)), evaluate)
    else:
        found = _newton(static, inputs, evaluate(inputs.start, jnp.int32(0)), evaluate)
    last = found.last
    none = (last.status == Result.no_keys)[..., None]
    source, point = jnp.split(jnp.where(none, 0.0, last.point), 2, -1)
    stats = {"steps": found.steps, "residual": last.residual}
    return Solution(last.value, source, point, last.status, stats)


def _trial(static: _SaddleOptions, inputs: _SaddleInputs, pair: Array) -> Trial:
    # the gradient of Γ with the sign of its first half reversed, since the source maximises
    source, point = jnp.split(pair, 2, -1)
    out, lse = state_at(static.calls, source, inputs.parts)
    gradient = jnp.concatenate([out - point, source], -1)
    residual = norm(gradient)
    value = (source * point).sum(-1) - lse
    rounding = 4 * jnp.finfo(lse.dtype).eps
    size = jnp.sqrt(1.0 + (point * point).sum(-1))
    threshold = (tolerance_in(lse.dtype, static.solver) + rounding) * size
    noise = rounding * size * (1.0 + abs(lse))  # of the gradient, from the rounding of the scores
    statuses = [jnp.isneginf(lse), ~jnp.isfinite(value), residual <= threshold]
    codes = (Result.no_keys, Result.not_finite, Result.converged)
    status = jnp.select(statuses, [jnp.int32(x) for x in codes], RUNNING)
    zero = jnp.zeros_like(status)
    return Trial(pair, value, gradient, gradient, noise, residual, threshold, status, zero)


def _extragradient(solver: Extragradient, first: Trial, evaluate: Evaluate) -> Descent:
    adapts = solver.step_size is None

    def step(carry: tuple[Descent, Array]) -> tuple[Descent, Array]:
        found, size = carry
        last = found.last
        active = last.status == RUNNING
        half = evaluate(last.point - size[..., None] * last.gradient, found.passes)
        trial = evaluate(last.point - size[..., None] * half.gradient, found.passes)
        moved = active
        if adapts:  # the two gradients must not differ by more than 0.7 of the first
            near = norm(half.gradient - last.gradient) <= 0.7 * last.residual
            blurred = last.residual <= 8 * last.noise  # then their difference is rounding
            moved = active & (near | blurred)
            size = size * jnp.where(blurred, 1.0, jnp.where(near, 1.1, 0.6))
        found = advance(found, trial, moved, solver.max_steps)
        over = found.passes > 2 * solver.max_steps
        status = found.last.status
        status = jnp.where(over & (status == RUNNING), Result.max_steps_reached, status)
        return found._replace(last=found.last._replace(status=status)), size

    size = jnp.full_like(first.value, 0.5 if solver.step_size is None else solver.step_size)
    carry = (initial_descent(first, 0), size)
    return lax.while_loop(lambda carry: any_running(carry[0]), step, carry)[0]


def _newton(
    static: _SaddleOptions, inputs: _SaddleInputs, first: Trial, evaluate: Evaluate
) -> Descent:
    def step(found: Descent) -> Descent:
        last = found.last
        source, _ = jnp.split(last.point, 2, -1)
        state, product = covariance_product(static.calls, source, inputs.parts, source)
        pair = jnp.concatenate([jnp.zeros_like(source), state.out - product], -1)
        active = last.status == RUNNING
        trial = evaluate(select(active, pair, last.point), found.passes)
        return advance(found, trial, active, static.solver.max_steps)

    return lax.while_loop(any_running, step, initial_descent(first, 0))
