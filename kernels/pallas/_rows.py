"""Operands in the layout of hand-written kernels: rows that share a key head, in whole blocks.

A row is a query of one head. The rows of the `N / K` heads that share a key head are on one axis,
ordered by (head, time) and padded to whole blocks with rows that see no keys. The heads of few
queries thus fill a block, and keys are not repeated.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from ..call._operands import Operands, Settings
from ..masks._abstract import AbstractMask
from ..masks._pairwise import Features, Pairwise, pairwise
from ..masks._visibility import meeting


def pack_rows(x: Array, kv_heads: int, block: int, fill: float = 0) -> Array:
    """`[B, T, N, ...]` to rows `[B, K, R, ...]`, `R` a multiple of `block`."""
    batch, query_len, heads, *trailing = x.shape
    x = x.reshape(batch, query_len, kv_heads, heads // kv_heads, *trailing)
    x = x.transpose(0, 2, 3, 1, *range(4, x.ndim)).reshape(batch, kv_heads, -1, *trailing)
    return pad_to_blocks(x, 2, block, fill)


def unpack_rows(x: Array, query_len: int, heads: int) -> Array:
    """The inverse of `pack_rows`: rows `[B, K, R, ...]` to `[B, T, N, ...]`."""
    batch, kv_heads, _, *trailing = x.shape
    group = heads // kv_heads
    x = x[:, :, : group * query_len].reshape(batch, kv_heads, group, query_len, *trailing)
    return x.transpose(0, 3, 1, 2, *range(4, x.ndim)).reshape(batch, query_len, heads, *trailing)


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
    """The numbers of queries and of keys that the mask compares; none without positions."""
    queries, keys = operands.tokens.query_positions, operands.tokens.key_positions
    if pairs is None or queries is None or keys is None:
        return Features()
    return pairs.features(operands.mask_arrays, queries, keys)


class Visibility(NamedTuple):
    """Positions and segments of rows and of keys, from which a kernel computes its mask.

    All fields but the last may be None.

    Attributes:
        row_positions: int32 `[B or 1, R]`; -1 for rows that pad a block.
        key_positions: int32 `[B or 1, C]`; -1 for keys that pad a block.
        row_segments: int32 `[B or 1, R]`.
        key_segments: int32 `[B or 1, C]`.
        features: other numbers that the mask compares, int32 likewise.
    """

    row_positions: Int[Array, "b R"] | None
    key_positions: Int[Array, "b C"] | None
    row_segments: Int[Array, "b R"] | None
    key_segments: Int[Array, "b C"] | None
    features: Features = Features()


def visibility_of(
    operands: Operands, settings: Settings, features: Features, row_block: int, key_block: int
) -> Visibility:
    """The visibility of the rows of `pack_rows` and of the keys, both padded to whole blocks.

    Fields are None where all rows see all keys. Keys that pad the last block have position -1 if there
    are positions; a kernel also hides them by their index.
    """
    tokens = operands.positioned(settings.compares).tokens
    group = operands.query.shape[2] // operands.key.shape[2]

    def rows(x: Array | None, fill: int) -> Any:
        return None if x is None else pad_to_blocks(jnp.tile(x, (1, group)), 1, row_block, fill)

    def keys(x: Array | None, fill: int) -> Any:
        return None if x is None else pad_to_blocks(x, 1, key_block, fill)

    return Visibility(
        rows(tokens.query_positions, -1),
        keys(tokens.key_positions, -1),
        rows(tokens.query_segments, 0),
        keys(tokens.key_segments, 0),
        Features(
            tuple(rows(x, 0) for x in features.queries), tuple(keys(x, 0) for x in features.keys)
        ),
    )


def meeting_blocks(
    visibility: Visibility, mask: AbstractMask, row_block: int, key_block: int
) -> Bool[Array, "b row_blocks key_blocks"] | None:
    """Which blocks of rows might see any key of which blocks of keys; None for all."""

    def cut(rows: Array | None, keys: Array | None) -> Any:
        if rows is None or keys is None:
            return None
        return tuple(
            x.reshape(len(x), -1, block) for x, block in ((rows, row_block), (keys, key_block))
        )

    return meeting(mask, cut(*visibility[:2]), cut(*visibility[2:4]))


def block_spans(meets: Bool[Array, "b x y"]) -> tuple[Int[Array, "b x"], Int[Array, "b x"]]:
    """The first and one past the last block `y` that each block `x` meets; 0 and 0 for none."""
    number = meets.shape[-1]
    index = jnp.arange(number, dtype=jnp.int32)
    stop = jnp.where(meets, index + 1, 0).max(-1)
    return jnp.minimum(jnp.where(meets, index, number).min(-1), stop), stop


def block_run(visible: Bool[Array, "b x y"]) -> tuple[Int[Array, "b x"], Int[Array, "b x"]]:
    """The first and one past the last of the first run of visible blocks `y` of each `x`; equal for none.

    By minima that do not wait for each other, nor for those of `block_spans`: one kernel of a GPU computes them all.
    """
    number = visible.shape[-1]
    index = jnp.arange(number, dtype=jnp.int32)
    followed = jnp.pad(visible[..., 1:], [(0, 0), (0, 0), (0, 1)])
    first = jnp.where(visible, index, number).min(-1)
    return first, jnp.where(visible & ~followed, index + 1, number).min(-1)


class BlockList(NamedTuple):
    """A list of the blocks `y` that each block `x` meets, which need not be consecutive.

    Attributes:
        order: the numbers of the blocks: those that need no mask, the others that meet, the rest.
        stop: how many meet.
        unmasked: how many of these need no mask.
    """

    order: Int[Array, "b x y"]
    stop: Int[Array, "b x"]
    unmasked: Int[Array, "b x"]


def block_list(meets: Bool[Array, "b x y"], all_visible: Bool[Array, "#b #x #y"]) -> BlockList:
    """The list of the blocks that meet, given which of them need no mask."""
    all_visible = all_visible & meets
    number = meets.shape[-1]
    # sort one operand rather than two: XLA:TPU compiles the latter slowly
    kind = jnp.where(all_visible, 0, jnp.where(meets, 1, 2)).astype(jnp.int32)
    blocks = lax.broadcasted_iota(jnp.int32, kind.shape, kind.ndim - 1)
    order = jnp.sort(kind * number + blocks, axis=-1) % number
    return BlockList(order, *(x.sum(-1, dtype=jnp.int32) for x in (meets, all_visible)))


def pad_to_blocks(x: Array, axis: int, block: int, fill: float) -> Array:
    """`x` with an axis padded to whole blocks."""
    missing = math.ceil(x.shape[axis] / block) * block - x.shape[axis]
    if missing == 0:
        return x
    widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill)
