"""The source that attains a conjugate, found for all rows at once, with its own derivative."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import holds_keys

from ..core._free_energy import Arrays, Prepared
from ..core._solution import Result
from ..observables._observe import covariance_at, state_at, support_at
from ._descent import RUNNING, Descent, Trial, descend
from ._follow import follow


class Method(NamedTuple):
    """What of a maximisation is known when it is traced.

    `bounded`: whether the conjugate is known to be finite everywhere, as it is for a positive
    regulariser.
    """

    call: Prepared
    solver: Any  # None or of Optax
    max_steps: int
    bounded: bool


class Given(NamedTuple):
    """What of it is traced. `point` is `[*B, T, N, V]`; regulariser and tolerance are scalars."""

    arrays: Arrays
    point: Array
    regulariser: Array
    tolerance: Array


class Maximum(NamedTuple):
    """The source that attains a conjugate, and how it was found; see `Descent`."""

    source: Array
    value: Array
    result: Array
    residual: Array
    steps: Array
    path: Array


def length(x: Array) -> Array:
    """The length of the vectors along the last axis. Raises nothing."""
    return jnp.sqrt((x * x).sum(-1))


# F_λ(ζ) - z·ζ is convex in ζ, with gradient ∇F(ζ) + λζ - z and Hessian Σ(ζ) + λ. Undamped, Newton's
# method runs away where one key has all the weight and Σ vanishes; too much damping is what it
# then suffers from. The damping is proportional to the gradient, so that it fades as the answer
# comes near, and to the spread of the values about the point,
#
#     E|v - z|² = tr Σ + |∇F - z|²,
#
# so that neither the unit nor the origin of the values matters.
def newton_trial(method: Method, given: Given, source: Array, passes: Array) -> Trial:
    """What Newton's method knows of every row at a source. Raises nothing."""
    covariance, out, lse = covariance_at(method.call, source, given.arrays)
    _, gradient = _objective(given, source, out, lse)
    residual = length(gradient)
    spread = jnp.maximum(jnp.trace(covariance, axis1=-2, axis2=-1), 0.0)
    kind = jnp.finfo(out.dtype)
    damping = 1e-3 * residual * jnp.sqrt(spread + residual**2) + 10 * kind.eps * spread
    damping = damping + given.regulariser + kind.tiny
    matrix = plus_diagonal(covariance, damping[..., None, None])
    step = -jnp.linalg.solve(matrix, gradient[..., None])[..., 0]
    # rounding may have made the matrix indefinite: then straight downhill
    descends = (step * gradient).sum(-1) < 0
    downhill = -gradient / (damping + spread)[..., None]
    step = jnp.where(descends[..., None], step, downhill)
    return _trial(method, given, source, passes, AttentionState(out, lse), step, spread)


def plain_trial(method: Method, given: Given, source: Array, passes: Array) -> Trial:
    """What methods that follow gradients know of every row at a source. Raises nothing."""
    state = state_at(method.call, source, given.arrays)
    _, gradient = _objective(given, source, *state)
    spread = jnp.zeros_like(state.lse)
    return _trial(method, given, source, passes, state, -gradient, spread)


def _trial(
    method: Method,
    given: Given,
    source: Array,
    passes: Array,
    state: AttentionState,
    step: Array,
    spread: Array,
) -> Trial:
    point, (out, lse) = given.point, state
    value, gradient = _objective(given, source, out, lse)
    residual = length(gradient)
    size = jnp.sqrt((point * point).sum(-1) + (out * out).sum(-1) + spread)
    far = length(source)
    eps = 4 * jnp.finfo(out.dtype).eps
    scores = jnp.where(holds_keys(lse), abs(lse), 0.0) + abs((source * point).sum(-1))
    noise = eps * (1.0 + scores + far * size + given.regulariser * far**2)
    # As good as asked for, or as rounding lets it be: scores that are off by ε move the mean by
    # no more than ε times the deviation of the values.
    asked = (given.tolerance + eps) * size
    accepted = asked + eps * scores * jnp.sqrt(spread)
    verdicts = {Result.no_keys: jnp.isneginf(lse), Result.not_finite: ~jnp.isfinite(value)}
    if not method.bounded:
        # A point is outside of the hull of the values if a hyperplane separates it from all of
        # them, by more than was asked for. Two are tried in turn: across the step, which is the
        # residual with all made small in it that can still be reached; and across the source,
        # which outside of the hull grows without bound along such a direction. Where the row
        # would end otherwise it is the first.
        first = (passes % 2 == 0) | (residual <= accepted)
        normal = jnp.where(first[..., None], step, source)
        beyond = (normal * point).sum(-1) - support_at(method.call, given.arrays, normal)
        apart = (beyond > asked * length(normal)) & (given.regulariser == 0)
        verdicts[Result.outside_hull] = apart
        source = jnp.where(apart[..., None], normal, source)
    verdicts[Result.converged] = residual <= accepted
    verdict = jnp.select(list(verdicts.values()), [jnp.int32(x) for x in verdicts], RUNNING)
    zero = jnp.zeros_like(verdict)
    return Trial(source, value, gradient, step, noise, residual, accepted, verdict, zero)


def _objective(given: Given, source: Array, out: Array, lse: Array) -> tuple[Array, Array]:
    linear = ((0.5 * given.regulariser * source - given.point) * source).sum(-1)
    return lse + linear, out + given.regulariser * source - given.point


