"""Scores of products alone: bounded, and scaled by a number for each head."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._abstract import AbstractScore, At, check_parameter


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


class Temperature(AbstractScore):
    r"""An inverse temperature for each head: $g(s) = \beta_h s$.

    Attributes:
        beta: $\beta$, `[N]`, a floating array.

    Raises:
        TypeError: no floating array.
        ValueError: it has not one axis, or (in a call) another length than the number of heads.

    Source: Hopfield networks is all you need (arXiv 2008.02217), $\beta$; a learnt one for each head as
    in Swin Transformer V2 (arXiv 2111.09883).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> cold = ea.FreeEnergy(score=ea.scores.Temperature(jnp.array([1.0, 10.0]))).at(q, k, v)
        >>> bool((cold.entropy()[:, 1] < cold.entropy()[:, 0]).all())
        True
    """

    beta: Float[Array, " N"]

    compares = False

    def __check_init__(self) -> None:
        check_parameter("beta", self.beta, ("N",))

    def __call__(self, score: Float[Array, "..."], at: At) -> Float[Array, "..."]:
        """The scaled scores."""
        return self.beta[at.head] * score

    def per_head(self) -> tuple[Any, ...]:
        """The inverse temperatures."""
        return (self.beta,)
