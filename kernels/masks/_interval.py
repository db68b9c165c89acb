"""Intervals of positions, which summarise a block of tokens."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

# The last position, and the largest distance of two.
FAR = int(jnp.iinfo(jnp.int32).max)


class Interval(NamedTuple):
    """The smallest and largest position in each block; blocks without any have `low > high`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> early, late = (masks.Interval(jnp.array(a), jnp.array(b)) for a, b in ((0, 3), (4, 7)))
        >>> bool(masks.Causal().any_visible(early, late)), bool(masks.Causal().all_visible(late, early))
        (False, True)
    """

    low: Int[Array, "..."]
    high: Int[Array, "..."]


def interval(positions: Int[Array, "*blocks block"]) -> Interval:
    """The interval of the positions along the last axis, negative ones excluded."""
    present = positions >= 0
    low = jnp.where(present, positions, FAR).min(-1, initial=FAR)
    high = jnp.where(present, positions, -1).max(-1, initial=-1)
    return Interval(low, high)
