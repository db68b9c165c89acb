"""The abstract class of a mask, and how masks are joined."""

import abc
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from .._checks import check_nesting, received
from ._interval import Interval


class AbstractMask(eqx.Module):
    r"""A mask: which key positions a query position sees. Masks are joined by `&`, `|` and `~`.

    $$\mathrm{mask}_{ij} = \mathrm{visible}(p_i, p_j)$$

    A mask is a function of positions, not of indices into an array, so that it is the same for a shard, a
    cache or a draft tree. Its arrays (integers or booleans) are leaves of the module, so that a new length
    does not recompile; all else is static and hashable. Tokens of negative position are absent: no mask,
    and no `~`, makes them visible. A mask has no truth value: `and`, `or` and `not` raise `TypeError`.

    The methods take positions that broadcast, and see arrays of one batch entry; where an array has a batch
    axis, they are mapped over it. Subclass this to define your own mask. Vendors' kernels decline it; kernels
    made of XLA's operations compute it, and so do Pallas kernels if it compares numbers of a query with
    numbers of a key.

    Attributes:
        by_intervals: whether `any_visible` decides which blocks of keys are read. Otherwise `visible` is
            evaluated for a table of blocks, once in a call. False by default.

    Source: the `Mask` of tokamax, and flex attention (arXiv 2412.05496) for its masks by function.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> mask = masks.Causal() & ~masks.Prefix(1)
        >>> mask.visible(jnp.array([[2]]), jnp.array([[0, 1, 2, 3]])).tolist()
        [[False, True, True, False]]
    """

    by_intervals: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """The number of axes of each array of the mask, without that of the batch."""

    @abc.abstractmethod
    def visible(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Which queries see which keys, by position; the arguments broadcast."""

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether any query of one interval sees any key of another; the intervals broadcast.

        Never false where a pair is visible; may be true where none is, and is by default.
        """
        return jnp.ones(jnp.broadcast_shapes(query.low.shape, key.low.shape), bool)

    def all_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether every query of one interval sees every key of another; the intervals broadcast.

        Never true where a pair is hidden; may be false where none is, and is by default.
        """
        return jnp.zeros(jnp.broadcast_shapes(query.low.shape, key.low.shape), bool)

    def __and__(self, other: "AbstractMask") -> "And":
        return And(self, check_mask("&", other))

    def __or__(self, other: "AbstractMask") -> "Or":
        return Or(self, check_mask("|", other))

    def __invert__(self) -> "Not":
        return Not(self)

    def _told_by_intervals(self) -> bool:
        """Whether intervals of positions determine which blocks are read, for all masks that it joins, too."""
        return self.by_intervals and all(x._told_by_intervals() for x in _inner(self))

    # Without this, `array & mask` would be evaluated for each element of a NumPy array.
    __array_ufunc__: ClassVar[None] = None

    # otherwise `first and second` would be `second`
    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"bool: wanted masks joined by &, | or ~, as `and`, `or` and `not` ask for a truth value, "
            f"got {received(self)}, which has none"
        )

    def __rand__(self, other: Any) -> "And":
        return And(check_mask("&", other), self)

    def __ror__(self, other: Any) -> "Or":
        return Or(check_mask("|", other), self)


class AbstractComparison(AbstractMask):
    """A mask that compares positions, so that `any_visible` decides by the ends of intervals alone, and exactly."""

    by_intervals = True

    @property
    def ranks(self) -> tuple[int, ...]:
        return ()

    def visible(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Compares intervals of one position."""
        return self.any_visible(Interval(query, query), Interval(key, key))

    def all_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Compares opposite ends: if these pairs are visible, all are."""
        return self.any_visible(Interval(query.high, query.low), Interval(key.high, key.low))


def check_mask(name: str, x: Any, wanted: str = "a mask of energy_attn.masks") -> AbstractMask:
    """Returns `x` if it is a mask; raises `TypeError` otherwise, and says how to make one of it."""
    if isinstance(x, AbstractMask):
        return x
    hint = ""
    if isinstance(x, type) and issubclass(x, AbstractMask):
        hint = f"; {x.__name__}(...) makes one"
    elif isinstance(x, (jax.Array, np.ndarray)):
        hint = "; FreeEnergy(mask=...).attention(..., mask=array) takes both"
    elif callable(x):
        hint = "; masks.Function(function, *parameters) makes one of a function"
    raise TypeError(f"{name}: wanted {wanted}, got {received(x)}{hint}")


def parts(mask: AbstractMask) -> list[AbstractMask]:
    """A mask, and all masks that it joins."""
    return [mask, *(x for inner in _inner(mask) for x in parts(inner))]


def _inner(mask: AbstractMask) -> list[AbstractMask]:
    fields = tuple(vars(mask).values())
    leaves = jax.tree.leaves(fields, is_leaf=lambda x: isinstance(x, AbstractMask))
    return [x for x in leaves if isinstance(x, AbstractMask)]


def _check_nesting(mask: AbstractMask) -> None:
    check_nesting("masks", mask, AbstractMask, "join them in pairs, as (a & b) & (c & d)")


class _Pair(AbstractMask):
    """Two masks that are joined."""

    first: AbstractMask
    second: AbstractMask

    by_intervals = True
    _join: ClassVar[Callable[[Array, Array], Array]]

    def __check_init__(self) -> None:
        check_mask("first", self.first)
        check_mask("second", self.second)
        _check_nesting(self)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.first.ranks + self.second.ranks

    def visible(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        return self._join(self.first.visible(query, key), self.second.visible(query, key))

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        return self._join(self.first.any_visible(query, key), self.second.any_visible(query, key))

    def all_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        return self._join(self.first.all_visible(query, key), self.second.all_visible(query, key))


class And(_Pair):
    """`first & second`: shows the keys that both masks show.

    Raises:
        TypeError: either is no mask.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> near = masks.Causal() & masks.Window(1, None)
        >>> near.visible(jnp.array([[2]]), jnp.arange(4)[None]).tolist()
        [[False, True, True, False]]
    """

    _join = staticmethod(operator.and_)


class Or(_Pair):
    """`first | second`: shows the keys that either mask shows.

    Raises:
        TypeError: either is no mask.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> prefix = masks.Causal() | masks.Prefix(2)
        >>> prefix.visible(jnp.array([[0]]), jnp.arange(4)[None]).tolist()
        [[True, True, False, False]]
    """

    _join = staticmethod(operator.or_)


class Not(AbstractMask):
    """`~mask`: shows the keys that the mask hides.

    Raises:
        TypeError: `mask` is no mask.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> later = ~masks.Causal()
        >>> later.visible(jnp.array([[1]]), jnp.arange(4)[None]).tolist()
        [[False, False, True, True]]
    """

    mask: AbstractMask

    by_intervals = True

    def __check_init__(self) -> None:
        check_mask("mask", self.mask)
        _check_nesting(self)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.mask.ranks

    def visible(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Hidden by the mask."""
        return ~self.mask.visible(query, key)

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the mask need not show all pairs."""
        return ~self.mask.all_visible(query, key)

    def all_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the mask shows no pair."""
        return ~self.mask.any_visible(query, key)
