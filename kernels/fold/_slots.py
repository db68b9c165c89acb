"""Tokens in slots by their positions: a tile has the positions from one multiple of its size to the next."""

import abc
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from .._slice import slice_at
from ..call._leaves import leaves_for
from ..masks._interval import interval
from ._tree import depth_of

Share = tuple[Array | int, int]  # the index of a part, and how many there are
WHOLE: Share = 0, 1
Arrays = TypeVar("Arrays")


class AbstractSlots(abc.ABC):
    """Which token of an array lies in each slot of each tile.

    Attributes:
        positions: of the tokens, -1 for an empty slot, `[#B, tiles, size]`.
        numbers: of the tiles, in the tree over all; of tiles with a token they increase, `[#B, tiles]`.
        tiles: how many there are.
        depth: how many nodes a fold over them keeps.
    """

    positions: Int[Array, "b tiles size"]
    numbers: Int[Array, "b tiles"]
    tiles: int
    depth: int

    @abc.abstractmethod
    def tokens(self, batch: Array, tile: Array) -> Int[Array, " size"]:
        """The index of the token in each slot of a tile; of some token for an empty one."""

    @abc.abstractmethod
    def spread(self, x: Array, fill: int = 0) -> Array:
        """`[B, S, ...]` as `[B, tiles, size, ...]`; what is in empty slots is `fill` or anything."""

    @abc.abstractmethod
    def read(
        self,
        arrays: Arrays,
        batch: Array,
        tile: Array,
        dtype: jnp.dtype,
        part: Share = WHOLE,
    ) -> Arrays:
        """A tile `[K, size, W]` of each array `[B, S, K, W]`, or part of its last axis; zeros in empty slots."""

    @abc.abstractmethod
    def taken(self, x: Array, batch: Array) -> Array:
        """`[tiles * size, ...]` of an entry as `[S, ...]`: zeros for absent tokens."""

    def unlaid(self, x: Array) -> Array:
        """`[B, tiles * size, ...]` as `[B, S, ...]`, likewise."""
        return jax.vmap(self.taken)(x, jnp.arange(len(x), dtype=jnp.int32))

    @abc.abstractmethod
    def checked(self, x: Array) -> Array:
        """`[B, ...]`, NaN in entries where a token has no slot of its own."""


