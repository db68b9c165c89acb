"""The causal mask."""

from jaxtyping import Array, Bool, Int

from ._abstract import AbstractMask
from ._interval import Interval


class Causal(AbstractMask):
    r"""A query sees keys at its own position and before: $p_j \le p_i$. `is_causal=True` builds it.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q = jax.random.normal(jax.random.key(0), (1, 5, 2, 4))
        >>> out = ea.attention(q, q, q, mask=ea.masks.Causal())
        >>> bool(jnp.allclose(out, ea.attention(q, q, q, is_causal=True)))
        True
    """

    by_intervals = True

    @property
    def ranks(self) -> tuple[int, ...]:
        return ()

    def visible(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether the key is not after the query."""
        return key <= query

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the first key is not after the last query."""
        return key.low <= query.high

    def all_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the last key is not after the first query."""
        return key.high <= query.low
