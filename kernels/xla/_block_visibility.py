"""The positions of a block's tokens, and which of its keys each of its queries sees."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from ..call._operands import Operands, Settings, all_meet, bound, hide_unreachable
from ..masks._abstract import Interval
from ..masks._visibility import may_meet, meeting, visible
from ._grid import Grid, Index, pad


def with_block_positions(operands: Operands, settings: Settings, grid: Grid) -> Operands:
    """Operands with the positions that blocks read; None where a block computes them from its index."""
    if all_meet(operands, settings):
        return operands
    operands = hide_unreachable(operands, settings)
    # keys that pad the last block are absent
    return operands.positioned(settings.compares or _pads(grid, operands))


def _pads(grid: Grid, operands: Operands) -> bool:
    return grid.keys * grid.key_blocks != operands.key.shape[1]


class BlockVisibility:
    """Positions and segments of the operands that `with_block_positions` returns, cut by a grid."""

    def __init__(self, operands: Operands, settings: Settings, grid: Grid):
        self._grid = grid
        self._mask = bound(settings, operands)
        self._lengths = operands.query.shape[1], operands.key.shape[1]
        self._pads = _pads(grid, operands)
        self._constrains = settings.mask.constrains
        tokens = operands.tokens
        self._positions = self._cut(tokens.query_positions, tokens.key_positions, fill=-1)
        self._segments = self._cut(tokens.query_segments, tokens.key_segments, fill=0)
        meet = meeting(self._mask, self._positions, self._segments)
        self._meet = None if meet is None else meet.any(0)

    def _cut(
        self, queries: Array | None, keys: Array | None, fill: int
    ) -> tuple[Array, Array] | None:
        if queries is None or keys is None:
            return None
        g = self._grid
        queries = pad(queries, 1, g.queries * g.query_blocks, fill)
        keys = pad(keys, 1, g.keys * g.key_blocks, fill)
        queries = queries.reshape(-1, g.query_blocks, g.queries)
        return queries, keys.reshape(-1, g.key_blocks, g.keys)

    def meet(self, index: Index) -> Bool[Array, ""] | None:
        """Whether any query of the block may see any of its keys; None if all do."""
        meet = None if self._meet is None else self._meet[index.query, index.key]
        g = self._grid
        if (
            self._positions is not None
            or not self._constrains
            or g.query_blocks * g.key_blocks == 1
        ):
            return meet
        first = self._first(index)
        sizes = zip(first, (g.queries, g.keys), self._lengths, strict=True)
        last = (jnp.minimum(x + size, length) - 1 for x, size, length in sizes)
        by_position = may_meet(self._mask, *map(Interval, first, last))
        return by_position if meet is None else meet & by_position

    def _first(self, index: Index) -> tuple[Array, Array]:
        queries, keys = (jnp.asarray(x, jnp.int32) for x in index[1:])
        return queries * self._grid.queries, keys * self._grid.keys

    def positions(self, index: Index) -> tuple[Array, Array]:
        """The positions of a block's rows and keys, `[B or 1, rows, 1]` and `[B or 1, 1, keys]`."""
        if self._positions is not None:
            return self._facing(self._positions, index)
        g = self._grid
        sizes = zip((g.queries, g.keys), (g.query_blocks, g.key_blocks), strict=True)
        queries, keys = (
            _counted(first, *size, length)
            for first, size, length in zip(self._first(index), sizes, self._lengths, strict=True)
        )
        return jnp.tile(queries, g.group)[None, :, None], keys[None, None, :]

    def hide(self, scores: Array, index: Index) -> Array:
        """The scores of a block, minus infinity where its mask or segments hide a key."""
        if self._positions is not None:
            is_visible = visible(self._mask, *self.positions(index))
            scores = jnp.where(is_visible, scores, -jnp.inf)
        elif self._constrains or self._pads:
            queries, keys = self.positions(index)
            if self._constrains:
                scores = jnp.where(self._mask.visible(queries, keys), scores, -jnp.inf)
            if self._pads:
                scores = jnp.where(keys >= 0, scores, -jnp.inf)
        if self._segments is not None:
            queries, keys = self._facing(self._segments, index)
            scores = jnp.where(queries == keys, scores, -jnp.inf)
        return scores

    def _facing(self, numbers: tuple[Array, Array], index: Index) -> tuple[Array, Array]:
        queries, keys = (x[:, i] for x, i in zip(numbers, index[1:], strict=True))
        return jnp.tile(queries, (1, self._grid.group))[:, :, None], keys[:, None, :]


def _counted(first: Array, size: int, blocks: int, length: int) -> Array:
    """Consecutive positions from `first` on; -1 for the padding of the last block."""
    positions = first + jnp.arange(size, dtype=jnp.int32)
    return positions if size * blocks == length else jnp.where(positions < length, positions, -1)
