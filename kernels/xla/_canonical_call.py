"""The operands of a canonical call, its scores in tiles, and what of a call is declined."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..call._leaves import LEAF
from ..call._operands import Operands, Settings, bound, bound_score
from ..call._state import lse_dtype, unfused
from ..masks._abstract import AbstractMask
from ..masks._visibility import meeting, visible
from ..scores._abstract import At
from ..scores._structure import floating
from ._canonical_rows import RowTiles
from ._canonical_slots import AbstractSlots, InOrder, Scattered, entry
from ._canonical_tiles import raw_scores
from ._tile_program import computed

# The format: whoever changes one of these, `LEAF`, or a program of `_canonical_tiles`, counts it up.
FORMAT = 2
QUERIES = 256  # queries of a tile of one head, of a fold over queries


class Side(NamedTuple):
    """Queries or keys in tiles.

    Attributes:
        positions: `[#B, tiles, size]`, negative where there is none.
        segments: likewise, or None.
    """

    positions: Int[Array, "b tiles size"]
    segments: Int[Array, "b tiles size"] | None

    def at(self, batch: Array, tile: Array) -> tuple[Array, Array | None]:
        """Those of a tile."""
        segments = None if self.segments is None else entry(self.segments, batch)[tile]
        return entry(self.positions, batch)[tile], segments


class Tile(NamedTuple):
    """Where the scores `[K, rows, keys]` of a tile are in a call.

    Attributes:
        batch: the entry of the batch.
        heads: of the queries.
        queries: the indices of the tokens of the rows.
        keys: the indices of the tokens of the keys.
        query_at: positions and segments of the rows.
        key_at: positions and segments of the keys.
    """

    batch: Int[Array, ""]
    heads: Int[Array, "K #rows"]
    queries: Int[Array, " rows"]
    keys: Int[Array, " keys"]
    query_at: tuple[Array, Array | None]
    key_at: tuple[Array, Array | None]


class CanonicalCall:
    """The operands of a call beside the slots of its keys."""

    def __init__(
        self,
        operands: Operands,
        settings: Settings,
        in_order: bool,
        rows: int | None = None,
    ):
        """`rows`: of a tile, where that is a constant of the platform's format."""
        self.counted = operands.tokens.query_positions is None
        operands = operands.positioned()
        self.operands = operands = operands._replace(score_arrays=rounded(operands.score_arrays))
        tokens = operands.tokens
        assert tokens.query_positions is not None and tokens.key_positions is not None
        self.scale = settings.scale
        self.dtype = lse_dtype(operands.query.dtype)
        self.batch, self.queries, heads = operands.query.shape[:3]
        self.key_heads = operands.key.shape[2]
        self.group = heads // self.key_heads
        self.tiles = RowTiles(self.batch, self.queries, self.key_heads, self.group)
        self.rows = rows or self.tiles.rows
        self.mask: AbstractMask = bound(settings, operands)
        self.score = bound_score(settings, operands)
        self.held: AbstractSlots = (
            InOrder(tokens.key_positions, LEAF, self.counted)
            if self.counted or in_order
            else Scattered(tokens.key_positions, LEAF)
        )
        self.keys = in_slots(self.held, tokens.key_segments)

    def queries_by_position(self, size: int) -> AbstractSlots:
        """The queries, in tiles of so many positions."""
        positions: Any = self.operands.tokens.query_positions
        return InOrder(positions, size, True) if self.counted else Scattered(positions, size)

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

    def sink(self) -> Float[Array, "B T N"] | None:
        """The sink of each row, minus infinity where a query is absent."""
        return self.of_heads(self.operands.sink, -jnp.inf)

    def of_heads(self, x: Array | None, absent: float) -> Float[Array, "B T N"] | None:
        """`[N]` or `[B, N]` for each row."""
        positions = self.operands.tokens.query_positions
        if x is None or positions is None:
            return None
        x = unfused(jnp.atleast_2d(x).astype(self.dtype))[:, None]
        x = jnp.where(positions[:, :, None] >= 0, x, absent)
        return jnp.broadcast_to(x, self.operands.query.shape[:3])

    def scores(self, query: Array, key: Array, tile: Tile) -> Float[Array, "K rows keys"]:
        """The scores of a tile, minus infinity where a key is hidden."""
        raw, score = raw_scores(query, key, self.scale), self.score
        if score is not None:
            raw = computed(score, raw, self.at(tile))
        return self._masked(raw, tile)

    def scores_and_pullback(self, query: Array, key: Array, tile: Tile) -> tuple[Array, Any]:
        """The same, and the function that takes cotangents of scores to those of scaled products."""
        scores, slope = self._moved(query, key, tile, 1.0, ())
        if self.score is None:
            return scores, lambda change: change
        return scores, lambda change: lax.optimization_barrier(unfused(change * slope))

    def scores_and_change(
        self, query: Array, key: Array, change: Array | None, directions: Operands, tile: Tile
    ) -> tuple[Array, Array | None]:
        """The same, and their tangent for that of the scaled products; None: no direction moves them."""
        scores, change = self._moved(query, key, tile, change, directions.score_arrays)
        if directions.bias is not None:
            moved = self._terms(directions.bias, tile)
            change = moved if change is None else change + moved
        return scores, change

    def _moved(
        self, query: Array, key: Array, tile: Tile, change: Any, arrays: Sequence[Any]
    ) -> tuple[Array, Any]:
        """The scores, and their tangent for those of the scaled products and of the score's arrays."""
        raw, score = raw_scores(query, key, self.scale), self.score
        if score is None:
            return self._masked(raw, tile), change
        change = None if change is None else jnp.broadcast_to(change, raw.shape).astype(raw.dtype)
        found = computed(score.jvp, raw, self.at(tile), change, rounded(arrays))
        scores, change = lax.optimization_barrier(found)
        return self._masked(scores, tile), change

    def _masked(self, scores: Array, tile: Tile) -> Array:
        """`scores`, rounded; with the bias; minus infinity where a key is hidden."""
        scores = lax.optimization_barrier(scores)
        if self.operands.bias is not None:
            scores = scores + self._terms(self.operands.bias, tile)
        mask = jax.tree.map(lambda x: entry(x, tile.batch)[None], self.mask)
        (query, query_ids), (key, key_ids) = tile.query_at, tile.key_at
        seen = visible(mask, query[:, None], key[None])
        if query_ids is not None and key_ids is not None:
            seen = seen & (query_ids[:, None] == key_ids[None])
        seen = seen[None]
        if self.operands.mask is not None:
            seen = seen & _pairs(self.operands.mask, tile)
        return lax.optimization_barrier(jnp.where(seen, scores, -jnp.inf))

    def _terms(self, bias: Array, tile: Tile) -> Array:
        return unfused(_pairs(bias, tile).astype(self.dtype))

    def at(self, tile: Tile) -> At:
        """Batch, head and positions of the scores of a tile, for a score."""
        batches, heads = self.operands.indices
        batch = tile.batch if batches is None else batches[tile.batch]
        head = (tile.heads if heads is None else heads[tile.heads])[:, :, None]
        if self.score is None or not self.score.structure.compares:
            return At(batch, head, None, None)  # pyright: ignore[reportArgumentType]
        return At(batch, head, tile.query_at[0][None, :, None], tile.key_at[0][None, None])


def in_slots(held: AbstractSlots, segments: Array | None) -> Side:
    """The tokens in slots."""
    return Side(held.positions, None if segments is None else held.laid(segments))


def rounded(arrays: PyTree[Array]) -> Any:
    """Arrays whose products XLA fuses with no sum that follows."""
    return jax.tree.map(lambda x: unfused(x) if floating(x) else x, arrays)


def _pairs(x: Array, tile: Tile) -> Array:
    """What an array that broadcasts to `[B, N, T, S]` has for the scores of a tile; broadcasts to these."""
    batch, heads, queries, keys = (
        at if size > 1 else jnp.zeros_like(at) for at, size in zip(tile[:4], x.shape, strict=True)
    )
    keys = keys if x.shape[3] > 1 else keys[:1]
    return x[batch, heads[:, :, None], queries[None, :, None], keys[None, None]]


def check_whole(settings: Settings) -> None:
    """Raises `NotImplementedError` for a part of the keys of a row, and for a score with a source."""
    if settings.needs.unrounded:
        raise NotImplementedError(
            "key: wanted all keys of a row in one call, got a part whose state is merged with others, in an "
            "order of its own"
        )
    if settings.scored_width is not None:
        raise NotImplementedError("source: wanted None beside a score, got an array")
