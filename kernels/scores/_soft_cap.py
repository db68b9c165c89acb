"""Scores that stay within a bound."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._abstract import AbstractScore, At
from ._parameters import check_parameter


class SoftCap(AbstractScore):
    r"""Scores within a bound: $g(s) = c \tanh(s / c)$.

    Attributes:
        cap: $c$, the bound, above zero; a number, or a floating scalar that is learnt.

    Raises:
        TypeError: a cap that is neither.
        ValueError: an array with axes, or a number that is not above zero.

    Source: Gemma 2 (arXiv 2408.00118), section 2, logit soft-capping; there $c = 50$.

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> ea.attention(q, k, v, score=ea.scores.SoftCap(50.0)).shape
        (5, 2, 4)
    """

    cap: float | Float[Array, ""]

    compares = False

    def __check_init__(self) -> None:
        check_parameter("cap", self.cap, (), above_zero=True)

    def __call__(self, score: Float[Array, "..."], at: At) -> Float[Array, "..."]:
        """The capped scores."""
        return self.cap * jnp.tanh(score / self.cap)
