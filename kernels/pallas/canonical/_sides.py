"""The operands of a call in tiles, and which of them each tile is folded with."""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from ...call._operands import KernelCall
from ...masks._visibility import visible
from ...xla._canonical_call import CanonicalCall
from ...xla._canonical_call import Side as Positions
from ...xla._canonical_slots import AbstractSlots, Scattered
from .._rows import block_spans, features_of, pairs_of
from ._scores import Pairs
from ._tiles import Ids, Side, Walk

_LEAST = 16  # of a width, which is a power of two


class Sizes(NamedTuple):
    """The constants of a platform's format, powers of two.

    Attributes:
        rows: of a tile, of all heads of a key head.
        queries: of a tile of one head, over which gradients of keys are folded.
    """

    rows: int
    queries: int


class Sides:
    """The queries and keys of a call in tiles of a platform's sizes."""

    def __init__(self, call: KernelCall, sizes: Sizes, subtree: int):
        """`subtree`: how many leaves of keys are one, where keys lie in such; 0 for keys in any order."""
        self.subtree = subtree
        self._settings = settings = call.settings
        self.of = of = CanonicalCall(call.operands, settings, subtree > 0, sizes.rows)
        operands = of.operands
        self.size = sizes.queries  # of a tile of one head
        self._pairs = pairs_of(operands, settings)
        features = features_of(operands, self._pairs)
        tokens = operands.tokens
        self._has_segments = tokens.query_segments is not None
        segments = (tokens.query_segments, tokens.key_segments)
        self._ids = tuple(
            (*(x for x in (segment,) if x is not None), *numbers)
            for segment, numbers in zip(segments, features, strict=True)
        )

    def pairs(self, queries: Ids, keys: Ids) -> Pairs:
        """Of queries and keys, by the ids of both, which broadcast."""
        return Pairs(self._seen(queries, keys), queries[0], keys[0])

    def _seen(self, queries: Ids, keys: Ids) -> Bool[Array, "..."]:
        (query, *of_query), (key, *of_key) = queries, keys
        first = int(self._has_segments)
        if self._pairs is None:
            see = visible(self._settings.mask.bind(), query, key)
        else:
            see = self._pairs.visible(query, key, of_query[first:], of_key[first:])
        return see & (of_query[0] == of_key[0]) if self._has_segments else see

    def rows(self, arrays: dict[str, Array]) -> Side:
        """Rows of all heads of a key head, `[B, T, N, ...]`, in tiles together."""
        ids = (
            rows_of(x, self.of) for x in (self.of.operands.tokens.query_positions, *self._ids[0])
        )
        found = {name: in_tiles(x, self.of).swapaxes(2, 3) for name, x in arrays.items()}
        return self._side(found, ids)

    def keys(self, arrays: dict[str, Array]) -> Side:
        """Keys `[B, S, K, W]` by leaves."""
        held = self.of.held
        found = {name: held.spread(x) for name, x in arrays.items()}
        return self._side(found, (held.positions, *map(held.laid, self._ids[1])))

    def queries(self, arrays: dict[str, Array]) -> tuple[AbstractSlots, Side]:
        """Queries `[B, T, N, ...]` of one head by their positions, and their slots."""
        of = self.of
        group, held = of.group, of.queries_by_position(self.size)

        def by_member(x: Array) -> Array:
            x = held.spread(x.reshape(*x.shape[:2], of.key_heads, group, *x.shape[3:]))
            x = jnp.moveaxis(x, 4, 2)  # [B, tiles, G, size, K, ...]
            return lax.collapse(x, 1, 3)

        found = {name: by_member(x) for name, x in arrays.items()}
        ids = (held.positions, *map(held.laid, self._ids[0]))
        return held, self._side(found, (jnp.repeat(x, group, 1) for x in ids))

    def over_keys(self, rows: Side) -> Walk:
        """The leaves that rows may see."""
        numbers, held = self.of.held.numbers, self.of.held
        is_one = held.tiles <= self.subtree  # of which leaves without keys have numbers, too
        if is_one:
            numbers = jnp.arange(held.tiles, dtype=jnp.int32)[None]
        consecutive = is_one or self.of.counted or isinstance(held, Scattered)
        return self._walk(self._met(rows), numbers, 1, consecutive)

    def over_queries(self, held: AbstractSlots) -> Walk:
        """The tiles of queries, by position and head, that may see a leaf."""
        group = self.of.group
        segments = self.of.operands.tokens.query_segments
        laid = None if segments is None else held.laid(segments)
        met = self.of.met(Positions(held.positions, laid)).swapaxes(1, 2)
        numbers = held.numbers[:, :, None] * group + jnp.arange(group, dtype=jnp.int32)[None, None]
        return self._walk(met, lax.collapse(numbers, 1, 3), group, True)

    def of_rows(self, x: Array) -> Array:
        """Results of rows `[B, tiles, 1, rows, K, ...]` as `[B, T, N, ...]`; NaN where two keys are one slot's."""
        return self.of.held.checked(self._from_tiles(x.squeeze(2)))

    def of_parts(self, x: Array) -> Array:
        """Results of parts of rows, `[B, tiles, parts, rows, K, ...]`, as `[parts, B, T, N, ...]`."""
        return jax.vmap(self._from_tiles, 2)(x)

    def of_keys(self, x: Array, queries: AbstractSlots) -> Array:
        """Results of keys `[B, leaves, 1, leaf, K, W]` as `[B, S, K, W]`, likewise."""
        found = lax.collapse(x.squeeze(2), 1, 3)
        held = self.of.held
        return queries.checked(held.checked(held.unlaid(found)))

    def _from_tiles(self, x: Array) -> Array:
        return from_tiles(lax.collapse(x, 0, 2).swapaxes(1, 2), self.of)

    def _met(self, rows: Side) -> Array:
        segments = rows.ids[1] if self._has_segments else None
        return self.of.met(Positions(rows.ids[0], segments))

    def _walk(self, met: Array, numbers: Array, group: int, consecutive: bool) -> Walk:
        first, stop = (group * x[..., None] for x in block_spans(met))
        batch = self.of.batch
        numbers, first, stop = (
            jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in (numbers, first, stop)
        )
        # a leaf without keys, which may be in the middle, is of the same place as that before it
        numbers = numbers if consecutive else lax.cummax(numbers, axis=1)
        return Walk(numbers, first, stop, numbers.shape[1], consecutive)

    def _side(self, arrays: dict[str, Array], ids: Iterable[Array | None]) -> Side:
        batch = self.of.batch
        every = tuple(jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in ids if x is not None)
        return Side({name: widened(x) for name, x in arrays.items()}, every)


