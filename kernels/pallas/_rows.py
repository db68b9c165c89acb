"""Visibility of tiles of queries and of keys: their positions, and which pairs of tiles meet or need no mask."""

import functools
import math
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from ..call._operands import Operands, Settings
from ..masks._abstract import AbstractMask, Interval, interval
from ..masks._structure import Features, Pairwise, pairwise
from ..masks._visibility import facing, meeting, must_meet
from ..xla._grid import pad


def pairs_of(operands: Operands, settings: Settings) -> Pairwise | None:
    """The pairwise form of a call's mask, which kernels compute; None for a window.

    Raises `NotImplementedError` for a mask that no kernel computes.
    """
    if settings.mask.is_window:
        return None
    pairs = pairwise(settings.mask, operands.mask_arrays)
    if pairs.problem is not None:
        raise NotImplementedError(f"{pairs.problem} (blockwise takes it)")
    return pairs


def features_of(operands: Operands, pairs: Pairwise | None) -> Features:
    """Returns the numbers of queries and keys that the mask compares; none without positions."""
    queries, keys = operands.tokens.query_positions, operands.tokens.key_positions
    if pairs is None or queries is None or keys is None:
        return Features()
    return pairs.features(operands.mask_arrays, queries, keys)


class Visibility(NamedTuple):
    """Positions (-1 in padding) and segments, from which a kernel computes its mask."""

    row_positions: Int[Array, "b R"] | None
    key_positions: Int[Array, "b C"] | None
    row_segments: Int[Array, "b R"] | None
    key_segments: Int[Array, "b C"] | None
    features: Features = Features()  # other numbers that the mask compares


def padded_visibility(
    operands: Operands, features: Features, row_tile: int, key_tile: int
) -> Visibility:

    def padded(x: Array | None, tile: int, value: int) -> Any:
        return None if x is None else pad_to_blocks(x, 1, tile, value)

    tokens = operands.tokens
    return Visibility(
        padded(tokens.query_positions, row_tile, -1),
        padded(tokens.key_positions, key_tile, -1),
        padded(tokens.query_segments, row_tile, 0),
        padded(tokens.key_segments, key_tile, 0),
        Features(
            tuple(padded(x, row_tile, 0) for x in features.queries),
            tuple(padded(x, key_tile, 0) for x in features.keys),
        ),
    )


def meeting_blocks(
    visibility: Visibility, mask: AbstractMask, row_block: int, key_block: int
) -> Bool[Array, "b row_blocks key_blocks"] | None:
    """Whether each block of rows might see a key of each block of keys; None if all might."""
    return meeting(mask, *_split(visibility, row_block, key_block))


def open_blocks(
    visibility: Visibility, mask: AbstractMask, row_block: int, key_block: int
) -> Bool[Array, "b row_blocks key_blocks"] | None:
    """Whether all present rows of each block see all keys of each block; None if all do."""
    positions, segments = _split(visibility, row_block, key_block)
    conditions = []
    if positions is not None:
        rows, keys = positions
        of_keys = Interval(keys.min(-1), keys.max(-1))
        conditions.append(must_meet(mask, *facing(interval(rows), of_keys)))
    if segments is not None:
        rows, keys = facing(*(Interval(x.min(-1), x.max(-1)) for x in segments))
        # low <= high, so these equalities make all four ids equal
        conditions.append((rows.low == keys.high) & (rows.high == keys.low))
    return functools.reduce(operator.and_, conditions) if conditions else None


def _split(visibility: Visibility, row_block: int, key_block: int) -> list[Any]:
    """Splits positions and segments into blocks: pairs `[b, blocks, block]` of rows and keys, or None."""

    def split(rows: Array | None, keys: Array | None) -> Any:
        if rows is None or keys is None:
            return None
        sides = (rows, row_block), (keys, key_block)
        return tuple(x.reshape(len(x), -1, block) for x, block in sides)

    return [split(*visibility[:2]), split(*visibility[2:4])]


def block_spans(meets: Bool[Array, "b x y"]) -> tuple[Int[Array, "b x"], Int[Array, "b x"]]:
    """Returns the first block `y` that each block `x` meets, and one past the last; 0 and 0 for none."""
    number = meets.shape[-1]
    index = jnp.arange(number, dtype=jnp.int32)
    stop = jnp.where(meets, index + 1, 0).max(-1)
    return jnp.minimum(jnp.where(meets, index, number).min(-1), stop), stop


def block_run(visible: Bool[Array, "b x y"]) -> tuple[Int[Array, "b x"], Int[Array, "b x"]]:
    """Returns the begin and end of the first run of visible blocks `y` of each `x`; equal for none."""
    # minima that are independent of each other and of `block_spans`, so that XLA fuses all into one GPU kernel
    number = visible.shape[-1]
    index = jnp.arange(number, dtype=jnp.int32)
    followed = jnp.pad(visible[..., 1:], [(0, 0), (0, 0), (0, 1)])
    first = jnp.where(visible, index, number).min(-1)
    return first, jnp.where(visible & ~followed, index + 1, number).min(-1)


class BlockList(NamedTuple):
    """The blocks `y` that each block `x` meets, which need not be consecutive."""

    order: Int[Array, "b x y"]  # blocks that need no mask, the others that meet, the rest
    stop: Int[Array, "b x"]  # number of blocks that meet
    unmasked: Int[Array, "b x"]  # number of blocks that need no mask


def block_list(meets: Bool[Array, "b x y"], all_visible: Bool[Array, "#b #x #y"]) -> BlockList:
    all_visible = all_visible & meets
    number = meets.shape[-1]
    # one sorted operand: XLA:TPU takes much longer to compile a sort of two (to check: time `lax.sort((kind, blocks))`)
    kind = jnp.where(all_visible, 0, jnp.where(meets, 1, 2)).astype(jnp.int32)
    blocks = lax.broadcasted_iota(jnp.int32, kind.shape, kind.ndim - 1)
    order = jnp.sort(kind * number + blocks, axis=-1) % number
    return BlockList(order, *(x.sum(-1, dtype=jnp.int32) for x in (meets, all_visible)))


def pad_to_blocks(x: Array, axis: int, block: int, fill: float) -> Array:
    return pad(x, axis, math.ceil(x.shape[axis] / block) * block, fill)


def moving_arrays(directions: Operands) -> dict[str, Any]:
    """Returns the directions of query, key and value that are not None, by name."""
    named = {"query": directions.query, "key": directions.key, "value": directions.value}
    return {name: x for name, x in named.items() if x is not None}
