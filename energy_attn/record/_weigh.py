"""Weights of the documents of a context, and attribution of an answer to the documents."""

import functools
import operator
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Float, Int, PyTree

from energy_attn.kernels.internal import additions, checks, jaxprs

from ..flax._nnx import holds_nnx, run_pure
from ..observables._at_source import HashablePartial
from ._lift import traced
from ._record import Partial, check_callable, check_calls

# Log-weights, in nats: where the path is first looked at, and the depth from which on it is not divided.
_FIRST, _DEEPEST = -8.0, -4096.0
# A gap above this part of the change is warned of.
_LARGE = 0.05


def weigh(function: Callable[..., Any]) -> Callable[..., Any]:
    r"""A function whose attention weighs the documents of its context, in every layer of any model.

    $$s_{ia} \to s_{ia} + w_{d(a)}$$

    in each [`attention`][energy_attn.attention], [`free_energy`][energy_attn.free_energy] or
    [`FreeEnergy`][energy_attn.FreeEnergy] that runs inside `function`, where $d(a)$ is the document of key $a$. At
    $w = 0$ it is the function itself; $w_d = -\infty$ hides document $d$ from all later tokens. The
    derivative $\partial f / \partial w_d$ is the effect of the document on $f$, to first order, for all documents in
    one backward pass:

        answer = lambda model, tokens: log_probability_of_the_answer(model(tokens))
        effects = jax.grad(ea.weigh(answer))(jnp.zeros(16), documents, model, tokens)

    Where one document has all the attention, or two agree, the derivative is small whatever their effect:
    [`attribute`][energy_attn.attribute] integrates it along a path.

    The cost is `function` and its backward, and a number for each key in every attention, sharded as the keys are.

    Args:
        function: any function or Equinox module, or a method of one, as for [`record`][energy_attn.record]; models of
            Flax's NNX, too. It has to attend to its whole context at once, without a cache.

    Returns:
        A function `(log_weights, segments, *args, **kwargs)` with the result of `function(*args, **kwargs)`.
        `log_weights` are $w$, floating `[D]` or `[B, D]`, in nats. `segments` are integers `[S]` or `[B, S]`, the
        document of each key, negative for a key without a document, whose scores do not change. For a
        weight of each token, pass `segments=jnp.arange(S)`.

    Raises:
        TypeError: `function` is not callable; when called: `log_weights` is not a floating array, or `segments` not
            an integer one.
        ValueError: when called: shapes that do not match, a segment that is no document, an attention over another
            number of keys, or no attention in `function`.
        NotImplementedError: when called: an attention inside a `jax.custom_jvp` or `jax.custom_vjp` of the user's.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 6, 2, 4))
        >>> answer = lambda v: ea.attention(q, k, v)[-1].sum()
        >>> documents = jnp.array([0, 0, 1, 1, -1, -1])
        >>> effects = jax.grad(ea.weigh(answer))(jnp.zeros(2), documents, v)
        >>> without = ea.weigh(answer)(jnp.array([0.0, -jnp.inf]), documents, v)  # the second document
        >>> effects.shape, without.shape
        ((2,), ())
    """
    check_callable(function)
    return Partial(weighed, (operator.call, function))


def weighed(
    ask: Callable[[Callable[[Array], Any], Array], Any],
    function: Callable[..., Any],
    /,
    log_weights: Float[Array | np.ndarray, "*B documents"],
    segments: Int[Array | np.ndarray, "*rows S"],
    *args: PyTree,
    **kwargs: PyTree,
) -> PyTree:
    """`ask(value, log_weights)`, where `value` is `function` as a function of the weights."""
    weights, numbers = _checked(log_weights, segments)
    run = functools.partial(_run, ask, weights, numbers)
    if holds_nnx((function, args, kwargs)):
        return run_pure(lambda *x, **y: (run(*x, **y), None), function, args, kwargs)[0]
    return run(function, *args, **kwargs)


