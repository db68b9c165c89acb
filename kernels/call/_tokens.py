"""The tokens of a call, and its mask from `mask=`, `is_causal=` and `local_window_size=`."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from .._checks import (
    as_ids,
    as_int32,
    broadcasts,
    check_int32,
    check_integral,
    check_shape,
    received,
)
from ..masks._abstract import AbstractMask, And, check_mask
from ..masks._ready import All, Causal, Lengths, Window
from ..masks._segments import Segments, looked_up
from ..masks._structure import WINDOWS, MaskStructure, structure_of, window_mask, window_structure
from ..masks._visibility import visible
from ._batch import BatchAxes, check_batched, flattened

LEAF = 256  # keys of a leaf: a constant of the format


class Tokens(NamedTuple):
    """Positions, segments and lengths of queries and keys, each with a batch axis of `B` or 1.

    Lengths are given only where positions are None and count from 0.

    Attributes:
        query_positions: None, or int32 `[B, T]`; given together with the keys'. Where the mask compares positions
            and None is given, they count from 0. Negative where a query is absent.
        key_positions: None, or int32 `[B, S]`, as for queries.
        query_segments: None, or int32 `[B, T]`; given together with the keys'. Of 64 bits if they are traced and
            may need them, for kernels made of XLA's operations alone.
        key_segments: None, or `[B, S]`, as for queries.
        query_lengths: None, or int32 `[B]`: queries from this index on are absent. A kernel gets positions in their
            place, unless `Lengths` is one of its `masks`.
        key_lengths: None, or int32 `[B]`, as for queries.
    """

    query_positions: Array | None = None
    key_positions: Array | None = None
    query_segments: Array | None = None
    key_segments: Array | None = None
    query_lengths: Array | None = None
    key_lengths: Array | None = None

    @property
    def has_lengths(self) -> bool:
        """Whether lengths say which queries or keys are there."""
        return self.query_lengths is not None or self.key_lengths is not None

    def with_positions(self, query_len: int, key_len: int) -> "Tokens":
        """Tokens with positions of both sides in place of lengths; counted from 0 where none are given."""
        queries = _before(self.query_positions, self.query_lengths, query_len)
        keys = _before(self.key_positions, self.key_lengths, key_len)
        return Tokens(queries, keys, self.query_segments, self.key_segments)

    def with_lengths(
        self, queries: Array | np.ndarray | None, keys: Array | np.ndarray | None
    ) -> "Tokens":
        """Tokens that are absent at positions from a length `[B or 1]` on; None: all are present."""
        if self.query_positions is None or self.key_positions is None:
            return self._replace(
                query_lengths=_shorter(self.query_lengths, queries),
                key_lengths=_shorter(self.key_lengths, keys),
            )
        return self._replace(
            query_positions=shortened(self.query_positions, queries),
            key_positions=shortened(self.key_positions, keys),
        )

    def map_queries(self, f: Callable[[Array], Any]) -> "Tokens":
        """Applies `f` to the positions and segments of queries, where given."""
        return self._mapped(f, "query_positions", "query_segments")

    def map_keys(self, f: Callable[[Array], Any]) -> "Tokens":
        """Applies `f` to the positions and segments of keys, where given."""
        return self._mapped(f, "key_positions", "key_segments")

    def _mapped(self, f: Callable[[Array], Any], *names: str) -> "Tokens":
        fields = ((name, getattr(self, name)) for name in names)
        return self._replace(**{name: f(x) for name, x in fields if x is not None})


NO_TOKENS = Tokens()


def check_tokens(
    options: Mapping[str, Any], axes: BatchAxes, query_len: int, key_len: int
) -> Tokens:
    """The tokens of a call with these batch axes, with one batch axis; raises for arrays that do not fit."""
    if (options.get("query_segment_ids") is None) != (options.get("key_segment_ids") is None):
        side = "query" if options.get("query_segment_ids") is None else "key"
        raise ValueError(
            f"{side}_segment_ids: wanted an integer array, as the other side has one, got None"
        )

    def numbers(name: str, size: int, narrow: Callable[[Any], Any]) -> Array | None:
        x = options.get(name)
        if x is None:
            return None
        check_int32(name, x)
        if x.shape == (1, size):  # for all rows
            return jnp.asarray(narrow(x))
        if x.shape[-1:] != (size,) or not broadcasts(x.shape[:-1], axes):
            raise ValueError(f"{name}: wanted shape {(*axes, size)}, got {received(x)}")
        return jnp.asarray(flattened(narrow(x), axes))

    def lengths(name: str, size: int) -> Array | None:
        x = options.get(name)
        if x is None:
            return None
        check_integral(name, x)
        if len(axes) > 1:
            check_batched(name, x, axes, ())
        elif axes or x.ndim:  # as in jax.nn, one length is not for all rows
            check_shape(name, x, axes or (1,))
        x = flattened(x, axes) if axes or x.ndim == 0 else x
        if not isinstance(x, jax.core.Tracer):
            values = np.asarray(x)
            if values.size and not 0 <= values.min() <= values.max() <= size:
                raise ValueError(f"{name}: wanted lengths from 0 to {size}, got {values.tolist()}")
        return jnp.asarray(as_int32(x))

    return Tokens(
        numbers("query_positions", query_len, as_int32),
        numbers("key_positions", key_len, as_int32),
        numbers("query_segment_ids", query_len, as_ids),
        numbers("key_segment_ids", key_len, as_ids),
        lengths("query_seq_lengths", query_len),
        lengths("key_value_seq_lengths", key_len),
    )


def shortened(positions: Array, lengths: Array | np.ndarray | None) -> Array:
    """Positions `[B or 1, L]`, absent from a length `[B or 1]` on."""
    return positions if lengths is None else jnp.where(positions < lengths[:, None], positions, -1)


def _shorter(x: Array | None, y: Array | np.ndarray | None) -> Any:
    if x is None or y is None:
        return y if x is None else x
    return jnp.minimum(x, y)


def _before(positions: Array | None, lengths: Array | None, size: int) -> Array:
    """Positions, absent at indices from a length on; counted from 0 where none are given."""
    places = jnp.arange(size, dtype=jnp.int32)[None]
    positions = places if positions is None else positions
    return positions if lengths is None else jnp.where(places < lengths[:, None], positions, -1)


def leaves_for(tokens: int, size: int = LEAF) -> int:
    """Number of successive leaves that `tokens` may span: one more than they fill, as they may begin inside a leaf."""
    return -(-tokens // size) + 1


def check_leaves(positions: Int[Array, "b keys"] | None) -> None:
    """Raises `ValueError` for concrete positions that repeat, or that span too many leaves."""
    if positions is None or isinstance(positions, jax.core.Tracer):
        return
    for row in np.asarray(positions):
        present, count = np.unique(row[row >= 0], return_counts=True)
        if not present.size:
            continue
        if count.max() > 1:
            raise ValueError(
                "key_positions: wanted one key of each position with reproducible=True, got "
                f"{count.max()} of {present[count.argmax()]}; documents have segment ids and positions that go on"
            )
        leaves, most = present[-1] // LEAF - present[0] // LEAF + 1, leaves_for(len(row))
        if leaves > most:
            raise ValueError(
                f"key_positions: wanted at most {most} times {LEAF} positions for {len(row)} keys with "
                f"reproducible=True, got {leaves}; append keys of position -1 up to {(leaves - 2) * LEAF + 1}"
            )


class Masks(NamedTuple):
    """The mask of an energy and the array of a call; a key is seen if both show it."""

    mask: AbstractMask
    array: Any


def join_masks(energy_mask: AbstractMask | None, mask: object) -> Any:
    """Joins the mask of an energy, or None, with the `mask=` of a call; `split_mask` takes the result."""
    call_mask, array = split_mask(mask)
    if energy_mask is None:
        return mask
    both = energy_mask if call_mask is None else energy_mask & call_mask
    return both if array is None else Masks(both, array)


def split_mask(mask: object) -> tuple[AbstractMask | None, Any]:
    """`mask=` as a mask or None, and as anything else or None."""
    if isinstance(mask, Masks):
        return mask
    if mask is None or isinstance(mask, (jax.Array, np.ndarray)):
        return None, mask
    return check_mask("mask", mask, "a mask of energy_attn.masks or a boolean array"), None


class PositionRules(NamedTuple):
    """The mask of a call as kernels take it; its segments and lengths become the tokens'."""

    structure: MaskStructure
    arrays: tuple[Array, ...] = ()
    segments: Segments | None = None
    lengths: tuple[Lengths, ...] = ()

    @property
    def reads(self) -> bool:
        return self.structure.constrains or self.segments is not None or self.lengths != ()

    def marked(self, tokens: Tokens, query_len: int, key_len: int) -> Tokens:
        for x in self.lengths:
            tokens = tokens.with_lengths(x.queries, x.keys)
        if self.segments is None:
            return tokens
        return _with_segments(self.segments, tokens, query_len, key_len)


