"""The blocks of keys that some query sees, and the operands of one of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from ..call._operands import Operands, dequantize
from ._slice import slice_at


class LiveBlocks(NamedTuple):
    """Blocks of keys to read, row after row of the batch.

    Attributes:
        order: row times blocks of a row, plus the block; None: all, in order.
        total: how many there are.
        blocks: of a row of the batch, live or not.
    """

    order: Int[Array, " all"] | None
    total: Int[Array, ""]
    blocks: int

    def at(self, i: Array) -> tuple[Array, Array]:
        """The row and the number of the `i`-th block to read."""
        number = i if self.order is None else self.order[i]
        blocks = jnp.int32(self.blocks)
        return lax.div(number, blocks), lax.rem(number, blocks)


def live_blocks(
    present: Bool[Array, "#B #S"] | None, batch: int, key_len: int, size: int
) -> LiveBlocks:
    """The blocks of `size` keys, the last of which may be shorter, with a present key in a row of the batch."""
    blocks = -(-key_len // size)
    if present is None:
        return LiveBlocks(None, jnp.int32(batch * blocks), blocks)
    present = jnp.broadcast_to(present, (batch, key_len))
    present = jnp.pad(present, ((0, 0), (0, blocks * size - key_len)))
    live = present.reshape(batch * blocks, size).any(-1)
    # live blocks in front: each goes behind the live ones before it
    place = jnp.where(live, jnp.cumsum(live, dtype=jnp.int32) - 1, batch * blocks)
    numbers = jnp.arange(batch * blocks, dtype=jnp.int32)
    order = (
        jnp.zeros_like(numbers).at[jnp.where(live, place, batch * blocks)].set(numbers, mode="drop")
    )
    return LiveBlocks(order, live.sum(dtype=jnp.int32), blocks)


class Block(NamedTuple):
    """Some keys of a row of the batch.

    Attributes:
        operands: those of a call with these keys alone, with a batch of one; its values are those of all keys.
        value: `[size, K, W]`, taken anew by each call: else XLA copies it for a branch that is seldom taken.
    """

    operands: Operands
    value: Callable[[], Array]


def take_block(operands: Operands, row: Array, first: Array, size: int) -> Block:
    """`size` keys from `first` on of a row of the batch."""
    zero = jnp.zeros_like(row)

    def cut(x: Any, keys: int | None = None) -> Any:
        if x is None:
            return None
        starts = {0: row} if x.shape[0] > 1 else {}
        sizes: dict[int, Any] = {0: 1}
        if keys is not None and x.shape[keys] > 1:
            starts[keys], sizes[keys] = first, size
        corner = tuple(starts.get(axis, zero) for axis in range(x.ndim))
        return slice_at(x, corner, tuple(sizes.get(axis, x.shape[axis]) for axis in range(x.ndim)))

    def plain(x: Array, scale: Array | None) -> Array:
        return dequantize(cut(x, 1), cut(scale, 1), operands.query.dtype)

    scales, indices = operands.scales, operands.indices
    batches = row[None]
    if indices.batch is not None:
        batches = lax.dynamic_slice(indices.batch, (row,), (1,))
    part = operands._replace(
        query=cut(operands.query),
        key=plain(operands.key, scales.key),
        bias=cut(operands.bias, 3),
        mask=cut(operands.mask, 3),
        tokens=operands.tokens.map_queries(cut).map_keys(lambda x: cut(x, 1)),
        mask_arrays=jax.tree.map(cut, operands.mask_arrays),
        indices=indices._replace(batch=batches),
        scales=scales._replace(key=None),
    )
    return Block(part, lambda: plain(operands.value, scales.value)[0])