def _checked(log_weights: object, segments: object) -> tuple[Array, Array]:
    weights = jnp.asarray(checks.check_floating("log_weights", log_weights))
    numbers = checks.check_integral("segments", segments)
    if weights.ndim not in (1, 2):
        raise ValueError(
            f"log_weights: wanted shape (documents,) or (batch, documents), got {checks.received(log_weights)}"
        )
    if numbers.ndim not in (1, 2) or (
        weights.ndim == numbers.ndim == 2 and len(weights) != len(numbers)
    ):
        raise ValueError(
            f"segments: wanted shape (keys,) or (batch, keys) with log_weights {weights.shape}, "
            f"got {checks.received(segments)}"
        )
    if not isinstance(numbers, jax.core.Tracer):
        last = int(np.max(np.asarray(numbers), initial=-1))
        if last >= weights.shape[-1]:
            raise ValueError(f"segments: wanted documents below {weights.shape[-1]}, got {last}")
    return weights, jnp.asarray(numbers)


@eqx.filter_jit
def _run(
    ask: Callable[[Callable[[Array], Any], Array], Any],
    weights: Array,
    numbers: Array,
    function: Callable[..., Any],
    /,
    *args: PyTree,
    **kwargs: PyTree,
) -> PyTree:
    def run(weights: Array) -> PyTree:
        active = additions.TokenScores(_scores_of(weights, numbers))
        with additions.active_token_scores((*additions.active_token_scores.value, active)):
            out = function(*args, **kwargs)
        check_calls(function, active.used)
        return out

    program, rebuild = traced(run, weights)
    _check_rules(program)
    return ask(lambda weights: rebuild(jaxpr_as_fun(program)(weights)), weights)


def _check_rules(program: ClosedJaxpr) -> None:
    """Raises `NotImplementedError` for an attention inside a function with a derivative rule, which ignores weights."""
    for equation in jaxprs.equations(program):
        kind = equation.primitive.name
        inside = (x for inner in jaxprs.programs(equation) for x in jaxprs.equations(inner))
        if kind.startswith(("custom_jvp", "custom_vjp")) and any(
            x.params.get("name") == additions.TOKEN_SCORES for x in inside
        ):
            raise NotImplementedError(
                "function: wanted attention outside of functions with a derivative of their own, which would "
                f"lose that in log_weights, got one inside a {kind}"
            )


def _scores_of(weights: Array, numbers: Array) -> Array:
    """The weight of each key's document, `[B or 1, S]`; zero without a document, NaN for one out of range."""
    weights, numbers = (x if x.ndim == 2 else x[None] for x in (weights, numbers))
    options = {"mode": "fill", "fill_value": jnp.nan}
    taken = jnp.take_along_axis(weights, jnp.maximum(numbers, 0), 1, **options)
    return jnp.where(numbers < 0, 0.0, taken)


class Attribution(NamedTuple):
    """The result of a function that `attribute` returns."""

    effects: Float[Array, "*B documents"]
    change: Float[Array, ""]
    gap: Float[Array, ""]
    points: Int[Array, ""]


