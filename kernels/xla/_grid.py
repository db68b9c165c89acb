"""Splits queries and keys into blocks, and concatenates them again."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._slice import Corner, add_at, slice_at
from ..call._operands import Operands, is_static
from ..masks._structure import MaskStructure


class BlockSizes(NamedTuple):
    """Largest sizes of blocks; static.

    The defaults were chosen by measurement: large enough for matrix products at full speed, small
    enough to stay in a CPU's cache.
    """

    # query rows in a block, of all heads that share a key head and of the whole batch, which is not cut, so that it
    # can be sharded over devices
    rows: int = 2048
    least_rows: int = 256  # of each batch entry, even if a block then has more than `rows`
    keys: int = 512
    # in a block of at most a sixteenth of `rows`. With more rows the larger block is 4 to 10% faster where all keys
    # are seen, and half as fast where a cache holds few.
    keys_of_few_rows: int = 1024
    # most rows and keys in a block under a mask that is not a window, so that more blocks are skipped. As fast as
    # larger ones (CPU), which need fewer products of statistics.
    sparse: int = 512


BLOCK_SIZES = BlockSizes()


def numbers(count: int) -> Array:
    """The numbers of blocks or heads, to loop over. Unsigned, so that JAX adds no code for negative indices."""
    return jnp.arange(count, dtype=jnp.uint32)


class Index(NamedTuple):
    """The indices of a block: key head, block of queries, block of keys."""

    head: Array
    query: Array
    key: Array


class Grid(NamedTuple):
    """How `[T, N]` queries and `[S, K]` keys are cut into blocks; static.

    A block of queries holds `queries` consecutive queries of the `group` heads that share a key head,
    so that no key is repeated and a block covers an interval of positions.
    """

    kv_heads: int
    group: int
    queries: int
    query_blocks: int
    keys: int
    key_blocks: int

    @property
    def rows(self) -> int:
        return self.group * self.queries

    def cut_queries(self, x: Array) -> Array:
        """`[B, T, N, W]` to `[K, blocks, B, rows, W]`, rows ordered by (head of the group, time)."""
        batch, _, _, width = x.shape
        x = self.pad_queries(x)
        x = x.reshape(batch, self.query_blocks, self.queries, self.kv_heads, self.group, width)
        x = x.transpose(3, 1, 0, 4, 2, 5)
        return x.reshape(self.kv_heads, self.query_blocks, batch, self.rows, width)

    def join_queries(self, x: Array, query_len: int) -> Array:
        """The inverse of `cut_queries`: `[K, blocks, B, rows, W]`, or with the first two as one, to `[B, T, N, W]`."""
        batch, width = x.shape[-3], x.shape[-1]
        x = x.reshape(self.kv_heads, self.query_blocks, batch, self.group, self.queries, width)
        x = x.transpose(2, 1, 4, 0, 3, 5)
        x = x.reshape(batch, self.query_blocks * self.queries, self.kv_heads * self.group, width)
        return x[:, :query_len]

    def cut_keys(self, x: Array) -> Array:
        """`[B, S, K, W]` to `[K, blocks, B, keys, W]`."""
        batch, _, kv_heads, width = x.shape
        x = self.pad_keys(x).reshape(batch, self.key_blocks, self.keys, kv_heads, width)
        return x.transpose(3, 1, 0, 2, 4)

    def pad_queries(self, x: Array, fill: float = 0) -> Array:
        """`[B, T, ...]` padded to whole blocks of queries."""
        return pad(x, 1, self.queries * self.query_blocks, fill)

    def pad_keys(self, x: Array, fill: float = 0) -> Array:
        """`[B, S, ...]` padded to whole blocks of keys."""
        return pad(x, 1, self.keys * self.key_blocks, fill)

    def take_queries(self, x: Array, index: Index) -> Array:
        """One block `[B, rows, W]` of padded queries, without a copy of the others."""
        batch, _, _, width = x.shape
        sizes = batch, self.queries, self.group, width
        block = slice_at(x, self._query_corner(index), sizes)
        return block.transpose(0, 2, 1, 3).reshape(batch, self.rows, width)

    def take_keys(self, x: Array, index: Index) -> Array:
        """One block `[B, keys, W]` of padded keys, without a copy of the others."""
        batch, _, _, width = x.shape
        return slice_at(x, self._key_corner(index), (batch, self.keys, 1, width))[:, :, 0]

    def add_to_queries(self, total: Array, block: Array, index: Index) -> Array:
        batch, _, width = block.shape
        block = block.reshape(batch, self.group, self.queries, width)
        return add_at(total, block.transpose(0, 2, 1, 3), self._query_corner(index))

    def add_to_keys(self, total: Array, block: Array, index: Index) -> Array:
        return add_at(total, block[:, :, None], self._key_corner(index))

    def _query_corner(self, index: Index) -> Corner:
        zero = np.zeros((), index.query.dtype)
        return zero, index.query * self.queries, index.head * self.group, zero

    def _key_corner(self, index: Index) -> Corner:
        zero = np.zeros((), index.key.dtype)
        return zero, index.key * self.keys, index.head, zero


def grid(operands: Operands, mask: MaskStructure, sizes: BlockSizes) -> Grid:
    """The grid with the fewest blocks within `sizes`, evenly filled, or of whole blocks of a table.

    Under a causal mask the numbers of blocks are even, so that no block holds parts of both pieces of a sequence
    that the zigzag layout puts on a device.
    """
    batch, query_len, heads, _ = operands.query.shape
    key_len, kv_heads = operands.key.shape[1:3]
    group = heads // kv_heads
    rows = sizes.rows if mask.is_window else min(sizes.rows, sizes.sparse)
    least = min(sizes.least_rows, rows)
    most = max(rows // max(batch, 1), least) if is_static(batch) else least
    causal = mask.window[1] == 0
    queries, query_blocks = _cut(query_len, group, most, causal, mask.block)
    few_rows = is_static(batch) and 16 * batch * group * queries <= sizes.rows
    most = sizes.keys_of_few_rows if few_rows else sizes.keys
    most = most if mask.is_window else min(most, sizes.sparse)
    keys, key_blocks = _cut(key_len, 1, most, causal, mask.block)
    return Grid(kv_heads, group, queries, query_blocks, keys, key_blocks)


def _cut(size: int, group: int, most: int, even: bool, unit: int | None) -> tuple[int, int]:
    # The length of a block of at most `most // group`, and the number of blocks. Blocks of a table, of `unit` tokens,
    # are not cut; a unit may have up to twice as many rows.
    if unit is not None and is_static(size) and unit * group <= 2 * most and unit < size:
        length = max(most // group // unit, 1) * unit
        return min(length, size), math.ceil(size / length)
    if not is_static(size):
        length = max(most // group, 1)
        return length, -(-size // length)
    blocks = math.ceil(size * group / most)
    if even and 2 * size * group > most:
        blocks += blocks % 2
    blocks = min(size, blocks)
    return math.ceil(size / max(blocks, 1)), blocks


def pad(x: Array, axis: int, size: int, fill: float = 0) -> Array:
    """An axis of an array filled up to a size."""
    missing = size - x.shape[axis]
    if missing == 0:
        return x
    widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill)
