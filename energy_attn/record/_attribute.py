"""Attribution of an answer to documents: the integral of a derivative, with the error of its sum."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from energy_attn.kernels.internal import checks

from ..observables._at_source import HashablePartial
from ._record import Partial, check_callable
from ._weigh import weighed

# Log-weights, in nats: where the path is first looked at, and the depth from which on it is not divided.
_FIRST, _DEEPEST = -8.0, -4096.0
# A gap above this part of the change is warned of.
_LARGE = 0.05


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
    memory is that of one evaluation.

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
    """The part of a change that an error may be, and what rounding leaves of effects that cancel."""
    rounding = float(jnp.finfo(effects.dtype).eps) ** 0.5
    return tolerance * jnp.abs(change) + rounding * jnp.max(jnp.abs(effects), initial=0.0)


class _PathPieces(NamedTuple):
    """Pieces of the path between two log-weights, an entry each; those that are not there yet have no width.

    `nodes` are the function's value and derivatives at the beginning, the middle and the end, `[pieces, 3, 1 + D]`.
    The first piece comes from minus infinity, where the derivatives are 0 and fall as $e^u$: its integral is that of
    its end, which Simpson's rule gives for the middle at the end and a width of 6/5.
    """

    end: Array
    width: Array
    nodes: Array

    def effects(self) -> Array:
        """The integral over each piece, by Simpson's rule."""
        return self._by_rule(1, 4, 1)

    def errors(self) -> Array:
        """Estimates the error of each piece, from the change of the value and by the trapezoidal rule."""
        effects = self.effects()
        missed = effects.sum(-1) - (self.nodes[:, 2, 0] - self.nodes[:, 0, 0])
        difference = jnp.max(jnp.abs(effects - self._by_rule(1, 2, 1)), -1, initial=0.0)
        return jnp.abs(missed) + difference / 4

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

    def errors(pieces: _PathPieces) -> Array:
        """Returns the errors of the pieces that can be divided, and 0 for the others."""
        deep = jnp.where(jnp.arange(number) == 0, pieces.end <= _DEEPEST, pieces.width < 1e-3)
        return jnp.where(deep, 0.0, pieces.errors())

    def unfinished(carry: tuple[Array, _PathPieces]) -> Array:
        count, pieces = carry
        allowed = _allowed(tolerance, pieces.effects().sum(0), change)
        return (count < number) & (errors(pieces).sum() > allowed)

    def divide(carry: tuple[Array, _PathPieces]) -> tuple[Array, _PathPieces]:
        count, pieces = carry
        which = jnp.argmax(errors(pieces))
        end, width, (first, middle, last) = jax.tree.map(lambda x: x[which], pieces)
        is_first = which == 0
        # the first piece is divided where it is twice as deep
        beginning = jnp.where(is_first, 2 * end, end - width)
        centre = (beginning + end) / 2
        inner = jnp.where(is_first, beginning, (beginning + centre) / 2)
        left_node, right_node = at(inner, jnp.where(is_first, centre, (centre + end) / 2))
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
        pieces = jax.tree.map(
            lambda x, y, z: x.at[which].set(y).at[count].set(z), pieces, left, right
        )
        return count + 1, pieces

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
