"""The two passes over the tiles of a call: folds over keys for tiles of rows, over queries for leaves of keys."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from ..call._operands import Operands, Settings, bound, positioned
from ..call._state import lse_dtype
from ..masks._abstract import AbstractMask
from ..masks._visibility import meeting, visible
from . import _canonical_tree as tree
from ._canonical_slots import Slots, entry, read, slots
from ._each import each

# The format: whoever changes one of these, or a program of `_canonical_tiles`, counts the version up.
VERSION = 1
LEAF = 256  # keys of a leaf
ROWS = 32  # rows of a tile, of a fold over keys
QUERIES = 64  # queries of a tile of one head, of a fold over queries


class Side(NamedTuple):
    """Queries or keys in tiles.

    Attributes:
        positions: `[#B, tiles, size]`, negative where there is none.
        segments: likewise, or None.
    """

    positions: Int[Array, "b tiles size"]
    segments: Int[Array, "b tiles size"] | None

    def at(self, batch: Array, tile: Array, some: int | None = None) -> tuple[Array, Array | None]:
        """Those of a tile, or of the first of it."""
        segments = None if self.segments is None else entry(self.segments, batch)[tile][:some]
        return entry(self.positions, batch)[tile][:some], segments


class Call:
    """The operands of a call beside the slots of its keys."""

    def __init__(self, operands: Operands, settings: Settings):
        operands = positioned(operands)
        assert operands.query_positions is not None and operands.key_positions is not None
        self.operands, self.scale = operands, settings.scale
        self.dtype = lse_dtype(operands.query.dtype)
        self.batch, self.queries, heads = operands.query.shape[:3]
        self.key_heads = operands.key.shape[2]
        self.group = heads // self.key_heads
        self.mask: AbstractMask = bound(settings, operands)
        self.held = slots(operands.key_positions, LEAF)
        self.leaves = self.held.token.shape[1]
        self.keys = Side(self.held.positions, _in_slots(operands.key_segments, self.held))

    def seen(
        self, batch: Array, rows: tuple[Array, Any], keys: tuple[Array, Any]
    ) -> Bool[Array, "rows keys"]:
        """Which rows of a tile see which of some keys, from the positions and segments of both."""
        mask = jax.tree.map(lambda x: entry(x, batch)[None], self.mask)
        found = visible(mask, rows[0][:, None], keys[0][None])
        return found if rows[1] is None else found & (rows[1][:, None] == keys[1][None])

    def met(self, rows: Side) -> Bool[Array, "b tiles leaves"]:
        """Which tiles may see a key of which leaves."""
        segments = None
        if rows.segments is not None and self.keys.segments is not None:
            segments = rows.segments, self.keys.segments
        found = meeting(self.mask, (rows.positions, self.keys.positions), segments)
        assert found is not None
        return found

    def empty(self, *shape: int) -> Array:
        """Zeros in the dtype of the scores."""
        return lax.full_like(self.operands.query, 0.0, shape=shape, dtype=self.dtype)

    def read(self, arrays: Sequence[Array], held: Slots, batch: Array, tile: Array) -> list[Array]:
        """A tile `[K, size, W]` of arrays `[B, S, K, W]`, in the dtype of the scores."""
        return read(arrays, held, batch, tile, self.dtype)


def over_keys(
    call: Call,
    rows: Any,
    keys: Sequence[Array],
    identity: Any,
    term: Callable[..., Any],
    join: tree.Join,
    finish: Callable[[Any, Any], Any],
) -> Any:
    """`finish(rows, fold of term(rows, seen, *keys) over the leaves)` for each tile of rows.

    `rows` are arrays `[B, T, N, W]` or `[B, T, N]`, of which a tile is `[K, ROWS, W]`; `keys` are arrays
    `[B, S, K, W]`, of which a leaf is `[K, LEAF, W]`. Rows of all query heads of a key head fill tiles together,
    wherever they are: a row's sums do not depend on its place. Of fewer rows than a tile has, `seen` has no more.
    """
    count = -(-call.queries * call.group // ROWS)
    some = min(ROWS, call.queries * call.group)
    rows = jax.tree.map(lambda x: _in_tiles(x, call), rows)
    of_rows = (
        _rows_of(x, call) for x in (call.operands.query_positions, call.operands.query_segments)
    )
    side = Side(*of_rows)  # pyright: ignore[reportArgumentType]
    following = _following(call.met(side))
    first_number, levels = call.held.numbers()

    def one_tile(n: Array) -> Any:
        batch, tile = _digits(n, count)
        row = jax.tree.map(lambda x: x[batch, tile].astype(call.dtype), rows)
        at, live = side.at(batch, tile, some), entry(following, batch)[tile]
        number = entry(first_number, batch)

        def one_leaf(carry: tuple[Array, tree.Fold]) -> tuple[Array, tree.Fold]:
            leaf, fold = carry
            seen = call.seen(batch, at, call.keys.at(batch, leaf))
            item = term(row, seen, *call.read(keys, call.held, batch, leaf))
            return live[leaf + 1], tree.insert(fold, number + leaf, item, join)

        begin = live[0], tree.start(identity, levels, number + live[0])
        _, fold = lax.while_loop(lambda carry: carry[0] < call.leaves, one_leaf, begin)
        return finish(row, tree.result(fold, join))

    found = each(one_tile, call.batch * count, call.operands.query)
    return jax.tree.map(lambda x: _from_tiles(x, call), found)


def over_queries(
    call: Call,
    rows: Any,
    keys: Sequence[Array],
    identity: Any,
    term: Callable[..., Any],
    join: tree.Join,
    finish: Callable[[Any], Any],
) -> Any:
    """`finish(fold of term(rows, seen, *keys) over tiles of queries and heads)` for each leaf of keys.

    Arguments as in `over_keys`. A query's place in its tile is that of its position.
    """
    operands, group = call.operands, call.group
    assert operands.query_positions is not None
    held = slots(operands.query_positions, QUERIES)
    tiles = held.token.shape[1]
    flat, form = jax.tree.flatten(rows)
    by_member = [_by_member(x if x.ndim == 4 else x[..., None], call) for x in flat]
    side = Side(held.positions, _in_slots(operands.query_segments, held))
    following = _following(call.met(side).swapaxes(1, 2))
    first_number, levels = held.numbers(group)

    def one_leaf(n: Array) -> Any:
        batch, leaf = _digits(n, call.leaves)
        parts = call.read(keys, call.held, batch, leaf)
        at, live = call.keys.at(batch, leaf), entry(following, batch)[leaf]
        number = entry(first_number, batch)

        def one_tile(carry: tuple[Array, Array, tree.Fold]) -> tuple[Array, Array, tree.Fold]:
            tile, member, fold = carry
            seen = call.seen(batch, side.at(batch, tile), at)
            row = call.read(by_member, held, batch * group + member, tile)
            row = [x if y.ndim == 4 else x[..., 0] for x, y in zip(row, flat, strict=True)]
            item = term(jax.tree.unflatten(form, row), seen, *parts)
            fold = tree.insert(fold, number + tile * group + member, item, join)
            is_last = member == group - 1
            tile = jnp.where(is_last, live[tile + 1], tile)
            return tile, jnp.where(is_last, 0, member + 1), fold

        first = tree.start(identity, levels, number + live[0] * group)
        begin = live[0], jnp.zeros_like(live[0]), first
        _, _, fold = lax.while_loop(lambda carry: carry[0] < tiles, one_tile, begin)
        return finish(tree.result(fold, join))

    found = each(one_leaf, call.batch * call.leaves, operands.query)
    sound = held.sound[:, None, None, None]
    return jax.tree.map(lambda x: jnp.where(sound, _to_keys(x, call), jnp.nan), found)


def _digits(n: Array, size: int) -> tuple[Array, Array]:
    """The indices of the `n`-th entry along two axes, the last of this size."""
    return lax.div(n, jnp.int32(size)), lax.rem(n, jnp.int32(size))


def _following(met: Bool[Array, "b x y"]) -> Int[Array, "b x z"]:
    """The first `y` from each on that is met, their number if there is none; one entry more."""
    count = met.shape[-1]
    numbers = jnp.where(met, jnp.arange(count, dtype=jnp.int32)[None, None], count)
    numbers = jnp.pad(numbers, ((0, 0), (0, 0), (0, 1)), constant_values=count)
    return lax.cummin(numbers, axis=2, reverse=True)


def _in_slots(ids: Array | None, held: Slots) -> Array | None:
    """Segment ids `[#B, L]` in slots; those of empty slots are of some token."""
    if ids is None:
        return None
    shape = (max(len(ids), len(held.token)), *held.token.shape[1:])
    token = jnp.broadcast_to(jnp.maximum(held.token, 0), shape).reshape(shape[0], -1)
    ids = jnp.broadcast_to(ids, (shape[0], ids.shape[1]))
    return jnp.take_along_axis(ids, token, 1).reshape(shape)


def _rows_of(x: Array | None, call: Call) -> Array | None:
    """Positions or segments `[#B, T]` of rows in tiles, as `_in_tiles` of `[B, T, N]` does it."""
    if x is None:
        return None
    x = jnp.repeat(x, call.group, axis=1)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % ROWS)), constant_values=-1)
    return x.reshape(len(x), -1, ROWS)


def _in_tiles(x: Array, call: Call) -> Array:
    """`[B, T, N, ...]` as `[B, tiles, K, ROWS, ...]`."""
    rest = x.shape[3:]
    x = x.reshape(call.batch, call.queries, call.key_heads, call.group, *rest)
    x = jnp.moveaxis(x, 2, 3).reshape(call.batch, -1, call.key_heads, *rest)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % ROWS), *[(0, 0)] * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(call.batch, -1, ROWS, call.key_heads, *rest), 2, 3)


def _from_tiles(x: Array, call: Call) -> Array:
    """`[B * tiles, K, ROWS, ...]` as `[B, T, N, ...]`; NaN where two keys share a slot."""
    rest = x.shape[3:]
    x = jnp.moveaxis(x, 1, 2).reshape(call.batch, -1, call.key_heads, *rest)
    x = x[:, : call.queries * call.group]
    x = x.reshape(call.batch, call.queries, call.group, call.key_heads, *rest)
    x = jnp.moveaxis(x, 2, 3).reshape(call.batch, call.queries, -1, *rest)
    return jnp.where(call.held.sound.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.nan)


def _by_member(x: Array, call: Call) -> Array:
    """`[B, T, N, W]` as `[B * G, T, K, W]`."""
    x = x.reshape(call.batch, call.queries, call.key_heads, call.group, x.shape[-1])
    return jnp.moveaxis(x, 3, 1).reshape(-1, call.queries, call.key_heads, x.shape[-1])


def _to_keys(x: Array, call: Call) -> Array:
    """`[B * leaves, K, LEAF, W]` as `[B, S, K, W]`; zero for absent keys, NaN where two share a slot."""
    place, sound = call.held.place, call.held.sound
    x = x.swapaxes(1, 2).reshape(call.batch, -1, call.key_heads, x.shape[-1])
    place = jnp.broadcast_to(place, (call.batch, place.shape[1]))
    there = (place < x.shape[1])[..., None, None]
    x = jnp.take_along_axis(x, jnp.minimum(place, x.shape[1] - 1)[..., None, None], 1)
    return jnp.where(sound[:, None, None, None], jnp.where(there, x, 0.0), jnp.nan)
