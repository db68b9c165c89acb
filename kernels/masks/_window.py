"""Masks that are a window of distances: all keys, those before a query, and those near to it."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from .._checks import check_integer
from ._abstract import AbstractComparison
from ._interval import FAR, Interval


class All(AbstractComparison):
    """Every query sees every key: the neutral mask of `&`; `~All()` hides everything.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> masks.All().visible(jnp.array([0]), jnp.array([7])).tolist()
        [True]
    """

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """True."""
        return jnp.ones(jnp.broadcast_shapes(query.low.shape, key.low.shape), bool)


class Causal(AbstractComparison):
    r"""A query sees keys at its own position and before: $p_j \le p_i$. `is_causal=True` builds it.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q = jax.random.normal(jax.random.key(0), (1, 5, 2, 4))
        >>> out = ea.attention(q, q, q, mask=ea.masks.Causal())
        >>> bool(jnp.allclose(out, ea.attention(q, q, q, is_causal=True)))
        True
    """

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the first key is not after the last query."""
        return key.low <= query.high


def _side(x: object) -> int | None:
    if isinstance(x, (int, np.integer)) and x < 0:
        raise ValueError(f"left and right: wanted at least 0, or None for any distance, got {x}")
    return None if x is None else check_integer("left and right", x, is_wide=True)


class Window(AbstractComparison):
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

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the interval of the keys meets the windows of the queries."""
        # Differences of positions cannot overflow; the sum of a position and a window might.
        left, right = sides(self)
        return (key.high - query.low >= -left) & (key.low - query.high <= right)


def sides(window: Window) -> tuple[int, int]:
    """Left and right of a window; a side without bound is the largest distance."""
    left, right = (FAR if x is None else min(x, FAR) for x in (window.left, window.right))
    return left, right


# Masks of these classes are fully described by their window.
WINDOWS = (All, Causal, Window)
