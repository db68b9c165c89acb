"""Scores: bounded, scaled by a number for each head, and with biases by distance."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._checks import (
    check_flag,
    check_floating,
    check_function,
    check_integer,
    check_positive,
    check_shape,
    received,
)
from ._abstract import AbstractScore, ScoreIndices

# From the position of the key less that of the query, int32, to an index of the table.
Buckets = Callable[[Array], Array]


def _check_floats(name: str, x: object, *shape: str) -> Any:
    check_shape(name, check_floating(name, x), shape)
    return x


class SoftCap(AbstractScore):
    r"""Scores within a bound: $g(s) = c \tanh(s / c)$.

    Attributes:
        cap: $c$, the bound, above zero; a number, which is part of the program, or a floating scalar that is learnt,
            of which another value is not compiled anew.

    Raises:
        TypeError: a cap that is neither.
        ValueError: an array with axes, or a number that is not above zero or not finite.

    Source: Gemma 2 (arXiv 2408.00118), section 2, logit soft-capping; there $c = 50$.

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> ea.attention(q, k, v, score=ea.scores.SoftCap(50.0)).shape
        (5, 2, 4)
    """

    cap: float | Float[Array, ""]

    uses_positions = False

    def __check_init__(self) -> None:
        check_positive("cap", self.cap)

    def __call__(self, score: Float[Array, "..."], at: ScoreIndices) -> Float[Array, "..."]:
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

    uses_positions = False

    def __check_init__(self) -> None:
        _check_floats("beta", self.beta, "N")

    def __call__(self, score: Float[Array, "..."], at: ScoreIndices) -> Float[Array, "..."]:
        return self.beta[at.head] * score

    def per_head(self) -> tuple[Any, ...]:
        return (self.beta,)


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
        static = not isinstance(self.function, eqx.Module)
        check_function("function", self.function, "distance", static=static)

    def __call__(self, score: Float[Array, "..."], at: ScoreIndices) -> Float[Array, "..."]:
        return score + self.function((at.query - at.key).astype(score.dtype))


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
        self.slopes = _check_floats("slopes", slopes, "N")

    def __call__(self, score: Float[Array, "..."], at: ScoreIndices) -> Float[Array, "..."]:
        distance = jnp.abs(at.query - at.key).astype(score.dtype)
        return score - self.slopes[at.head] * distance

    def per_head(self) -> tuple[Any, ...]:
        return (self.slopes,)


def _paper_slopes(heads: int) -> np.ndarray:
    power = 2 ** int(math.log2(heads))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4 * np.arange(1, 2 * (heads - power), 2) / power)
    return np.concatenate([slopes, between]).astype(np.float32)


class RelativeBias(AbstractScore):
    r"""A learnt bias for each head and distance: $g(s) = s + \theta_{h,\, \mathrm{bucket}(a - i)}$.

    Attributes:
        table: $\theta$, `[N, D]`, a floating array.
        buckets: a function from the position of the key less that of the query, int32, to an index
            from 0 to $D - 1$, such as [`t5_buckets`][energy_attn.kernels.scores.RelativeBias.t5_buckets]; None: an
            entry for each distance from $-R$ to $R$, with $D = 2R + 1$; larger distances are clipped.

    Raises:
        TypeError: a table that is no floating array, or buckets that are no function of one argument.
        ValueError: a table of other than two axes or of an even length without buckets, or (in a call)
            of another number of heads; a function that cannot be hashed.

    Source: Self-Attention with Relative Position Representations (arXiv 1803.02155), clipped distances;
    T5 (arXiv 1910.10683), a scalar for each head and bucket.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> bias = ea.scores.RelativeBias(jnp.zeros((2, 32)), ea.scores.RelativeBias.t5_buckets())
        >>> ea.attention(q, k, v, score=bias).shape
        (5, 2, 4)
    """

    table: Float[Array, "N D"]
    buckets: Buckets | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        _check_floats("table", self.table, "N", "D")
        if self.buckets is not None:
            check_function("buckets", self.buckets, "distance")
        elif self.table.shape[1] % 2 == 0:
            raise ValueError(
                f"table: wanted an odd number of distances, from -R to R, got {received(self.table)}"
            )

    def __call__(self, score: Float[Array, "..."], at: ScoreIndices) -> Float[Array, "..."]:
        distance = at.key - at.query
        if self.buckets is None:
            farthest = self.table.shape[1] // 2
            index = jnp.clip(distance, -farthest, farthest) + farthest
        else:
            index = self.buckets(distance)
        return score + self.table[at.head, index]

    def per_head(self) -> tuple[Any, ...]:
        return (self.table,)

    @staticmethod
    def t5_buckets(
        num_buckets: int = 32, max_distance: int = 128, *, bidirectional: bool = True
    ) -> Buckets:
        r"""The `buckets` of T5: one for each short distance, then logarithmically wider ones.

        With $b$ buckets for a direction, distances $n < b / 2$ have one each, and larger ones have

        $$\mathrm{bucket}(n) = \frac b2 + \left\lfloor \frac b2\,
          \frac{\log (2n / b)}{\log (2 n_{max} / b)} \right\rfloor, \qquad \text{at most } b - 1.$$

        Args:
            num_buckets: the number of buckets of both directions.
            max_distance: all distances from this one on share the last bucket.
            bidirectional: whether keys after the query have half of the buckets; otherwise they have the bucket of
                distance 0.

        Returns:
            A function from distances, int32, to indices of buckets, int32.

        Raises:
            TypeError: numbers that are not integers, or a flag that is not boolean.
            ValueError: fewer than 2 buckets for a direction, or a `max_distance` of at most half of them.

        Source: T5 (arXiv 1910.10683), section 2.1, and its published implementation.

        Examples:
            >>> import jax.numpy as jnp
            >>> from energy_attn import scores
            >>> scores.RelativeBias.t5_buckets()(jnp.array([-200, -20, -3, 0, 3, 20, 200])).tolist()
            [15, 10, 3, 0, 19, 26, 31]
        """
        check_flag("bidirectional", bidirectional)
        least = 4 if bidirectional else 2
        num_buckets = check_integer("num_buckets", num_buckets, least=least)
        half = num_buckets // least
        max_distance = check_integer("max_distance", max_distance, least=half + 1)
        return _T5Buckets(num_buckets, max_distance, bidirectional)


@dataclasses.dataclass(frozen=True)
class _T5Buckets:
    num_buckets: int
    max_distance: int
    bidirectional: bool

    def __call__(self, apart: Int[Array, "..."]) -> Int[Array, "..."]:
        number = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        # `jnp.where` of two numbers would have 64 bits if JAX has them enabled, which TPUs lack
        first = number * (apart > 0).astype(apart.dtype) if self.bidirectional else 0
        distance = jnp.abs(apart) if self.bidirectional else jnp.maximum(-apart, 0)
        exact = number // 2
        index = jnp.minimum(distance, exact)
        for least in self._starts(exact, number):
            index = index + (distance >= least).astype(index.dtype)
        return first + index

    def _starts(self, exact: int, number: int) -> list[int]:
        # The least distances of later buckets, as float32 rounds their logarithms.
        distances = np.arange(exact, self.max_distance + 1, dtype=np.float32)
        fraction = np.log(distances / np.float32(exact)) / np.log(self.max_distance / exact)
        buckets = exact + (fraction.astype(np.float32) * (number - exact)).astype(np.int64)
        return [int(exact + np.argmax(buckets >= x)) for x in range(exact + 1, number)]