def attribute(
    function: Callable[..., Any], *, tolerance: float = 0.01, max_points: int = 99
) -> Callable[..., Attribution]:
    r"""Transforms a function into one that attributes its value to the documents of a context.

    $$E_d = \int_{-\infty}^0 \frac{\partial f}{\partial w_d}(w + u)\, du, \qquad
      \sum_d E_d = f(w) - f(-\infty)$$

    The integral follows the path on which all documents fade in: $u$ is added to all log-weights of
    [`weigh`][energy_attn.weigh]. The value of a retrieving head changes within a few nats of $u$, somewhere below 0,
    and its derivative is small elsewhere. The path is therefore subdivided adaptively: an interval is split until its
    effects add up to the change of the value over the interval.

    The integral does not exist for a value that depends only on the documents: it then depends only on differences
    of their log-weights. A large `gap` shows this. One token outside the documents, such as the first token, avoids it.

    The cost is one evaluation of $f$ and of its gradient per point. Points are evaluated one after another, so the
    memory is the memory of one evaluation.

    Args:
        function: as for [`weigh`][energy_attn.weigh]; it returns a floating scalar, such as the log-probability
            of an answer.
        tolerance: the error, as a fraction of the change, at which the subdivision stops.
        max_points: the largest number of points, at least 5.

    Returns:
        A function `(log_weights, segments, *args, **kwargs)` with the arguments of [`weigh`][energy_attn.weigh], which
        returns a named tuple `(effects, change, gap, points)`. Its effects cannot be differentiated in reverse mode.

        - `effects`: $E_d$ of each document, in the shape of `log_weights`.
        - `change`: $f(w) - f(-\infty)$, the value less the value without any document.
        - `gap`: the sum of the effects less the change: the error of the integral.
        - `points`: the number of points at which the derivative was evaluated.

    Raises:
        TypeError: `function` is not callable, or an option is not a number; when called: as `weigh`, or the value is
            not a floating scalar.
        ValueError: `tolerance` is not above 0, or `max_points` is below 5; when called: as `weigh`.
        NotImplementedError: when called: as `weigh`.

    Warns:
        UserWarning: the gap exceeds 5% of the change, or is NaN. Inside `jax.jit` there is no warning: see `gap`.

    Source: Sundararajan et al. (arXiv 1703.01365), equation 1 and proposition 1.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 6, 2, 4))
        >>> answer = lambda v: ea.attention(q, k, v)[-1].sum()
        >>> documents = jnp.array([0, 0, 1, 1, -1, -1])
        >>> effects, change, gap, points = ea.attribute(answer)(jnp.zeros(2), documents, v)
        >>> without = ea.weigh(answer)(jnp.full(2, -jnp.inf), documents, v)
        >>> bool(jnp.allclose(change, answer(v) - without, atol=1e-5)), bool(abs(gap) < 0.05 * abs(change))
        (True, True)
    """
    check_callable(function)
    tolerance = checks.check_finite_number("tolerance", tolerance)
    if tolerance <= 0:
        raise ValueError(f"tolerance: wanted a number above 0, got {checks.received(tolerance)}")
    checks.check_integer("max_points", max_points, 5)
    ask = HashablePartial(_integral, (tolerance, max_points))
    return Partial(_attributed, (ask, function))


def _attributed(
    ask: HashablePartial, function: Callable[..., Any], /, *args: PyTree, **kwargs: PyTree
) -> Attribution:
    result: Attribution = weighed(ask, function, *args, **kwargs)
    if not isinstance(result.gap, jax.core.Tracer):
        gap, change = float(result.gap), float(result.change)
        if not abs(gap) <= float(_allowed(_LARGE, result.effects, result.change)):
            warnings.warn(
                f"attribute: the effects add up to {change + gap:.3g}, and all documents did {change:.3g}; "
                "raise max_points, or hide documents one by one by weigh()",
                stacklevel=3,
            )
    return result


def _allowed(tolerance: float, effects: Array, change: Array) -> Array:
    # a fraction of the change, and the rounding error of effects that cancel
    rounding = float(jnp.finfo(effects.dtype).eps) ** 0.5
    return tolerance * jnp.abs(change) + rounding * jnp.max(jnp.abs(effects), initial=0.0)


