"""Which tiles of keys the GPU kernels' tiles of rows iterate over, and among them those without a mask."""

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..call._operands import Operands, Settings, bound, hide_unreachable
from ..masks._abstract import AbstractMask
from ..masks._interval import Interval, interval
from ..masks._pairwise import Features, Pairwise
from ..masks._visibility import must_meet
from ._rows import (
    BlockList,
    Visibility,
    block_list,
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

    Positions that are not given stay None: kernels count them.
    """
    tokens = operands.query_positions, operands.query_segments, plan.pairs
    if any(x is not None for x in tokens):
        operands = hide_unreachable(operands, plan.settings)
    features = features_of(operands, plan.pairs)

    def fill(x: Array | None, tile: int, value: int) -> Any:
        return None if x is None else pad_to_blocks(x, 1, tile, value)

    return Visibility(
        fill(operands.query_positions, plan.row_times, -1),
        fill(operands.key_positions, plan.keys, -1),
        fill(operands.query_segments, plan.row_times, 0),
        fill(operands.key_segments, plan.keys, 0),
        Features(
            tuple(fill(x, plan.row_times, 0) for x in features.queries),
            tuple(fill(x, plan.keys, 0) for x in features.keys),
        ),
    )


def tile_ranges(
    operands: Operands, visibility: Visibility, plan: Tiling, *, of_keys: bool
) -> Int[Array, "4 b tiles"] | BlockList | None:
    """The range of tiles that each tile of queries, or of keys, iterates over; None without arrays.

    First and one past the last tile that it might see; then first and one past the last of a run of
    them that needs no mask, because every present row sees every key. Under a mask that is not a
    window, a list of tiles, in numbers of tiles of queries.
    """
    mask = bound(plan.settings, operands)
    meets = meeting_blocks(visibility, mask, plan.row_times, plan.keys)
    if meets is None:
        return None
    whole = jnp.broadcast_to(_whole(visibility, mask, plan), meets.shape)
    if of_keys:
        meets, whole = meets.swapaxes(1, 2), whole.swapaxes(1, 2)
    if plan.pairs is not None:
        return block_list(meets, whole)
    first = whole.argmax(-1).astype(jnp.int32)
    after = jnp.arange(whole.shape[-1], dtype=jnp.int32)[None, None, :] >= first[..., None]
    broken = ~whole & after
    stop = jnp.where(broken.any(-1), broken.argmax(-1), whole.shape[-1]).astype(jnp.int32)
    found = jnp.stack([*block_spans(meets), first, jnp.where(whole.any(-1), stop, first)])
    # the same queries are in a tile for each group of heads
    return found * plan.head_tiles if of_keys else found


def _whole(
    visibility: Visibility, mask: AbstractMask, plan: Tiling
) -> Bool[Array, "b row_tiles key_tiles"]:
    """The pairs of tiles in which all present rows see all keys."""
    query_len, keys = plan.row_times, plan.keys
    whole = jnp.arange(plan.key_tiles, dtype=jnp.int32) < plan.key_len // keys
    whole = whole[None, None, :]
    if visibility.row_positions is not None and visibility.key_positions is not None:
        of_rows = interval(_tiles(visibility.row_positions, query_len))
        of_keys = _ends(visibility.key_positions, keys)
        whole &= must_meet(mask, *_facing(of_rows, of_keys))
    if visibility.row_segments is not None and visibility.key_segments is not None:
        of_rows, of_keys = _facing(
            _ends(visibility.row_segments, query_len), _ends(visibility.key_segments, keys)
        )
        # as low <= high, all four are then equal
        whole &= (of_rows.low == of_keys.high) & (of_rows.high == of_keys.low)
    return whole


def _tiles(x: Array, tile: int) -> Array:
    return x.reshape(len(x), -1, tile)


def _ends(x: Array, tile: int) -> Interval:
    x = _tiles(x, tile)
    return Interval(x.min(-1), x.max(-1))


def _facing(rows: Interval, keys: Interval) -> tuple[Interval, Interval]:
    return Interval(*(x[:, :, None] for x in rows)), Interval(*(x[:, None, :] for x in keys))
