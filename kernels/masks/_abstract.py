"""The abstract class of a mask, how masks are joined, and the mask by any function of positions."""

import abc
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from .._checks import (
    broadcasts,
    check_array,
    check_boolean,
    check_function,
    check_integer,
    check_nesting,
    received,
)

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


class AbstractMask(eqx.Module):
    r"""A mask: which key positions a query position sees. Masks are joined by `&`, `|` and `~`.

    $$\mathrm{mask}_{ij} = \mathrm{visible}(p_i, p_j)$$

    A mask is a function of positions, not of indices into an array, so that it is the same for a shard, a
    cache or a draft tree. Its arrays (integers or booleans) are leaves of the module, so that a new length
    does not recompile; all else is static and hashable. Tokens of negative position are absent: no mask,
    and no `~`, makes them visible. A mask has no truth value: `and`, `or` and `not` raise `TypeError`.

    The methods take positions that broadcast, and see arrays of one batch entry; where an array has a batch axis, they
    are mapped over it. Subclass this to define your own mask. Vendors' kernels decline it; kernels made of XLA's
    operations compute it, and so do Pallas kernels if it compares numbers of a query with numbers of a key.

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

        A custom mask:

        >>> class Strided(masks.AbstractMask):
        ...     ranks = ()  # it has no arrays
        ...     def visible(self, query, key):
        ...         return (query - key) % 2 == 0
        >>> (masks.Causal() & Strided()).visible(jnp.array([[2]]), jnp.array([[0, 1, 2, 3]])).tolist()
        [[True, False, True, False]]
    """

    by_intervals: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """The number of axes of each array of the mask, without the batch axis."""

    @abc.abstractmethod
    def visible(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether queries see keys, by position; the arguments broadcast."""

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
        """Whether `any_visible` decides which blocks are read, for this mask and all that it joins."""
        return self.by_intervals and all(x._told_by_intervals() for x in _inner(self))

    # Without this, `array & mask` would be evaluated for each element of a NumPy array.
    __array_ufunc__: ClassVar[None] = None

    # otherwise `first and second` would be `second`
    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"bool: wanted masks joined by &, | or ~, as `and`, `or` and `not` ask for a truth value, "
            f"got {received(self)}, which has none"
        )

    def __rand__(self, other: object) -> "And":
        return And(check_mask("&", other), self)

    def __ror__(self, other: object) -> "Or":
        return Or(check_mask("|", other), self)


class AbstractComparison(AbstractMask):
    """A mask that compares positions and scalars: `any_visible` decides by the ends of intervals, exactly."""

    by_intervals = True

    @property
    def ranks(self) -> tuple[int, ...]:
        return (0,) * len(jax.tree.leaves(self))

    def visible(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Compares intervals of one position."""
        return self.any_visible(Interval(query, query), Interval(key, key))

    def all_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Compares opposite ends: if these pairs are visible, all are."""
        return self.any_visible(Interval(query.high, query.low), Interval(key.high, key.low))


def check_mask(name: str, x: object, wanted: str = "a mask of energy_attn.masks") -> AbstractMask:
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
    return [mask, *(x for inner in _inner(mask) for x in parts(inner))]


def _inner(mask: AbstractMask) -> list[AbstractMask]:
    fields = tuple(vars(mask).values())
    leaves = jax.tree.leaves(fields, is_leaf=lambda x: isinstance(x, AbstractMask))
    return [x for x in leaves if isinstance(x, AbstractMask)]


def _of_each(method: str, of: str | None = None) -> Any:
    """A method of joined masks, which joins the results of the method `of` (by default the same) of each."""
    inner = of or method

    @functools.wraps(getattr(AbstractMask, method), updated=())
    def joined(self: "_Joined", query: Array | Interval, key: Array | Interval) -> Array:
        masks = (getattr(self, name) for name in self._masks)
        return self._join(*(getattr(mask, inner)(query, key) for mask in masks))

    return joined


class _Joined(AbstractMask):
    by_intervals = True
    _masks: ClassVar[tuple[str, ...]] = "first", "second"
    _join: ClassVar[Callable[..., Any]]

    def __check_init__(self) -> None:
        for name in self._masks:
            check_mask(name, getattr(self, name))
        check_nesting("masks", self, AbstractMask, "join them in pairs, as (a & b) & (c & d)")

    @property
    def ranks(self) -> tuple[int, ...]:
        return sum((getattr(self, name).ranks for name in self._masks), ())

    visible = _of_each("visible")
    any_visible = _of_each("any_visible")
    all_visible = _of_each("all_visible")


class And(_Joined):
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

    first: AbstractMask
    second: AbstractMask

    _join = staticmethod(operator.and_)


class Or(_Joined):
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

    first: AbstractMask
    second: AbstractMask

    _join = staticmethod(operator.or_)


class Not(_Joined):
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

    _masks = ("mask",)
    _join = staticmethod(operator.invert)

    any_visible = _of_each("any_visible", of="all_visible")
    all_visible = _of_each("all_visible", of="any_visible")


class Function(AbstractMask):
    r"""The mask that a function computes: $\mathrm{visible}_{ij} = f(p_i, p_j, \theta)$.

    Blocks of keys that it hides are not read: the function is evaluated for all pairs, once in a call. Pallas
    kernels compute what depends on one position alone (`ids[query]`) once in a call, too, and the rest in
    tiles; they decline tables by query and key (`table[query, key]`).

    Args:
        function: `function(query_positions, key_positions, *parameters)`, elementwise on int32 arrays
            that broadcast, to booleans that broadcast to them. It is part of the program: the same
            function is the same program, and a new `lambda` a new one.
        *parameters: integers or booleans, or arrays of them. Traced values have to be passed here, as
            values that the function closes over are constants.
        batched: whether all parameters have a first axis of the batch, 1 or `B`, of which the function gets an entry.

    Raises:
        TypeError: no function, one that takes other arguments, or a parameter that is no array of
            integers or booleans: a mask has no derivative.
        ValueError: a function that cannot be hashed.

    Source: flex attention (arXiv 2412.05496), the masks by function.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> strided = masks.Function(lambda query, key, step: (query - key) % step == 0, 3)
        >>> (masks.Causal() & strided).visible(jnp.array([[6]]), jnp.arange(8)[None]).astype(int).tolist()
        [[1, 0, 0, 1, 0, 0, 1, 0]]
    """

    function: Callable[..., Any] = eqx.field(static=True)
    parameters: tuple[Any, ...]
    batched: bool = eqx.field(static=True)

    def __init__(
        self,
        function: Callable[..., Any],
        *parameters: int | Array | np.ndarray | np.generic,
        batched: bool = False,
    ) -> None:
        self.function = function
        self.parameters = tuple(map(_parameter, parameters))
        self.batched = batched
        if batched and not all(x.ndim for x in self.parameters):
            raise ValueError("parameters: wanted a first axis of the batch in each, got a scalar")
        check_function("function", function, "query", "key", *("parameter",) * len(parameters))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(x.ndim - self.batched for x in self.parameters)

    def visible(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """The function's result. Raises if it is not boolean or does not broadcast."""
        result = check_boolean("function's result", self.function(query, key, *self.parameters))
        shape = jnp.broadcast_shapes(query.shape, key.shape)
        if not broadcasts(result.shape, shape):
            raise ValueError(
                f"function: wanted a result with axes of 1 or those of {shape}, got {received(result)}"
            )
        return jnp.broadcast_to(result, shape)


def _parameter(x: object) -> Any:
    if isinstance(x, bool):
        return np.asarray(x)
    if isinstance(x, int):
        return np.asarray(check_integer("parameters", x), np.int32)
    array = x if isinstance(x, np.generic) else check_array("parameters", x)
    if not (jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == jnp.bool_):
        raise TypeError(
            f"parameters: wanted integers or booleans, as a mask has no derivative, got {received(x)}"
        )
    return array
