"""Scores that fall with distance, at a slope for each head."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._checks import check_integer, received
from ._abstract import AbstractScore, At
from ._parameters import check_parameter


class ALiBi(AbstractScore):
    r"""Attention with linear biases: $g(s) = s - m_h |i - a|$.

    Args:
        slopes: $m$, `[N]`, a floating array; None: those of the paper for `num_heads`.
        num_heads: $N$, if no slopes are given.

    Raises:
        TypeError: slopes that are no floating array, or neither slopes nor a number of heads.
        ValueError: slopes of other than one axis or (in a call) of another length than the number of
            heads, or both arguments.

    Source: Train Short, Test Long (arXiv 2108.12409), section 3: a geometric sequence from
    $2^{-8/N}$, and for an $N$ that is no power of two every other slope of the next power.

    Examples:
        >>> import energy_attn as ea
        >>> ea.scores.ALiBi(num_heads=4).slopes.tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """

    slopes: Float[Array, " N"]

    def __init__(
        self, slopes: Float[Array, " N"] | None = None, *, num_heads: int | None = None
    ) -> None:
        if (slopes is None) == (num_heads is None):
            raise (TypeError if slopes is None else ValueError)(
                f"slopes: wanted either them or num_heads, got {received(slopes)} and {num_heads}"
            )
        if num_heads is not None:
            slopes = jnp.asarray(_paper_slopes(check_integer("num_heads", num_heads, least=1)))
        self.slopes = check_parameter("slopes", slopes, ("N",))

    def __call__(self, score: Float[Array, "..."], at: At) -> Float[Array, "..."]:
        """The scores, less the distance times the slope."""
        distance = jnp.abs(at.query - at.key).astype(score.dtype)
        return score - self.slopes[at.head] * distance

    def per_head(self) -> tuple[Any, ...]:
        """The slopes."""
        return (self.slopes,)


def _paper_slopes(heads: int) -> np.ndarray:
    power = 2 ** int(math.log2(heads))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4 * np.arange(1, 2 * (heads - power), 2) / power)
    return np.concatenate([slopes, between]).astype(np.float32)