NO_RULES = PositionRules(window_structure())


def position_rules(
    mask: AbstractMask | None,
    is_causal: bool,
    window: tuple[int | None, int | None] | None,
    axes: BatchAxes,
    tokens: Tokens,
) -> PositionRules:
    """Returns the conjunction of a mask, causality and a window, in the form that most kernels take.

    Of the masks that `&` joins, `Causal` and `Window` become one; `Lengths` and the first `Segments` are returned for
    the tokens, unless `tokens` already have segments.
    """
    left, right = window or (None, None)
    right = 0 if is_causal else right
    if mask is None:
        return PositionRules(window_structure(left, right))
    segments, lengths = None, ()
    rest: list[AbstractMask] = []
    for x in _joined(_with_batch(mask, axes)):
        if isinstance(x, Causal):
            right = 0
        elif isinstance(x, Window):
            left, right = least(left, x.left), least(right, x.right)
        elif isinstance(x, Lengths):
            lengths = (*lengths, x)
        elif isinstance(x, Segments) and segments is None and tokens.query_segments is None:
            segments = x
        elif not isinstance(x, All):
            rest.append(x)
    window_rule = window_mask(left, right)
    mask = rest.pop(0) if rest and isinstance(window_rule, All) else window_rule
    for x in rest:
        mask = mask & x
    arrays, structure = tuple(jax.tree.leaves(mask)), structure_of(mask)
    if not isinstance(mask, WINDOWS):
        _check_traceable(structure, tuple((x.shape, x.dtype) for x in arrays))
    return PositionRules(structure, arrays, segments, lengths)


