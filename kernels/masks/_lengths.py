"""The mask of ragged rows."""

import functools
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Array, Bool, Int

from ._abstract import AbstractMask
from ._interval import Interval
from ._parameters import lengths


def _queries(x: object) -> Any:
    return None if x is None else lengths("queries", x)


class Lengths(AbstractMask):
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

    by_intervals = True

    @property
    def ranks(self) -> tuple[int, ...]:
        return (0,) if self.queries is None else (0, 0)

    def visible(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether both are below their lengths."""
        return self._below(query, key)

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the first of both are."""
        return self._below(query.low, key.low)

    def all_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the last of both are."""
        return self._below(query.high, key.high)

    def _below(self, query: Array, key: Array) -> Array:
        below = key < self.keys
        return below if self.queries is None else below & (query < self.queries)
