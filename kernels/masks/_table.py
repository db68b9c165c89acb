"""The mask with a table of its visible blocks."""

import functools

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from .._checks import check_integer
from ._abstract import AbstractMask
from ._interval import Interval
from ._parameters import integers

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
