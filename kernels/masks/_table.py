"""The mask with a table of its visible blocks, and how it is made."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from .._checks import check_integer, received
from ._abstract import AbstractMask
from ._interval import Interval
from ._parameters import integers
from ._visibility import in_blocks, tabulated

_size = functools.partial(check_integer, "block, query_len and key_len", least=1)


class BlockTable(AbstractMask):
    r"""A mask, and a table of its blocks, made once by [`tabulate`][energy_attn.kernels.masks.tabulate].

    It shows what the mask shows, for all positions. The blocks of queries and keys that are read, and those
    that need no mask, are looked up, where other masks by function are evaluated for all pairs in each call.
    The table is for positions below `query_len` and `key_len`, in blocks that need not be those of a kernel, a
    shard or a cache; past its end the mask itself is evaluated.

    Attributes:
        mask: the mask. If its arrays are replaced, the table is wrong; make another.
        some: how many blocks before a corner have a visible pair, $\sum_{i<x,\,j<y} \mathrm{some}_{ij}$:
            int32 `[x + 1, y + 1]`, or `[B, x + 1, y + 1]` where the mask's arrays have a batch axis.
        whole: how many have no hidden pair, likewise.
        block: the number of queries, and of keys, in a block.
        query_len: the number of query positions in the table.
        key_len: the number of key positions.

    Source: the `BlockMask` of flex attention (arXiv 2412.05496); summed-area tables (Crow, 1984).

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> table = masks.tabulate(masks.Causal(), 8, 8, block=4)
        >>> table.some[1:, 1:].tolist(), table.whole[1:, 1:].tolist()
        ([[1, 1], [2, 3]], [[0, 0], [1, 1]])
    """

    mask: AbstractMask
    some: Int[Array | np.ndarray, "*B x y"] = eqx.field(
        converter=functools.partial(integers, "some", rank=2)
    )
    whole: Int[Array | np.ndarray, "*B x y"] = eqx.field(
        converter=functools.partial(integers, "whole", rank=2)
    )
    block: int = eqx.field(static=True, converter=_size)
    query_len: int = eqx.field(static=True, converter=_size)
    key_len: int = eqx.field(static=True, converter=_size)

    by_intervals = True

    @property
    def ranks(self) -> tuple[int, ...]:
        return (*self.mask.ranks, 2, 2)

    def visible(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether the mask shows the key; the tables do not change it."""
        return self.mask.visible(query, key)

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether a block that the intervals touch has a visible pair, and the mask may show one."""
        count, _ = self._count(self.some, query, key)
        return self.mask.any_visible(query, key) & ((count > 0) | self._past_end(query, key))

    def all_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether all blocks that the intervals touch have no hidden pair, or the mask shows all."""
        count, blocks = self._count(self.whole, query, key)
        in_table = (count == blocks) & ~self._past_end(query, key)
        return self.mask.all_visible(query, key) | in_table

    def _told_by_intervals(self) -> bool:
        return True

    def _count(
        self, table: Array | np.ndarray, query: Interval, key: Interval
    ) -> tuple[Array, Array]:
        """The sum of the table over the blocks that the intervals touch, and their number."""
        sums = jnp.asarray(table)
        sides = []
        for (low, high), size in zip((query, key), sums.shape, strict=True):
            first = jnp.clip(low // self.block, 0, size - 1)
            sides.append((first, jnp.clip(high // self.block + 1, first, size - 1)))
        (top, bottom), (left, right) = sides
        total = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
        return total, (bottom - top) * (right - left)

    def _past_end(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        return (query.high >= self.query_len) | (key.high >= self.key_len)


def tabulate(
    mask: AbstractMask, query_len: int, key_len: int | None = None, *, block: int = 128
) -> BlockTable:
    r"""The same mask with a table of its blocks, to be used in many calls: layers, heads and steps.

    $$\mathrm{some}_{xy} = \bigvee_{i \in x,\, j \in y} \mathrm{visible}_{ij}, \qquad
      \mathrm{whole}_{xy} = \bigwedge_{i \in x,\, j \in y} \mathrm{visible}_{ij}$$

    The mask is evaluated once for all pairs, one block at a time, so memory is that of the table. The
    table is an argument of a compiled program, like all arrays of masks.

    Args:
        mask: any mask; its arrays may have a batch axis, as those of a call.
        query_len: positions of queries from 0 that the table is made for.
        key_len: those of keys; None: the same.
        block: the number of queries, and of keys, in a block. Smaller ones skip more of the pairs that
            are hidden, as far as the blocks of a kernel follow them.

    Raises:
        TypeError: no mask, or sizes that are not ints.
        ValueError: sizes below 1.

    Source: `create_block_mask` of flex attention (arXiv 2412.05496).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> from energy_attn import masks
        >>> strided = masks.Function(lambda query, key: query // 4 % 3 == key // 4 % 3)
        >>> table = masks.tabulate(masks.Causal() & strided, 24, block=4)
        >>> q = jax.random.normal(jax.random.key(0), (1, 24, 2, 4))
        >>> out = ea.attention(q, q, q, mask=table)
        >>> bool(jnp.allclose(out, ea.attention(q, q, q, mask=table.mask), atol=1e-6))
        True
    """
    if not isinstance(mask, AbstractMask):
        raise TypeError(f"mask: wanted a mask of energy_attn.masks, got {received(mask)}")
    query_len = check_integer("query_len", query_len, least=1)
    key_len = query_len if key_len is None else check_integer("key_len", key_len, least=1)
    block = check_integer("block", block, least=1)
    leaves, tree = jax.tree.flatten(mask)
    ranks = mask.ranks
    arrays = [
        jnp.asarray(x)[None] if x.ndim == rank else jnp.asarray(x)
        for x, rank in zip(leaves, ranks, strict=True)
    ]
    batched = any(x.ndim > rank for x, rank in zip(leaves, ranks, strict=True))
    tokens = [
        in_blocks(jnp.arange(size, dtype=jnp.int32)[None], block) for size in (query_len, key_len)
    ]
    some, whole = (
        _corners(x) for x in tabulated(jax.tree.unflatten(tree, arrays), tokens[0], tokens[1])
    )
    if not batched:
        some, whole = some[0], whole[0]
    return BlockTable(mask, some, whole, block, query_len, key_len)


def _corners(x: Array) -> Array:
    """How many blocks before each corner are true, `[b, x + 1, y + 1]`."""
    sums = x.astype(np.int32).cumsum(1, dtype=np.int32).cumsum(2, dtype=np.int32)
    return jnp.pad(sums, ((0, 0), (1, 0), (1, 0)))
