"""The abstract class of a score, scores by any function, and scores one after the other."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._checks import check_array, check_function, check_integer, check_nesting, received


class ScoreIndices(NamedTuple):
    """Indices and positions of scores: int32 arrays that broadcast with them.

    Attributes:
        batch: the entry of the batch.
        head: the head of the query.
        query: the position of the query. Negative where it is absent.
        key: the position of the key. Negative where it is absent.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import scores
        >>> at = scores.ScoreIndices(*map(jnp.asarray, (0, 0, [[1], [2]], [[0, 1, 2]])))
        >>> scores.Distance(lambda d: -abs(d))(jnp.zeros((2, 3)), at).tolist()
        [[-1.0, 0.0, -1.0], [-2.0, -1.0, 0.0]]
    """

    batch: Int[Array, "..."]
    head: Int[Array, "..."]
    query: Int[Array, "..."]
    key: Int[Array, "..."]


class AbstractScore(eqx.Module):
    r"""A score: a function $g$ of the scaled product of a query and a key, and of where they are.

    $$s_a = g(\mathrm{scale}\; q \cdot k_a;\ i, a, h, \theta) + b_a + \zeta \cdot v_a$$

    The source is added outside of $g$, so that $F$ remains the generating function of the values. Masks are
    applied afterwards; $g$ and its derivatives must be finite for hidden pairs, too.

    The floating arrays of the module are its parameters $\theta$, which are differentiated, in both
    modes and to any order; `__call__` gets them in the dtype of the scores. Python numbers among its
    fields are parameters that are not learnt. All else is static, and so hashable.

    Define your own score as a subclass with a `__call__`, or as a [`Function`][energy_attn.kernels.scores.Function].
    Kernels that cannot compute it decline; those made of XLA's operations compute any.

    Attributes:
        uses_positions: whether it reads the positions `at.query` and `at.key`, which are None otherwise.

    Source: flex attention (arXiv 2412.05496), the score modification.

    Examples:
        >>> import equinox as eqx
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> class Decay(ea.scores.AbstractScore):
        ...     rate: jax.Array  # of each head
        ...     def __call__(self, score, at):
        ...         return score - self.rate[at.head] * jnp.abs(at.query - at.key)
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> energy = ea.FreeEnergy(score=Decay(jnp.ones(2)))
        >>> eqx.filter_grad(lambda energy: energy(q, k, v).sum())(energy).score.rate.shape
        (2,)
    """

    uses_positions: ClassVar[bool] = True

    @abc.abstractmethod
    def __call__(self, score: Float[Array, "..."], at: ScoreIndices) -> Float[Array, "..."]:
        """The scores from the scaled products: elementwise, of the same shape and dtype."""

    def per_head(self) -> tuple[Any, ...]:
        """The arrays whose first axis is the head axis; its length is checked."""
        return ()


class Function(AbstractScore):
    r"""The score that a function computes: $g(s) = f(s; i, a, h, \theta)$.

    Args:
        function: `function(score, at, *parameters)`, elementwise, to an array of the shape and dtype of `score`. It is
            part of the program: the same function is the same program, and a new `lambda` a new one.
        *parameters: numbers and arrays; floating arrays are learnt. Traced values have to be passed here,
            as values that the function closes over are constants.

    Raises:
        TypeError: no function, one that takes other arguments, or a parameter that is neither a number nor an array.
        ValueError: a function that cannot be hashed.

    Source: flex attention (arXiv 2412.05496), the score modification.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> def cosine(score, at, period):
        ...     return score + jnp.cos((at.query - at.key) / period[at.head])
        >>> score = ea.scores.Function(cosine, jnp.array([2.0, 5.0]))
        >>> ea.attention(q, k, v, score=score).shape
        (5, 2, 4)
    """

    function: Callable[..., Any] = eqx.field(static=True)
    parameters: tuple[Any, ...]

    def __init__(
        self, function: Callable[..., Any], *parameters: float | Array | np.ndarray | np.generic
    ) -> None:
        self.function = function
        self.parameters = tuple(map(_parameter, parameters))
        check_function("function", function, "score", "at", *("parameter",) * len(parameters))

    def __call__(self, score: Float[Array, "..."], at: ScoreIndices) -> Float[Array, "..."]:
        return self.function(score, at, *self.parameters)


def _parameter(x: object) -> Any:
    if isinstance(x, (bool, float)):
        return x
    if isinstance(x, int):
        return check_integer("parameters", x)
    if isinstance(x, np.generic):
        return np.asarray(x)
    array = check_array("parameters", x)
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == jnp.bool_):
        raise TypeError(f"parameters: wanted numbers or arrays of them, got {received(x)}")
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"parameters: wanted real numbers, got {received(x)}")
    return jnp.asarray(array)


class Compose(AbstractScore):
    r"""Scores one after the other, the first on the product: $g = g_n \circ \dots \circ g_1$.

    Args:
        *scores: the scores, in the order in which they are applied.

    Raises:
        TypeError: an argument that is no score.
        ValueError: more than 100 inside each other.

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> score = ea.scores.Compose(ea.scores.ALiBi(num_heads=2), ea.scores.SoftCap(30.0))
        >>> ea.attention(q, k, v, score=score).shape
        (5, 2, 4)
    """

    scores: tuple[AbstractScore, ...]

    def __init__(self, *scores: AbstractScore) -> None:
        for x in scores:
            if not isinstance(x, AbstractScore):
                raise TypeError(f"scores: wanted scores of energy_attn.scores, got {received(x)}")
        self.scores = scores
        check_nesting("scores", self, AbstractScore, "Compose(a, b, c, ...) takes any number")

    @property
    def uses_positions(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # read of instances
        """Whether any of them reads positions."""
        return any(x.uses_positions for x in self.scores)

    def __call__(self, score: Float[Array, "..."], at: ScoreIndices) -> Float[Array, "..."]:
        for g in self.scores:
            score = g(score, at)
        return score

    def per_head(self) -> tuple[Any, ...]:
        return sum((x.per_head() for x in self.scores), ())