class _PathPieces(NamedTuple):
    """Pieces of the path between two log-weights, one entry each; unused entries have the width 0."""

    # The first piece begins at minus infinity, with derivatives that grow as e^u. Its integral is the derivative at its
    # end, which Simpson's rule yields with the middle at the end and a width of 6/5.
    end: Array
    width: Array
    nodes: Array  # value and derivatives at beginning, middle and end, [pieces, 3, 1 + D]

    def effects(self) -> Array:
        """The integral over each piece, by Simpson's rule."""
        return self._by_rule(1, 4, 1)

    def errors(self) -> Array:
        """Estimates the error of each piece, from the change of the value and by the trapezoidal rule."""
        effects = self.effects()
        missed = effects.sum(-1) - (self.nodes[:, 2, 0] - self.nodes[:, 0, 0])
        difference = jnp.max(jnp.abs(effects - self._by_rule(1, 2, 1)), -1, initial=0.0)
        return jnp.abs(missed) + difference / 4

    def divisible_errors(self) -> Array:
        """The errors of the pieces that can be divided, and 0 for the others."""
        is_first = jnp.arange(len(self.end)) == 0
        deep = jnp.where(is_first, self.end <= _DEEPEST, self.width < 1e-3)
        return jnp.where(deep, 0.0, self.errors())

    def halves(
        self, which: Array, evaluate: Callable[..., Array]
    ) -> tuple["_PathPieces", "_PathPieces"]:
        """Divides a piece into two, the first piece at twice its depth."""
        end, width, (first, middle, last) = jax.tree.map(lambda x: x[which], self)
        is_first = which == 0
        beginning = jnp.where(is_first, 2 * end, end - width)
        centre = (beginning + end) / 2
        inner = jnp.where(is_first, beginning, (beginning + centre) / 2)
        left_node, right_node = evaluate(inner, jnp.where(is_first, centre, (centre + end) / 2))
        left = _PathPieces(
            jnp.where(is_first, beginning, centre),
            jnp.where(is_first, width, width / 2),
            jnp.stack([first, left_node, jnp.where(is_first, left_node, middle)]),
        )
        right = _PathPieces(
            end,
            jnp.where(is_first, -end, width / 2),
            jnp.stack([jnp.where(is_first, left_node, middle), right_node, last]),
        )
        return left, right

    def _by_rule(self, *factors: int) -> Array:
        shares = jnp.asarray(factors, self.width.dtype) / sum(factors)
        return jnp.einsum("p,k,pkd->pd", self.width, shares, self.nodes[..., 1:])


def _integral(
    tolerance: float, max_points: int, value: Callable[[Array], Any], weights: Array
) -> Attribution:
    def node(shift: Array) -> Array:
        result, slopes = jax.value_and_grad(lambda w: _scalar(value(w)))(weights + shift)
        return jnp.concatenate([result.astype(slopes.dtype)[None], slopes.reshape(-1)])

    def at(*shifts: Array) -> Array:
        return lax.map(node, jnp.stack(shifts))

    first, middle, last = at(*jnp.asarray([_FIRST, _FIRST / 2, 0.0], weights.dtype))
    nothing = jnp.zeros_like(last).at[0].set(_scalar(value(jnp.full_like(weights, -jnp.inf))))
    change = last[0] - nothing[0]
    number = 2 + (max_points - 3) // 2
    pieces = _PathPieces(
        jnp.zeros((number,), weights.dtype).at[0].set(_FIRST),
        jnp.zeros((number,), weights.dtype).at[:2].set(jnp.asarray([6 / 5, -_FIRST])),
        jnp.zeros((number, 3, last.size), weights.dtype)
        .at[:2]
        .set(jnp.stack([jnp.stack([nothing, first, first]), jnp.stack([first, middle, last])])),
    )

    def unfinished(carry: tuple[Array, _PathPieces]) -> Array:
        count, pieces = carry
        allowed = _allowed(tolerance, pieces.effects().sum(0), change)
        return (count < number) & (pieces.divisible_errors().sum() > allowed)

    def divide(carry: tuple[Array, _PathPieces]) -> tuple[Array, _PathPieces]:
        count, pieces = carry
        which = jnp.argmax(pieces.divisible_errors())
        halves = pieces.halves(which, at)
        return count + 1, jax.tree.map(
            lambda x, y, z: x.at[which].set(y).at[count].set(z), pieces, *halves
        )

    count, pieces = lax.while_loop(unfinished, divide, (jnp.asarray(2), pieces))
    effects = pieces.effects().sum(0)
    gap = effects.sum() - change
    return Attribution(effects.reshape(weights.shape), change, gap, 2 * count - 1)


def _scalar(result: object) -> Array:
    if not (
        isinstance(result, jax.Array)
        and result.shape == ()
        and jnp.issubdtype(result.dtype, jnp.floating)
    ):
        raise TypeError(f"function: wanted a floating scalar, got {checks.received(result)}")
    return result
