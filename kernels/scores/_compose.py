"""Scores, one after the other."""

from typing import Any

from jaxtyping import Array, Float

from .._checks import check_nesting, received
from ._abstract import AbstractScore, At


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
    def compares(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # read of instances
        """Whether any of them reads positions."""
        return any(x.compares for x in self.scores)

    def __call__(self, score: Float[Array, "..."], at: At) -> Float[Array, "..."]:
        """The scores of the last."""
        for g in self.scores:
            score = g(score, at)
        return score

    def per_head(self) -> tuple[Any, ...]:
        """Those of all."""
        return sum((x.per_head() for x in self.scores), ())