def _with_batch(mask: AbstractMask, axes: BatchAxes) -> AbstractMask:
    leaves, tree = jax.tree.flatten_with_path(mask)
    arrays = []
    for (path, x), rank in zip(leaves, mask.ranks, strict=True):
        name = f"mask{jax.tree_util.keystr(path)}"
        if not (
            isinstance(x, (jax.Array, np.ndarray))
            and (x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.integer))
        ):
            raise TypeError(f"{name}: wanted an array of integers or booleans, got {received(x)}")
        if x.ndim == rank:
            x = x[None]
        elif broadcasts(x.shape[: x.ndim - rank], axes or (1,)):
            x = flattened(x, axes or (1,))
        else:
            lead = "" if x.ndim == rank + max(len(axes), 1) else f"{rank} axes, or "
            first = "a first axis" if len(axes) < 2 else "first axes"
            sizes = ", ".join(map(str, axes or (1,)))
            raise ValueError(
                f"{name}: wanted {lead}{first} of the batch, {sizes}, got {received(x)}"
            )
        arrays.append(jnp.asarray(x))
    return jax.tree.unflatten(tree, arrays)


def _joined(mask: AbstractMask) -> list[AbstractMask]:
    if isinstance(mask, And):
        return _joined(mask.first) + _joined(mask.second)
    return [mask]


def least(a: int | None, b: int | None) -> int | None:
    """The smaller of two distances; None is any distance."""
    return min((x for x in (a, b) if x is not None), default=None)


def _with_segments(mask: Segments, tokens: Tokens, query_len: int, key_len: int) -> Tokens:
    of_queries: Any = mask.query_ids
    of_keys: Any = of_queries if mask.key_ids is None else mask.key_ids
    known = isinstance(query_len, int) and isinstance(key_len, int)  # not symbols
    named = ("query_ids", of_queries, query_len), ("key_ids", of_keys, key_len)
    short = [x for x in named if known and x[1].shape[1] < x[2]]
    counted = tokens.query_positions is None and tokens.key_positions is None
    if counted and known and not (tokens.has_lengths and short):
        for name, ids, size in short:
            raise ValueError(
                f"mask.{name}: wanted an id for each position from 0 to {size - 1}, "
                f"got {received(ids)}"
            )
        return tokens._replace(
            query_segments=of_queries[:, :query_len], key_segments=of_keys[:, :key_len]
        )
    tokens = tokens.with_positions(query_len, key_len)

    def ids_at(ids: Array, positions: Any) -> tuple[Array, Array]:
        (batch,) = jnp.broadcast_shapes(ids.shape[:1], positions.shape[:1])
        segments, inside = jax.vmap(looked_up)(
            *(jnp.broadcast_to(x, (batch, x.shape[1])) for x in (ids, positions))
        )
        return segments, jnp.where(inside, positions, -1)

    query_segments, query_positions = ids_at(of_queries, tokens.query_positions)
    key_segments, key_positions = ids_at(of_keys, tokens.key_positions)
    return Tokens(query_positions, key_positions, query_segments, key_segments)


@functools.lru_cache(maxsize=256)
def _check_traceable(structure: MaskStructure, arrays: tuple[Any, ...]) -> None:
    def run(query: Array, key: Array, *arrays: Array) -> Array:
        return visible(structure.bind(arrays), query, key)

    shapes = ((1, 3, 1), jnp.int32), ((1, 1, 2), jnp.int32), *arrays
    closed = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(*x) for x in shapes)).consts
    if any(isinstance(x, jax.core.Tracer) for x in closed):
        raise ValueError(
            "function: wanted arrays that are traced as parameters, "
            f"masks.Function(function, *arrays), got a function that closes over {received(closed[0])}"
        )
