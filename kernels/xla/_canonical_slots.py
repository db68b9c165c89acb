"""Tokens in slots by their positions: a tile has the positions from one multiple of its size to the next."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from ..masks._interval import interval
from ._slice import slice_at


class Slots(NamedTuple):
    """Which token lies in each slot, from the tile of the first token on.

    Attributes:
        token: its index, -1 for an empty slot, `[#B, tiles, size]`.
        positions: of the tokens, -1 for an empty slot, likewise.
        first: the index of the first token of a tile whose tokens lie as its slots do; -1 for others, `[#B, tiles]`.
        base: the number of the first tile, `[#B]`.
        place: the slot of each token, `[#B, S]`.
        sound: whether every token has a slot of its own, `[#B]`.
    """

    token: Int[Array, "b tiles size"]
    positions: Int[Array, "b tiles size"]
    first: Int[Array, "b tiles"]
    base: Int[Array, " b"]
    place: Int[Array, "b S"]
    sound: Bool[Array, " b"]

    def numbers(self, each: int = 1) -> tuple[Int[Array, " b"], int]:
        """The number of the first of `each` items a tile in the tree over all items, and the levels of this tree.

        From a node on that may hold all items: above the smallest such level the tree but joins two nodes.
        """
        levels = (self.token.shape[1] * each - 1).bit_length()
        return (self.base * each) & ((1 << levels) - 1), levels + 1


def slots(positions: Int[Array, "b S"], size: int) -> Slots:
    """The slots of tokens of these positions, in any order; those of negative position have none.

    A tile more than the tokens would fill: they may begin in the middle of one.
    """
    batch, length = positions.shape
    tiles = -(-length // size) + 1
    present = positions >= 0
    base = lax.div(interval(positions).low, jnp.int32(size))[:, None]
    place = positions - base * size
    inside = present & (place < tiles * size)
    place = jnp.where(inside, place, tiles * size)
    tokens = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), positions.shape)
    entries = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], positions.shape)
    token = jnp.full((batch, tiles * size), -1, jnp.int32)
    token = token.at[entries, place].set(tokens, mode="drop")
    found = jnp.take_along_axis(token, jnp.minimum(place, tiles * size - 1), 1)
    sound = (~present | (inside & (found == tokens))).all(1)
    token = token.reshape(batch, tiles, size)
    number = base + jnp.arange(tiles, dtype=jnp.int32)[None]
    offset = jnp.arange(size, dtype=jnp.int32)[None, None]
    in_slots = jnp.where(token >= 0, number[:, :, None] * size + offset, -1)
    return Slots(token, in_slots, _first(token, length), base[:, 0], place, sound)


def as_they_lie(positions: Int[Array, "b S"], size: int) -> Slots:
    """Tiles of successive tokens of the array, for what does not depend on the tile that a token is in."""
    batch, length = positions.shape
    tiles = -(-length // size)
    place = jnp.arange(length, dtype=jnp.int32)[None]
    token = jnp.pad(place, ((0, 0), (0, tiles * size - length)), constant_values=-1)
    token = token.reshape(1, tiles, size)
    padded = jnp.pad(positions, ((0, 0), (0, tiles * size - length)), constant_values=-1)
    zero, sound = jnp.zeros_like(positions[:, 0]), jnp.ones((batch,), bool)
    in_tiles = padded.reshape(batch, tiles, size)
    return Slots(token, in_tiles, _first(token, length), zero, place, sound)


def _first(token: Array, length: int) -> Array:
    """The index of the first token of tiles whose tokens lie in a row, -1 for others."""
    size = token.shape[-1]
    if length < size:
        return jnp.full(token.shape[:-1], -1, jnp.int32)
    shift = token - jnp.arange(size, dtype=jnp.int32)[None, None]
    low = jnp.where(token >= 0, shift, length).min(-1)
    high = jnp.where(token >= 0, shift, -size).max(-1)
    return jnp.where((low == high) & (low >= 0) & (low <= length - size), low, -1)


def entry(x: Array, batch: Array) -> Array:
    """The entry of the batch of an array whose first axis is that, or 1."""
    return lax.dynamic_index_in_dim(x, batch if x.shape[0] > 1 else 0, 0, keepdims=False)


def read(
    arrays: Sequence[Array], held: Slots, batch: Array, tile: Array, dtype: jnp.dtype
) -> list[Array]:
    """A tile `[K, size, W]` of each array `[B, S, K, W]`, with zeros in empty slots.

    Of several arrays of `B` tokens in one, `batch` counts entries of all.
    """
    group = len(arrays[0]) // len(held.token) if len(held.token) > 1 else 1
    at = lax.div(batch, jnp.int32(group))
    token, first = entry(held.token, at)[tile], entry(held.first, at)[tile]
    zero = jnp.zeros_like(first)

    def laid(x: Array) -> Array:  # in the branches, where XLA fuses it with the slice
        return jnp.where(token[:, None, None] >= 0, x.astype(dtype), 0).transpose(1, 0, 2)

    def in_a_row() -> list[Array]:
        corner = batch, jnp.maximum(first, 0), zero, zero
        return [laid(slice_at(x, corner, (1, len(token), *x.shape[2:]))[0]) for x in arrays]

    def one_by_one() -> list[Array]:
        return [laid(x[batch, jnp.maximum(token, 0)]) for x in arrays]

    if arrays[0].shape[1] < len(token):
        return one_by_one()
    return lax.cond(first >= 0, in_a_row, one_by_one)
