"""The tiles of keys that each tile of rows iterates over in the GPU kernels, and those that need no mask."""

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..call._operands import Operands, Settings, bound, hide_unreachable
from ..masks._abstract import AbstractMask
from ..masks._interval import Interval, interval
from ..masks._pairwise import Features, Pairwise
from ..masks._visibility import facing, must_meet
from ._rows import (
    BlockList,
    Visibility,
    block_list,
    block_run,
    block_spans,
    features_of,
    meeting_blocks,
    pad_to_blocks,
)


@runtime_checkable
class Tiling(Protocol):
    """The tiling of a plan.

    Attributes:
        settings: those of the call.
        pairs: its mask for tiles, None if that is a window.
        key_len: `S`.
        row_times, keys: the queries and the keys of a tile.
        key_tiles: how many tiles the keys have.
        head_tiles: how many tiles the heads of a group have.
    """

    @property
    def settings(self) -> Settings: ...
    @property
    def pairs(self) -> Pairwise | None: ...
    @property
    def key_len(self) -> int: ...
    @property
    def row_times(self) -> int: ...
    @property
    def keys(self) -> int: ...
    @property
    def key_tiles(self) -> int: ...
    @property
    def head_tiles(self) -> int: ...


def visibility_of(operands: Operands, plan: Tiling) -> Visibility:
    """Positions and segments of queries and of keys, padded to whole tiles.

    Positions that are None stay None: the kernels then count from 0.
    """
    compared = operands.tokens.query_positions, operands.tokens.query_segments, plan.pairs
    if any(x is not None for x in compared):
        operands = hide_unreachable(operands, plan.settings)
    tokens, features = operands.tokens, features_of(operands, plan.pairs)

    def padded(x: Array | None, tile: int, value: int) -> Any:
        return None if x is None else pad_to_blocks(x, 1, tile, value)

    return Visibility(
        padded(tokens.query_positions, plan.row_times, -1),
        padded(tokens.key_positions, plan.keys, -1),
        padded(tokens.query_segments, plan.row_times, 0),
        padded(tokens.key_segments, plan.keys, 0),
        Features(
            tuple(padded(x, plan.row_times, 0) for x in features.queries),
            tuple(padded(x, plan.keys, 0) for x in features.keys),
        ),
    )


def tile_ranges(
    operands: Operands, visibility: Visibility, plan: Tiling, *, of_keys: bool
) -> Int[Array, "4 b tiles"] | BlockList | None:
    """The range of tiles that each tile of queries, or of keys, iterates over; None without arrays.

    The four numbers are the first and one past the last tile that it might see, then the first and one
    past the last of a run of tiles in which every present row sees every key, so that no mask is
    needed. Under a mask that is not a window, returns a `BlockList` of tiles of queries.
    """
    mask = bound(plan.settings, operands)
    may_meet = meeting_blocks(visibility, mask, plan.row_times, plan.keys)
    if may_meet is None:
        return None
    all_visible = jnp.broadcast_to(_all_visible(visibility, mask, plan), may_meet.shape)
    if of_keys:
        may_meet, all_visible = may_meet.swapaxes(1, 2), all_visible.swapaxes(1, 2)
    if plan.pairs is not None:
        return block_list(may_meet, all_visible)
    ranges = jnp.stack([*block_spans(may_meet), *block_run(all_visible)])
    # each tile of queries occurs once for every tile of heads
    return ranges * plan.head_tiles if of_keys else ranges


def _all_visible(
    visibility: Visibility, mask: AbstractMask, plan: Tiling
) -> Bool[Array, "b row_tiles key_tiles"]:
    """Whether all present rows see all keys, for each pair of tiles."""
    query_len, keys = plan.row_times, plan.keys
    all_visible = jnp.arange(plan.key_tiles, dtype=jnp.int32) < plan.key_len // keys
    all_visible = all_visible[None, None, :]
    if visibility.row_positions is not None and visibility.key_positions is not None:
        of_rows = interval(_tiles(visibility.row_positions, query_len))
        of_keys = _ends(visibility.key_positions, keys)
        all_visible &= must_meet(mask, *facing(of_rows, of_keys))
    if visibility.row_segments is not None and visibility.key_segments is not None:
        of_rows, of_keys = facing(
            _ends(visibility.row_segments, query_len), _ends(visibility.key_segments, keys)
        )
        # as low <= high, all four are then equal
        all_visible &= (of_rows.low == of_keys.high) & (of_rows.high == of_keys.low)
    return all_visible


def _tiles(x: Array, tile: int) -> Array:
    return x.reshape(len(x), -1, tile)


def _ends(x: Array, tile: int) -> Interval:
    x = _tiles(x, tile)
    return Interval(x.min(-1), x.max(-1))
