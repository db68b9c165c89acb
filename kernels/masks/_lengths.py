"""Masks of lengths: ragged rows, and prefixes."""

import functools
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Array, Bool, Int

from ._abstract import AbstractComparison
from ._interval import Interval
from ._parameters import lengths


def _queries(x: object) -> Any:
    return None if x is None else lengths("queries", x)


class Lengths(AbstractComparison):
    r"""Only tokens at positions below a length take part: $p_j < n$, and $p_i < m$ if $m$ is given.

    `key_value_seq_lengths=` and `query_seq_lengths=` say the same of indices.

    Attributes:
        keys: $n$, an int or an integer array: a scalar for all rows, or `[B]`.
        queries: $m$, likewise, by keyword only; None: all queries take part.

    Raises:
        TypeError: a length of another type.
        ValueError: a negative one, or an array of another rank.

    Examples:
        >>> import jax.numpy as jnp
        >>> import energy_attn as ea
        >>> x = jnp.ones((2, 4, 1, 2))
        >>> energy = ea.free_energy(x, x, x, scale=0.0, mask=ea.masks.Lengths(jnp.array([1, 4])))
        >>> jnp.exp(energy[:, 0, 0]).round().tolist()  # the number of keys
        [1.0, 4.0]
    """

    keys: Int[Array | np.ndarray, "*B"] = eqx.field(converter=functools.partial(lengths, "keys"))
    queries: Int[Array | np.ndarray, "*C"] | None = eqx.field(
        default=None, converter=_queries, kw_only=True
    )

    @property
    def ranks(self) -> tuple[int, ...]:
        return (0,) if self.queries is None else (0, 0)

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the first of both are below their lengths."""
        below = key.low < self.keys
        return below if self.queries is None else below & (query.low < self.queries)


class Prefix(AbstractComparison):
    r"""Every query sees the keys at positions below a length: $p_j < n$.

    `Causal() | Prefix(n)` is the mask of a prefix-LM, whose first `n` tokens see each other.

    Attributes:
        length: $n$, an int or an integer array: a scalar for all rows, or `[B]`.

    Raises:
        TypeError: a length of another type.
        ValueError: a negative one, or an array of another rank.

    Source: Exploring the Limits of Transfer Learning (arXiv 1910.10683), figure 4.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> mask, tokens = masks.Causal() | masks.Prefix(2), jnp.arange(3)
        >>> mask.visible(tokens[:, None], tokens[None]).astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """

    length: Int[Array | np.ndarray, "*B"] = eqx.field(
        converter=functools.partial(lengths, "length")
    )

    @property
    def ranks(self) -> tuple[int, ...]:
        return (0,)

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the first key is below the length."""
        return key.low < self.length
