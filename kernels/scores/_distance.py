"""Scores by a function of the distance."""

from collections.abc import Callable

import equinox as eqx
from jaxtyping import Array, Float

from .._checks import check_function, check_hashable
from ._abstract import AbstractScore, At


class Distance(AbstractScore):
    r"""A bias by distance: $g(s) = s + f(i - a)$.

    Attributes:
        function: $f$, elementwise on arrays of the dtype of the scores that hold whole numbers,
            positive where the key comes before the query; a function, or a module with parameters.

    Raises:
        TypeError: no function of one argument.
        ValueError: a function that cannot be hashed.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> score = ea.scores.Distance(lambda distance: -jnp.log1p(jnp.abs(distance)))
        >>> ea.attention(q, k, v, score=score).shape
        (5, 2, 4)
    """

    function: Callable[[Array], Array]

    def __check_init__(self) -> None:
        check_function("function", self.function, "distance")
        if not isinstance(self.function, eqx.Module):
            check_hashable("function", self.function)

    def __call__(self, score: Float[Array, "..."], at: At) -> Float[Array, "..."]:
        """The scores, and the function of the distance."""
        return score + self.function((at.query - at.key).astype(score.dtype))
