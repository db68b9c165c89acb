"""Masks that compare positions with numbers: windows of distances, lengths and prefixes."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from .._checks import as_ids, as_int32, check_int32, check_integer, received
from ._abstract import FAR, AbstractComparison, Interval


def unless_none(check: Callable[[str, object], Any], name: str) -> Callable[[object], Any]:
    def convert(x: object) -> Any:  # Equinox takes the parameter's type from here
        return None if x is None else check(name, x)

    return convert


def ids(name: str, x: object) -> Any:
    return as_ids(of_rank(name, x, 1))


def integers(name: str, x: object, rank: int) -> Any:
    """Returns an array of integers of `rank` axes, or one more for the batch, as int32."""
    return as_int32(of_rank(name, x, rank))


def lengths(name: str, x: object) -> Any:
    """A scalar array of numbers from 0 on, or one with a batch axis; an int becomes an array, and is not static."""
    array: Any
    if isinstance(x, int):
        array = np.asarray(integers(name, np.asarray(check_integer(name, x)), 0))
    else:
        array = integers(name, x, 0)
    if not isinstance(array, jax.core.Tracer) and array.size:
        if (least := int(np.asarray(array).min())) < 0:
            raise ValueError(f"{name}: wanted at least 0, got {least}")
    return array


def of_rank(name: str, x: object, rank: int) -> Any:
    array = check_int32(name, x)
    if array.ndim < rank:
        axes = ", ".join(("*B", *("L",) * rank))
        raise ValueError(f"{name}: wanted shape ({axes}), got {received(x)}")
    return array


class All(AbstractComparison):
    """Every query sees every key: the neutral mask of `&`; `~All()` hides everything.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> masks.All().visible(jnp.array([0]), jnp.array([7])).tolist()
        [True]
    """


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
    if isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(
            f"left and right: wanted ints, got {received(x)}; TracedWindow(left, right) takes arrays"
        )
    if isinstance(x, (int, np.integer)) and x < 0:
        raise ValueError(f"left and right: wanted at least 0, or None for any distance, got {x}")
    return None if x is None else check_integer("left and right", x, is_wide=True)


class Window(AbstractComparison):
    r"""A query sees the keys near to it: $p_i - \mathrm{left} \le p_j \le p_i + \mathrm{right}$.

    `local_window_size=(left, right)` builds it.

    Attributes:
        left: how far before a query its keys may lie; None: any distance. Both are part of the program; `TracedWindow`
            takes arrays.
        right: how far after it its keys may lie; None: any distance.

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
        # min p_i - left <= max p_j and min p_j <= max p_i + right. Differences of positions cannot overflow; the sum of
        # a position and a window might.
        left, right = sides(self)
        return (key.high - query.low >= -left) & (key.low - query.high <= right)


def sides(window: Window) -> tuple[int, int]:
    left, right = (FAR if x is None else min(x, FAR) for x in (window.left, window.right))
    return left, right


class TracedWindow(AbstractComparison):
    r"""A window whose sides are arrays: layers with different windows are one program, or one `jax.lax.scan`.

    $$p_i - \mathrm{left} \le p_j \le p_i + \mathrm{right}$$

    `local_window_size=array` builds it. Blocks of keys outside are skipped when the program runs. The sides have no
    derivative. They bound nothing that is static: over a mesh all keys are sent, unless a static window is joined, as
    `Window(4096, 0) & TracedWindow(left, 0)` or by `max_window=`; keys outside of either are hidden. Kernels of vendors
    decline it.

    Attributes:
        left: how far before a query its keys may lie: an int or an integer array, a scalar for all rows or `[B]`;
            None: any distance.
        right: how far after it, as `left`.

    Raises:
        TypeError: a side of another type.
        ValueError: a negative side, unless it is traced: a query then sees only keys farther away on the other side.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q = jax.random.normal(jax.random.key(0), (1, 9, 2, 4))
        >>> def layer(x, window):
        ...     return ea.attention(x, x, x, mask=ea.masks.TracedWindow(window, 0)), None
        >>> out, _ = jax.lax.scan(layer, q, jnp.array([3, 9, 3]))  # three layers
        >>> bool(jnp.allclose(layer(q, jnp.array(3))[0], ea.attention(q, q, q, local_window_size=(3, 0))))
        True
    """

    left: Int[Array | np.ndarray, "*B"] | None = eqx.field(converter=unless_none(lengths, "left"))
    right: Int[Array | np.ndarray, "*C"] | None = eqx.field(converter=unless_none(lengths, "right"))

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the interval of the keys meets the windows of the queries."""
        # as in `Window`, without the sum of a position and a side
        seen = jnp.ones(jnp.broadcast_shapes(query.low.shape, key.low.shape), bool)
        if self.left is not None:
            seen &= key.high - query.low >= -self.left
        if self.right is not None:
            seen &= key.low - query.high <= self.right
        return seen


# Masks of these classes are fully described by their window.
WINDOWS = (All, Causal, Window)


class Lengths(AbstractComparison):
    r"""Hides tokens at positions from a length on; others take part: $p_j < n$, and $p_i < m$ if $m$ is given.

    `key_value_seq_lengths=` and `query_seq_lengths=` say the same of indices.

    Attributes:
        keys: $n$, an int or an integer array: a scalar for all rows, or `[B]`.
        queries: $m$, as `keys`, by keyword only; None: all queries take part.

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
        default=None, converter=unless_none(lengths, "queries"), kw_only=True
    )

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

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the first key is below the length."""
        return key.low < self.length
