"""The mask that hides nothing."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ._abstract import AbstractMask
from ._interval import Interval


class All(AbstractMask):
    """Every query sees every key: the neutral mask of `&`; `~All()` hides everything.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> masks.All().visible(jnp.array([0]), jnp.array([7])).tolist()
        [True]
    """

    by_intervals = True

    @property
    def ranks(self) -> tuple[int, ...]:
        return ()

    def visible(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """True."""
        return jnp.ones(jnp.broadcast_shapes(query.shape, key.shape), bool)

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """True."""
        return self.visible(query.low, key.low)

    def all_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """True."""
        return self.visible(query.low, key.low)
