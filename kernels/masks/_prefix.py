"""The mask of a prefix."""

import functools

import equinox as eqx
import numpy as np
from jaxtyping import Array, Bool, Int

from ._abstract import AbstractMask
from ._interval import Interval
from ._parameters import lengths


class Prefix(AbstractMask):
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

    by_intervals = True

    @property
    def ranks(self) -> tuple[int, ...]:
        return (0,)

    def visible(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether the key is below the length."""
        return key < self.length

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the first key is."""
        return key.low < self.length

    def all_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the last key is."""
        return key.high < self.length
