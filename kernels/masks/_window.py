"""The mask of a sliding window."""

import equinox as eqx
import numpy as np
from jaxtyping import Array, Bool, Int

from .._checks import check_integer
from ._abstract import AbstractMask
from ._interval import FAR, Interval


def _side(x: object) -> int | None:
    if isinstance(x, (int, np.integer)) and x < 0:
        raise ValueError(f"left and right: wanted at least 0, or None for any distance, got {x}")
    return None if x is None else check_integer("left and right", x, is_wide=True)


class Window(AbstractMask):
    r"""A query sees the keys near to it: $p_i - \mathrm{left} \le p_j \le p_i + \mathrm{right}$.

    `local_window_size=(left, right)` builds it.

    Attributes:
        left: how far before a query its keys may lie; None: any distance.
        right: how far after it, likewise.

    Raises:
        TypeError: a side is neither an int nor None.
        ValueError: a negative side.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> masks.Window(1, 0).visible(jnp.array([[5]]), jnp.arange(7)[None]).tolist()
        [[False, False, False, False, True, True, False]]
    """

    left: int | None = eqx.field(static=True, converter=_side)
    right: int | None = eqx.field(static=True, converter=_side)

    by_intervals = True

    @property
    def ranks(self) -> tuple[int, ...]:
        return ()

    def visible(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether the key is within the window."""
        distance = key - query
        return self._within(distance, distance)

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the interval of the keys meets the windows of the queries."""
        return self._within(key.high - query.low, key.low - query.high)

    def all_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the windows of the first and of the last query hold all keys."""
        return self._within(key.low - query.high, key.high - query.low)

    def _within(self, last_distance: Array, first_distance: Array) -> Array:
        # Differences of positions cannot overflow; the sum of a position and a window might.
        left, right = (FAR if x is None else min(x, FAR) for x in (self.left, self.right))
        return (last_distance >= -left) & (first_distance <= right)
