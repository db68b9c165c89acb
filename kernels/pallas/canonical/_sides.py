"""The operands of a call in tiles for kernels of Pallas, and which of them each tile is folded with."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from ...call._operands import KernelCall
from ...fold._call import AbstractSchedule
from ...fold._programs import Blocks
from ...fold._slots import Scattered
from ...masks._visibility import visible
from .._rows import block_spans, features_of, pairs_of

LEVELS = 32  # of a tree, at most
_LEAST = 16  # of a width, which is a power of two
TokenNumbers = tuple[Array, ...]  # positions, and what else masks compare


class Side(NamedTuple):
    """Queries or keys in tiles.

    Attributes:
        arrays: by name, `[B, tiles, size, K, W]`, or numbers `[B, tiles, size, K]`.
        ids: int32 `[B, tiles, size]` each: positions, negative where there is nothing, and what else masks compare;
            none where all is there and all pairs are visible.
    """

    arrays: Blocks
    ids: TokenNumbers

    @property
    def sizes(self) -> tuple[int, ...]:
        """The entries of the batch, the tiles of each, and the key heads."""
        batch, tiles, _, heads = next(iter(self.arrays.values())).shape[:4]
        return batch, tiles, heads


class Pairs(NamedTuple):
    """Visibility and positions of the (own, other) pairs of two tiles; positions broadcast."""

    seen: Bool[Array, "own other"]
    query: Int[Array, "..."]
    key: Int[Array, "..."]


# of the ids of own and other tiles, which broadcast; None: partials, which are all there
OfPairs = Callable[[TokenNumbers, TokenNumbers], Pairs | None]


class Walk(NamedTuple):
    """Which tiles of the other side are folded for each own one.

    Attributes:
        numbers: of the other side's tiles in the tree, `[B, others]`, which increase.
        first: the first tile of each part of the fold, `[B, tiles, parts]`.
        stop: one past its last, likewise.
        most: no part has more tiles.
        consecutive: whether numbers are, so that they can be cut into subtrees.
    """

    numbers: Int[Array, "b others"]
    first: Int[Array, "b tiles parts"]
    stop: Int[Array, "b tiles parts"]
    most: int
    consecutive: bool

    @property
    def depth(self) -> int:
        """How many nodes of a part may wait: one a level of the tree below it, or each where numbers have gaps."""
        return (self.most - 1).bit_length() + 1 if self.consecutive else min(self.most, LEVELS)

    def in_parts(self, wanted: int) -> tuple["Walk", Array]:
        """The same, of about so many parts, each of one subtree, and the numbers of these, `[B, parts]`."""
        count = self.numbers.shape[1]
        size = subtree_for(count, wanted)
        # the first subtree may be cut by the first tile
        parts = -(-(count + size - 1) // size)
        first = self.numbers[:, :1]
        numbers = first // size + jnp.arange(parts, dtype=jnp.int32)[None]
        return self._cut((numbers * size - first)[:, None], size), numbers

    def in_runs(self, size: int) -> "Walk":
        """The same, of as many parts as there are runs of so many tiles."""
        parts = -(-self.numbers.shape[1] // size)
        return self._cut(size * jnp.arange(parts, dtype=jnp.int32)[None, None], size)

    def _cut(self, begin: Int[Array, "#b 1 parts"], size: int) -> "Walk":
        first, stop = (jnp.clip(x, begin, begin + size) for x in (self.first, self.stop))
        # a part is within one subtree of so many tiles
        return self._replace(first=first, stop=stop, most=size, consecutive=True)

    def of_parts(
        self, found: list[Array], numbers: Array, consecutive: bool
    ) -> tuple[Side, "Walk"]:
        """The partials of parts, `[B, tiles, parts, ...]`, as the other side, and what each own tile is folded with."""
        batch, tiles, parts = self.first.shape
        arrays = {str(i): lax.collapse(x, 1, 3) for i, x in enumerate(found)}
        first = parts * jnp.arange(tiles, dtype=jnp.int32)[None, :, None]
        first = jnp.broadcast_to(first, (batch, tiles, 1))
        numbers = jnp.tile(numbers, (1, tiles))
        return Side(arrays, ()), Walk(numbers, first, first + parts, parts, consecutive)


def subtree_for(count: int, wanted: int) -> int:
    """The tiles of the smallest subtrees of which so many have no more than are wanted."""
    return 1 << (max(-(-count // wanted), 1) - 1).bit_length()


class TileSizes(NamedTuple):
    """The constants of a platform's format, powers of two.

    Attributes:
        rows: of a tile, of all heads of a key head.
        queries: of a tile of one head, over which gradients of keys are folded.
    """

    rows: int
    queries: int


class AbstractTiledCall(AbstractSchedule):
    """A call whose queries and keys are laid out in tiles of a platform's sizes.

    Attributes:
        rows: of a tile.
        subtree: how many leaves of keys are one, where keys lie in such; 0 for keys in any order.
    """

    def __init__(self, call: KernelCall, sizes: TileSizes, subtree: int):
        super().__init__(call, subtree > 0)
        self.subtree, (self.rows, self.query_tile) = subtree, sizes
        operands = self.operands
        self._pairs = pairs_of(operands, self.settings)
        features = features_of(operands, self._pairs)
        self._has_segments = operands.query_segments is not None
        segments = (operands.query_segments, operands.key_segments)
        self._ids = tuple(
            (*(x for x in (segment,) if x is not None), *numbers)
            for segment, numbers in zip(segments, features, strict=True)
        )

    def width_of(self, width: int) -> int:
        return max(_LEAST, 1 << (width - 1).bit_length())

    def pairs(self, queries: TokenNumbers, keys: TokenNumbers) -> Pairs:
        """Of queries and keys, by the ids of both, which broadcast."""
        return Pairs(self._seen(queries, keys), queries[0], keys[0])

    def _seen(self, queries: TokenNumbers, keys: TokenNumbers) -> Bool[Array, "..."]:
        (query, *of_query), (key, *of_key) = queries, keys
        first = int(self._has_segments)
        if self._pairs is None:
            see = visible(self.settings.mask.bind(), query, key)
        else:
            see = self._pairs.visible(query, key, of_query[first:], of_key[first:])
        return see & (of_query[0] == of_key[0]) if self._has_segments else see

    def row_side(self, arrays: Blocks) -> Side:
        """Rows of all heads of a key head, `[B, T, N, ...]`, in tiles together."""
        ids = (self._rows_of(x) for x in (self.operands.query_positions, *self._ids[0]))
        found = {name: self.in_tiles(x).swapaxes(2, 3) for name, x in arrays.items()}
        return self._side(found, ids)

    def key_side(self, arrays: Blocks) -> Side:
        """Keys `[B, S, K, W]` by leaves."""
        found = {name: self.held.spread(x) for name, x in arrays.items()}
        ids = (self.held.positions, *(self.held.spread(x, -1) for x in self._ids[1]))
        return self._side(found, ids)

    def query_side(self, arrays: Blocks) -> Side:
        """Queries `[B, T, N, ...]` of one head by their positions."""
        group, asked = self.group, self.asked

        def by_member(x: Array) -> Array:
            x = asked.spread(x.reshape(*x.shape[:2], self.key_heads, group, *x.shape[3:]))
            x = jnp.moveaxis(x, 4, 2)  # [B, tiles, G, size, K, ...]
            return lax.collapse(x, 1, 3)

        found = {name: by_member(x) for name, x in arrays.items()}
        ids = (asked.positions, *(asked.spread(x, -1) for x in self._ids[0]))
        return self._side(found, (jnp.repeat(x, group, 1) for x in ids))

    def walk_keys(self, rows: Side) -> Walk:
        """The leaves that rows may see."""
        numbers, held = self.held.numbers, self.held
        is_one = held.tiles <= self.subtree  # of which leaves without keys have numbers, too
        if is_one:
            numbers = jnp.arange(held.tiles, dtype=jnp.int32)[None]
        consecutive = is_one or self.counted or isinstance(held, Scattered)
        met = self.met((rows.ids[0], rows.ids[1] if self._has_segments else None))
        return self._walk(met, numbers, 1, consecutive)

    def walk_queries(self) -> Walk:
        """The tiles of queries, by position and head, that may see a leaf."""
        group, met = self.group, self.met(self.query_ids).swapaxes(1, 2)
        numbers = self.asked.numbers[:, :, None] * group
        numbers = numbers + jnp.arange(group, dtype=jnp.int32)[None, None]
        return self._walk(met, lax.collapse(numbers, 1, 3), group, True)

    def _walk(self, met: Array, numbers: Array, group: int, consecutive: bool) -> Walk:
        first, stop = (group * x[..., None] for x in block_spans(met))
        numbers, first, stop = (
            jnp.broadcast_to(x, (self.batch, *x.shape[1:])) for x in (numbers, first, stop)
        )
        # a leaf without keys, which may be in the middle, is of the same place as that before it
        numbers = numbers if consecutive else lax.cummax(numbers, axis=1)
        return Walk(numbers, first, stop, numbers.shape[1], consecutive)

    def from_rows(self, x: Array) -> Array:
        """Results of rows `[B, tiles, 1, rows, K, ...]` as `[B, T, N, ...]`; NaN where two keys are one slot's."""
        return self.held.checked(self._from_tiles(x.squeeze(2)))

    def from_parts(self, x: Array) -> Array:
        """Results of parts of rows, `[B, tiles, parts, rows, K, ...]`, as `[parts, B, T, N, ...]`."""
        return jax.vmap(self._from_tiles, 2)(x)

    def from_keys(self, x: Array) -> Array:
        """Results of keys `[B, leaves, 1, leaf, K, W]` as `[B, S, K, W]`, likewise."""
        found = lax.collapse(x.squeeze(2), 1, 3)
        return self.asked.checked(self.held.checked(self.held.unlaid(found)))

    def in_tiles(self, x: Array) -> Array:
        """`[B, T, N, ...]` as `[B, tiles, K, rows, ...]`."""
        rest = x.shape[3:]
        x = x.reshape(self.batch, self.queries, self.key_heads, self.group, *rest)
        x = jnp.moveaxis(x, 2, 3).reshape(self.batch, -1, self.key_heads, *rest)
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % self.rows), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(self.batch, -1, self.rows, self.key_heads, *rest), 2, 3)

    def _from_tiles(self, x: Array) -> Array:
        """`[B, tiles, rows, K, ...]` as `[B, T, N, ...]`."""
        x = x.reshape(self.batch, -1, *x.shape[3:])[:, : self.queries * self.group]
        x = x.reshape(self.batch, self.queries, self.group, *x.shape[2:])
        return jnp.moveaxis(x, 2, 3).reshape(self.batch, self.queries, -1, *x.shape[4:])

    def _rows_of(self, x: Array | None) -> Array | None:
        """Positions or segments `[#B, T]` of rows in tiles, as `in_tiles` of `[B, T, N]` does it."""
        if x is None:
            return None
        x = jnp.repeat(x, self.group, axis=1)
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % self.rows)), constant_values=-1)
        return x.reshape(len(x), -1, self.rows)

    def _side(self, arrays: Blocks, ids: Iterable[Array | None]) -> Side:
        every = (x for x in ids if x is not None)
        every = tuple(jnp.broadcast_to(x, (self.batch, *x.shape[1:])) for x in every)
        return Side({name: self.widened(x) for name, x in arrays.items()}, every)

    def widened(self, x: Array) -> Array:
        """Matrices `[..., W]` of five axes with zeros behind `W`, to a power of two."""
        missing = self.width_of(x.shape[-1]) - x.shape[-1] if x.ndim == 5 else 0
        return jnp.pad(x, ((0, 0),) * 4 + ((0, missing),)) if missing else x
