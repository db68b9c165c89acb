"""Γ, the "log-likelihood" of the paper, and the saddle of it that attention is."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float

from energy_attn.kernels.internal import check_choice, check_finite_number, check_flag, received

from ..core._free_energy import Arrays, Prepared
from ..core._solution import Result, Solution, checked, held
from ..observables._observe import check_line, covariance_product, prepare_wide, state_at
from ._arguments import check_follows, check_max_steps, check_tolerance
from ._descent import RUNNING, Descent, Trial, advance, begin, running, select
from ._follow import follow
from ._maximise import length
from ._optimum import at_optimum, plain_mean

SOLVERS = ("extragradient", "optimistic", "newton")


def gamma(
    source: Float[Array, "*B T N Hv"],
    point: Float[Array, "*B T N Hv"],
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    **options: Any,
) -> Float[Array, "*B T N"]:
    r"""What the paper calls the log-likelihood of a point and a source, for each query and head.

    $$\Gamma(\zeta, z) = \zeta \cdot z - F(\zeta)$$

    Its largest value over sources is the conjugate. In both arguments it has one stationary point,
    $\zeta = 0$ and $z = \nabla F(0)$, attention; but $\Gamma$ is concave in $\zeta$ and linear in $z$, and so
    that is a saddle: neither a minimum nor a maximum, of which $\Gamma$ has none.

    Args:
        source: $\zeta$, `[B, T, N, Hv]` or `[T, N, Hv]`.
        point: $z$, likewise.
        query: `[B, T, N, H]` or `[T, N, H]`.
        key: `[B, S, K, H]` or `[S, K, H]`.
        value: `[B, S, K, Hv]` or `[S, K, Hv]`.
        bias: as in [`free_energy`][energy_attn.free_energy], as is `mask`.
        mask: boolean, True where a key takes part.
        **options: those of [`free_energy`][energy_attn.free_energy].

    Returns:
        `[B, T, N]` in nats, float32 (float64); plus infinity for a row that sees no key.

    Raises:
        TypeError: an argument of the wrong type, or an unknown option.
        ValueError: shapes that do not belong together.

    Source: Tree Attention (arXiv 2408.04093), equation 30 of the later text. Equation 21 of the
    first sums $F$ over the components of $\zeta$ as well, which counts it too often.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 9, 2, 4))
        >>> zero, out = jnp.zeros_like(q), ea.attention(q, k, v)
        >>> f = lambda source, point: ea.gamma(source, point, q, k, v).sum()
        >>> slopes = jax.grad(f, argnums=(0, 1))(zero, out)
        >>> bool(jnp.allclose(jnp.stack(slopes), 0, atol=1e-5))
        True
    """
    call, arrays = prepare_wide(query, key, value, bias, mask, **options)
    source, point = check_line("source", source, arrays), check_line("point", point, arrays)
    return (source * point).sum(-1) - state_at(call, source, arrays).lse


def saddle_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    solver: str = "extragradient",
    step_size: float | None = None,
    start: tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N Hv"]] | None = None,
    max_steps: int = 4096,
    tolerance: float | None = None,
    throw: bool = True,
    **options: Any,
) -> Solution:
    r"""Attention as the saddle of $\Gamma$: up in the source, down in the point.

    $$\max_\zeta \min_z\; \Gamma(\zeta, z): \qquad \hat\zeta = 0, \quad \hat z = \nabla F(0) = \mathrm{attention}$$

    This is what the stationarity of the paper's $\Gamma$ asks for, found by methods that find saddles.
    Gradient *descent* in both variables leaves it exponentially fast, since $\Gamma$ falls without bound
    in $\zeta$. [`map_attention`][energy_attn.map_attention] has an objective with a minimum, and needs
    some steps where these need hundreds.

    `"extragradient"` steps from where it is by the slopes half a step ahead (Korpelevich);
    `"optimistic"` is `optax.optimistic_gradient_descent`, with the sign of the source's slope
    turned; `"newton"` solves the linearised equations, $\zeta = 0$ and
    $z = \nabla F(\zeta) - \Sigma(\zeta)\,\zeta$, which takes two steps from anywhere.

    Differentiable, in reverse mode, as attention itself.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`.
        key: `[B, S, K, H]` or `[S, K, H]`.
        value: `[B, S, K, Hv]` or `[S, K, Hv]`.
        bias: as in [`free_energy`][energy_attn.free_energy], as is `mask`.
        mask: boolean, True where a key takes part.
        solver: `"extragradient"`, `"optimistic"` or `"newton"`.
        step_size: the step of the first two; it should be well below 1 and below the inverse of
            the largest eigenvalue of $\Sigma$. None lets each row of `"extragradient"` find its own
            (Khobotov's rule), and is 0.1 for `"optimistic"`.
        start: `(source, point)`, `[B, T, N, Hv]` each; None is zero and the plain mean of the values
            that a row sees.
        max_steps: how many steps a row may take.
        tolerance: what is accepted of the residual $|(\nabla_\zeta \Gamma, \nabla_z \Gamma)|$, relative to
            $\sqrt{1 + |z|^2}$. None is 1e-10 in float64 and 2e-6 in float32.
        throw: whether to raise if a row does not converge.
        **options: those of [`free_energy`][energy_attn.free_energy].

    Returns:
        A [`Solution`][energy_attn.Solution] with `value` $\Gamma$ `[B, T, N]`, `source` and `point`
        `[B, T, N, Hv]`, in float32 (float64). `stats`: `steps` and `residual`. A row that sees no key
        has the result `no_keys`, the value plus infinity, and zeros.

    Raises:
        TypeError: an argument of the wrong type, or an unknown option.
        ValueError: shapes that do not belong together, an unknown solver, a step size that is not
            above zero.
        NotImplementedError: `"optimistic"` where arrays are split over explicit mesh axes.
        RuntimeError: a row did not converge and `throw` is set; inside jit, when the program runs.
            Where keys are spread over a mesh, inside jit, the row's value is NaN instead.

    Source: Tree Attention (arXiv 2408.04093), equations 22 to 26; Korpelevich (1976); Daskalakis et
    al. (arXiv 1711.00141).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 9, 2, 4))
        >>> solution = ea.saddle_attention(q, k, v)
        >>> bool(jnp.allclose(solution.point, ea.attention(q, k, v), atol=1e-4))
        True
    """
    call, arrays = prepare_wide(query, key, value, bias, mask, **options)
    check_choice("solver", solver, SOLVERS)
    check_flag("throw", throw)
    if solver == "optimistic":
        check_follows(call, "solver", solver)
    if step_size is not None:
        step_size = check_finite_number("step_size", step_size)
        if step_size <= 0:
            raise ValueError(f"step_size: wanted a number above 0, got {step_size}")
    accepted = check_tolerance(tolerance, arrays.query.dtype)
    if start is None:
        point = plain_mean(call, arrays)
        pair = jnp.concatenate([jnp.zeros_like(point), point], -1)
    else:
        if not isinstance(start, tuple) or len(start) != 2:
            raise TypeError(f"start: wanted a pair (source, point), got {received(start)}")
        pair = jnp.concatenate([check_line("start", x, arrays) for x in start], -1)
    settings = _Settings(call, solver, step_size, check_max_steps(max_steps))
    found = _found(settings, _Given(arrays, pair, accepted))
    value, point = at_optimum(call, arrays, found.value, found.point)
    stats = held(found.stats, arrays, "saddle_attention")
    found = Solution(value, found.source, point, found.result, stats)
    return checked(found, throw, "saddle_attention", collective=call.place is not None)


class _Settings(NamedTuple):
    call: Prepared
    solver: str
    step_size: float | None
    max_steps: int


class _Given(NamedTuple):
    """What is traced. `start` is source and point in one, `[*B, T, N, 2 Hv]`."""

    arrays: Arrays
    start: Array
    tolerance: Array


@functools.partial(jax.jit, static_argnums=0)
def _found(settings: _Settings, given: _Given) -> Solution:
    given = lax.stop_gradient(given)

    def evaluate(pair: Array, passes: Array) -> Trial:
        del passes
        return _trial(settings, given, pair)

    if settings.solver == "optimistic":
        solver = optax.optimistic_gradient_descent(settings.step_size or 0.1)

        def objective(pair: Array, given: _Given) -> tuple[Array, Array]:
            trial = _trial(settings, given, pair)
            return trial.value, trial.gradient

        start, most = given.start, settings.max_steps
        found = follow(solver, evaluate, objective, given, start, most, recorded=0)
    elif settings.solver == "newton":
        found = _newton(settings, given, evaluate(given.start, jnp.int32(0)), evaluate)
    else:
        found = _extragradient(settings, evaluate(given.start, jnp.int32(0)), evaluate)
    last = found.last
    none = (last.verdict == Result.no_keys)[..., None]
    source, point = jnp.split(jnp.where(none, 0.0, last.at), 2, -1)
    stats = {"steps": found.steps, "residual": last.residual}
    return Solution(last.value, source, point, last.verdict, stats)


def _trial(settings: _Settings, given: _Given, pair: Array) -> Trial:
    # the "gradient" is that of Γ with the sign of its first half turned: Γ is to rise in the source
    source, point = jnp.split(pair, 2, -1)
    out, lse = state_at(settings.call, source, given.arrays)
    gradient = jnp.concatenate([out - point, source], -1)
    residual = length(gradient)
    value = (source * point).sum(-1) - lse
    rounding = 4 * jnp.finfo(lse.dtype).eps
    size = jnp.sqrt(1.0 + (point * point).sum(-1))
    accepted = (given.tolerance + rounding) * size
    noise = rounding * size * (1.0 + abs(lse))  # of the slopes, as the scores are rounded
    verdicts = [jnp.isneginf(lse), ~jnp.isfinite(value), residual <= accepted]
    codes = (Result.no_keys, Result.not_finite, Result.converged)
    verdict = jnp.select(verdicts, [jnp.int32(x) for x in codes], RUNNING)
    zero = jnp.zeros_like(verdict)
    return Trial(pair, value, gradient, gradient, noise, residual, accepted, verdict, zero)


def _extragradient(settings: _Settings, first: Trial, evaluate: Any) -> Descent:
    adapts = settings.step_size is None

    def step(carry: tuple[Descent, Array]) -> tuple[Descent, Array]:
        found, size = carry
        last = found.last
        active = last.verdict == RUNNING
        half = evaluate(last.at - size[..., None] * last.gradient, found.passes)
        trial = evaluate(last.at - size[..., None] * half.gradient, found.passes)
        moved = active
        if adapts:  # the slopes half a step ahead must not differ by more than the slopes are
            near = length(half.gradient - last.gradient) <= 0.7 * last.residual
            blurred = last.residual <= 8 * last.noise  # that they differ then means nothing
            moved = active & (near | blurred)
            size = size * jnp.where(blurred, 1.0, jnp.where(near, 1.1, 0.6))
        found = advance(found, trial, moved, settings.max_steps)
        over = found.passes > 2 * settings.max_steps
        verdict = found.last.verdict
        verdict = jnp.where(over & (verdict == RUNNING), Result.max_steps_reached, verdict)
        return found._replace(last=found.last._replace(verdict=verdict)), size

    size = jnp.full_like(first.value, 0.5 if settings.step_size is None else settings.step_size)
    carry = (begin(first, 0), size)
    return lax.while_loop(lambda carry: running(carry[0]), step, carry)[0]


def _newton(settings: _Settings, given: _Given, first: Trial, evaluate: Any) -> Descent:
    def step(found: Descent) -> Descent:
        last = found.last
        source, _ = jnp.split(last.at, 2, -1)
        state, product = covariance_product(settings.call, source, given.arrays, source)
        pair = jnp.concatenate([jnp.zeros_like(source), state.out - product], -1)
        active = last.verdict == RUNNING
        trial = evaluate(select(active, pair, last.at), found.passes)
        return advance(found, trial, active, settings.max_steps)

    return lax.while_loop(running, step, begin(first, 0))