def widened(x: Array) -> Array:
    """Matrices `[..., W]` of five axes with zeros behind `W`, to a power of two."""
    missing = width_of(x.shape[-1]) - x.shape[-1] if x.ndim == 5 else 0
    return jnp.pad(x, ((0, 0),) * 4 + ((0, missing),)) if missing else x


def width_of(width: int) -> int:
    """The width that a tile has for one of an array."""
    return max(_LEAST, 1 << (width - 1).bit_length())


def given(**arrays: Array | None) -> dict[str, Array]:
    """Those that are not None, by name."""
    return {name: x for name, x in arrays.items() if x is not None}


def rows_of(x: Array | None, call: CanonicalCall) -> Array | None:
    """Positions or segments `[#B, T]` of rows in tiles, as `in_tiles` of `[B, T, N]` does it."""
    if x is None:
        return None
    x = jnp.repeat(x, call.group, axis=1)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % call.rows)), constant_values=-1)
    return x.reshape(len(x), -1, call.rows)


def in_tiles(x: Array, call: CanonicalCall) -> Array:
    """`[B, T, N, ...]` as `[B, tiles, K, rows, ...]`."""
    rest = x.shape[3:]
    x = x.reshape(call.batch, call.queries, call.key_heads, call.group, *rest)
    x = jnp.moveaxis(x, 2, 3).reshape(call.batch, -1, call.key_heads, *rest)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % call.rows), *[(0, 0)] * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(call.batch, -1, call.rows, call.key_heads, *rest), 2, 3)


def from_tiles(x: Array, call: CanonicalCall) -> Array:
    """`[B * tiles, K, rows, ...]` as `[B, T, N, ...]`."""
    rest = x.shape[3:]
    x = jnp.moveaxis(x, 1, 2).reshape(call.batch, -1, call.key_heads, *rest)
    x = x[:, : call.queries * call.group]
    x = x.reshape(call.batch, call.queries, call.group, call.key_heads, *rest)
    return jnp.moveaxis(x, 2, 3).reshape(call.batch, call.queries, -1, *rest)