class InOrder(AbstractSlots):
    """Slots of an array already in position order: token `i` is in slot `i`."""

    def __init__(self, positions: Int[Array, "b length"], size: int, counted: bool):
        """`counted`: positions are indices, so that numbers of tiles are, too."""
        self._length, self._size = positions.shape[1], size
        self.tiles = -(-self._length // size)
        self.positions = self.spread(positions, -1)
        self.depth = depth_of(self.tiles) if counted else min(self.tiles, 32)
        number = jnp.arange(self.tiles, dtype=jnp.int32)[None]
        highest = lax.div(self.positions.max(-1), jnp.int32(size))
        self.numbers = number if counted else highest

    def tokens(self, batch: Array, tile: Array) -> Array:
        del batch
        token = tile * self._size + jnp.arange(self._size, dtype=jnp.int32)
        return jnp.minimum(token, self._length - 1)

    def spread(self, x: Array, fill: int = 0) -> Array:
        missing = self.tiles * self._size - self._length
        pads = (0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pads, constant_values=fill) if missing else x
        return x.reshape(len(x), self.tiles, self._size, *x.shape[2:])

    def read(
        self,
        arrays: Arrays,
        batch: Array,
        tile: Array,
        dtype: jnp.dtype,
        part: Share = WHOLE,
    ) -> Arrays:
        # a slice; the last tile may be filled up
        present = entry(self.positions, batch)[tile] >= 0
        tail = self._length % self._size

        def cut(x: Array, first: Array, size: int) -> Array:
            corner, sizes = _corner(x, batch, first, size, part)
            x = slice_at(x, corner, sizes)[0]
            pads = (0, self._size - size), (0, 0), (0, 0)
            return as_read(jnp.pad(x, pads) if size < self._size else x, present, dtype)

        def last() -> Arrays:
            first = jnp.full_like(tile, self._length - tail)
            return jax.tree.map(lambda x: cut(x, first, tail), arrays)

        def whole() -> Arrays:
            return jax.tree.map(lambda x: cut(x, tile * self._size, self._size), arrays)

        if tail == 0:
            return whole()
        return last() if self.tiles == 1 else lax.cond(tile == self.tiles - 1, last, whole)

    def taken(self, x: Array, batch: Array) -> Array:
        present = entry(self.positions, batch).reshape(-1)[: self._length] >= 0
        return jnp.where(_like(present, x), x[: self._length], 0.0)

    def checked(self, x: Array) -> Array:
        return x


class Scattered(AbstractSlots):
    """Of tokens in any order; those of negative position have no slot.

    A tile more than the tokens would fill: they may begin in the middle of one.
    """

    def __init__(self, positions: Int[Array, "b length"], size: int):
        batch, length = positions.shape
        self.tiles = leaves_for(length, size)
        self.depth = depth_of(self.tiles)
        self._length = length
        slots = self.tiles * size
        present = positions >= 0
        base = lax.div(interval(positions).low, jnp.int32(size))[:, None]
        place = positions - base * size
        inside = present & (place < slots)
        self._place = jnp.where(inside, place, slots)
        tokens = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), positions.shape)
        entries = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], positions.shape)
        token = jnp.full((batch, slots), -1, jnp.int32)
        token = token.at[entries, self._place].set(tokens, mode="drop")
        found = jnp.take_along_axis(token, jnp.minimum(self._place, slots - 1), 1)
        self._sound = (~present | (inside & (found == tokens))).all(1)
        token = token.reshape(batch, self.tiles, size)
        self._token = jnp.maximum(token, 0)
        self.numbers = base + jnp.arange(self.tiles, dtype=jnp.int32)[None]
        offset = jnp.arange(size, dtype=jnp.int32)[None, None]
        self.positions = jnp.where(token >= 0, self.numbers[:, :, None] * size + offset, -1)
        self._first = _first(token, length)

    def tokens(self, batch: Array, tile: Array) -> Array:
        return entry(self._token, batch)[tile]

    def spread(self, x: Array, fill: int = 0) -> Array:
        del fill
        batch, sizes = max(len(x), len(self._token)), self._token.shape[1:]
        token = jnp.broadcast_to(self._token, (batch, *sizes)).reshape(batch, -1)
        x = jnp.broadcast_to(x, (batch, *x.shape[1:]))
        return jnp.take_along_axis(x, _like(token, x), 1).reshape(batch, *sizes, *x.shape[2:])

    def read(
        self,
        arrays: Arrays,
        batch: Array,
        tile: Array,
        dtype: jnp.dtype,
        part: Share = WHOLE,
    ) -> Arrays:
        # a slice where its tokens lie in a row, else one by one
        token, first = self.tokens(batch, tile), entry(self._first, batch)[tile]
        present = entry(self.positions, batch)[tile] >= 0

        def in_a_row(x: Array) -> Array:
            place = _corner(x, batch, jnp.maximum(first, 0), len(token), part)
            return as_read(slice_at(x, *place)[0], present, dtype)

        def one_by_one(x: Array) -> Array:
            index, parts = part
            x = x.reshape(*x.shape[:3], parts, -1)[batch, token, :, index]
            return as_read(x, present, dtype)

        def all_one_by_one() -> Arrays:
            return jax.tree.map(one_by_one, arrays)

        if self._length < len(token):
            return all_one_by_one()
        return lax.cond(first >= 0, lambda: jax.tree.map(in_a_row, arrays), all_one_by_one)

    def taken(self, x: Array, batch: Array) -> Array:
        place = entry(self._place, batch)
        return jnp.where(_like(place < len(x), x), x[jnp.minimum(place, len(x) - 1)], 0.0)

    def checked(self, x: Array) -> Array:
        # two tokens of one position, or tokens in too many tiles
        return jnp.where(self._sound.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.nan)


def as_read(x: Array, present: Array, dtype: jnp.dtype) -> Array:
    """`[size, K, W]` as `[K, size, W]`; in the branches that slice it, where XLA fuses this with the slice."""
    return jnp.where(present[:, None, None], x.astype(dtype), 0).transpose(1, 0, 2)


def _corner(
    x: Array, batch: Array, first: Array, size: int, part: Share
) -> tuple[tuple[Array, ...], tuple[int, ...]]:
    """Where a slice of some tokens of `x`, and of a part of its last axis, begins, and its sizes."""
    index, parts = part
    zero, width = jnp.zeros_like(first), x.shape[3] // parts
    return (batch, first, zero, zero + index * width), (1, size, x.shape[2], width)


def entry(x: Array, batch: Array) -> Array:
    """The entry of the batch of an array whose first axis is that, or 1."""
    return lax.dynamic_index_in_dim(x, batch if x.shape[0] > 1 else 0, 0, keepdims=False)


def _like(x: Array, like: Array) -> Array:
    return x.reshape(*x.shape, *[1] * (like.ndim - x.ndim))


def _first(token: Array, length: int) -> Array:
    """The index of the first token of tiles whose tokens lie in a row, -1 for others."""
    size = token.shape[-1]
    if length < size:
        return jnp.full(token.shape[:-1], -1, jnp.int32)
    shift = token - jnp.arange(size, dtype=jnp.int32)[None, None]
    low = jnp.where(token >= 0, shift, length).min(-1)
    high = jnp.where(token >= 0, shift, -size).max(-1)
    return jnp.where((low == high) & (low >= 0) & (low <= length - size), low, -1)