def search(method: Method, given: Given) -> Descent:
    """The descent to the source that attains the conjugate of every row, from zero.

    Raises nothing.
    """
    start = jnp.zeros_like(given.point)
    if method.solver is None:
        evaluate = functools.partial(newton_trial, method, given)
        return descend(evaluate, start, method.max_steps)

    def objective(source: Array, given: Given) -> tuple[Array, Array]:
        return _objective(given, source, *state_at(method.call, source, given.arrays))

    evaluate = functools.partial(plain_trial, method, given)
    return follow(method.solver, evaluate, objective, given, start, method.max_steps)


@functools.partial(jax.jit, static_argnums=0)
def _searched(method: Method, given: Given) -> Maximum:
    found = search(method, lax.stop_gradient(given))
    last = found.last
    result = jnp.where(last.verdict == RUNNING, Result.max_steps_reached, last.verdict)
    return Maximum(last.at, -last.value, result, last.residual, found.steps, -found.path)


# The source ζ(z, λ, θ) solves  G = ∇F(ζ; θ) + λζ - z = 0,  and so  (Σ + λ) dζ = dz - ζ dλ - d_θ ∇F.
# Pulled back, a cotangent w becomes x = (Σ + λ)⁺ w for z, -x·ζ for λ, and for θ the pullback of -x
# by ∇F. (The pseudo-inverse: in a hull of low dimension no point leaves it, and nothing is asked
# of the source across it.) `_maximum` is differentiated again where this rule is, since it is `_maximum`
# that the forward pass calls, and all that the backward pass does is a function of its source.
def maximum(method: Method, given: Given) -> Maximum:
    """The source that attains the conjugate of every row; all but the source is held constant.

    Raises nothing.
    """
    found: Any = _maximum(method, given)
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _maximum(method: Method, given: Given) -> Maximum:
    return _searched(method, given)


def _maximum_forward(method: Method, given: Given) -> tuple[Maximum, Any]:
    found = maximum(method, given)
    return found, (given, found.source, found.result)


def _maximum_backward(method: Method, saved: Any, cotangent: Maximum) -> tuple[Given]:
    given, source, result = saved
    attained = has_source(result)[..., None]
    source = jnp.where(attained, source, 0.0)
    matrix = covariance_at(method.call, source, given.arrays).covariance
    matrix = plus_diagonal(matrix, given.regulariser)
    x = pseudo_solve(matrix, jnp.where(attained, cotangent.source, 0.0))
    state, pull_back = jax.vjp(lambda arrays: state_at(method.call, source, arrays), given.arrays)
    (arrays,) = pull_back(AttentionState(-x, jnp.zeros_like(state.lse)))
    zero = jnp.zeros_like(given.tolerance)
    return (Given(arrays, x, -(x * source).sum(), zero),)


_maximum.defvjp(_maximum_forward, _maximum_backward)


# A conjugate is an extremum in its source, and so its derivative is that at a fixed source:
# ζ in z, -|ζ|²/2 in λ and -dF(ζ) in the rest. That holds wherever the source is, and so the rule
# may be differentiated again, through the source.
def attained(method: Method, given: Given, found: Maximum) -> Array:
    """The value of a conjugate that has been found. Raises nothing."""
    value: Any = _attained(method, given, found)
    return value


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attained(method: Method, given: Given, found: Maximum) -> Array:
    infinite = (found.result == Result.outside_hull) | (found.result == Result.no_keys)
    return jnp.where(infinite, jnp.inf, found.value)


def _attained_forward(method: Method, given: Given, found: Maximum) -> tuple[Array, Any]:
    return attained(method, given, found), (given, found)


def _attained_backward(method: Method, saved: Any, cotangent: Array) -> tuple[Given, None]:
    given, found = saved
    some = has_source(found.result)
    source = jnp.where(some[..., None], found.source, 0.0)
    cotangent = jnp.where(some, cotangent, 0.0)
    state, pull_back = jax.vjp(lambda arrays: state_at(method.call, source, arrays), given.arrays)
    (arrays,) = pull_back(AttentionState(jnp.zeros_like(state.out), -cotangent))
    point = cotangent[..., None] * source
    regulariser = -0.5 * (point * source).sum()
    return Given(arrays, point, regulariser, jnp.zeros_like(given.tolerance)), None


_attained.defvjp(_attained_forward, _attained_backward)


def has_source(result: Array) -> Array:
    """Whether what was found is a source, if perhaps not yet a good one. Raises nothing."""
    return (result == Result.converged) | (result == Result.max_steps_reached)


def plus_diagonal(matrix: Array, diagonal: Array) -> Array:
    """Matrices with a number of each, or one of all, added to the diagonal. Raises nothing."""
    eye = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
    return matrix + diagonal * eye


@jax.custom_vjp
def pseudo_solve(matrix: Array, x: Array) -> Array:
    """The pseudo-inverse of symmetric matrices, times vectors.

    The derivative is that at constant rank, of vectors in the matrix's range. Raises nothing.
    """
    values, vectors = jnp.linalg.eigh(matrix)
    least = 16 * values.shape[-1] * jnp.finfo(values.dtype).eps * values[..., -1:]
    some = values > jnp.maximum(least, 0.0)
    inverse = jnp.where(some, 1 / jnp.where(some, values, 1.0), 0.0)
    along = (vectors * x[..., :, None]).sum(-2) * inverse
    return (vectors * along[..., None, :]).sum(-1)


def _pseudo_solve_forward(matrix: Array, x: Array) -> tuple[Array, Any]:
    found = pseudo_solve(matrix, x)
    return found, (matrix, found)


def _pseudo_solve_backward(saved: Any, cotangent: Array) -> tuple[Array, Array]:
    matrix, found = saved
    back = pseudo_solve(matrix, cotangent)
    return -back[..., :, None] * found[..., None, :], back


pseudo_solve.defvjp(_pseudo_solve_forward, _pseudo_solve_backward)
