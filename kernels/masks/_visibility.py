"""Evaluates masks for pairs of tokens and of blocks, and tabulates blocks; absent tokens see nothing."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from .._checks import check_integer
from .._varying import vary_together
from ._abstract import AbstractMask, Interval, Not, check_mask, interval
from ._ready import WINDOWS, All, Causal, integers

_MOST_BLOCKS = 1024  # blocks of queries that are compared with every key
# The pairs that are compared at a time, where intervals do not determine it.
_ROWS, _KEYS = 256, 1024


def visible(
    mask: AbstractMask, query: Int[Array, "..."], key: Int[Array, "..."]
) -> Bool[Array, "..."]:
    """Whether present queries see present keys, by position; the arguments broadcast.

    The arrays of the mask have an axis of the batch in front, as positions have.
    """
    return _where_present((query >= 0) & (key >= 0), mask, lambda mask: mask.visible, query, key)


def may_meet(mask: AbstractMask, query: Interval, key: Interval) -> Bool[Array, "..."]:
    """Whether blocks of queries and of keys might have a visible pair, as `any_visible`; the intervals broadcast."""
    present = (query.low <= query.high) & (key.low <= key.high)
    return _where_present(present, mask, lambda mask: mask.any_visible, query, key)


def must_meet(mask: AbstractMask, query: Interval, key: Interval) -> Bool[Array, "..."]:
    """Whether all pairs of present queries and of keys are visible, as `all_visible`; the intervals broadcast.

    `key.low` is over all keys of the block, and so negative if any is absent.
    """
    return _where_present(key.low >= 0, mask, lambda mask: mask.all_visible, query, key)


def _where_present(
    present: Array,
    mask: AbstractMask,
    method: Callable[[Any], Any],
    query: Array | Interval,
    key: Array | Interval,
) -> Array:
    if isinstance(mask, All):
        return present
    arrays = jax.tree.leaves(mask)
    if all(x.shape[0] == 1 for x in arrays):
        return present & method(jax.tree.map(lambda x: x[0], mask))(query, key)

    # arrays and positions may have a batch axis of 1
    def entry(x: Array) -> Array:
        return x[0] if x.shape[0] == 1 else x

    batched = mask, query, key
    axes = jax.tree.map(lambda x: None if x.shape[0] == 1 else 0, batched)
    return present & jax.vmap(lambda mask, query, key: method(mask)(query, key), in_axes=axes)(
        *jax.tree.map(entry, batched)
    )


def reachable(
    mask: AbstractMask, query: Int[Array, "#B T"], key: Int[Array, "#B S"]
) -> Bool[Array, "_ S"]:
    """Whether any query may see each key.

    Never false where a query does. May be true where none does only under a window, in gaps between
    the positions of successive queries.
    """
    query_len, key_len = query.shape[1], key.shape[1]
    static = isinstance(query_len, int) and isinstance(key_len, int)  # not symbols
    if not isinstance(mask, WINDOWS):
        rows, keys = query_len, key_len
        if static:
            rows, keys = min(_ROWS, rows), min(_KEYS, keys)
        visible_keys = _compare_pairs(mask, in_blocks(query, rows), in_blocks(key, keys), "keys")
        return visible_keys.reshape(visible_keys.shape[0], -1)[:, :key_len] if key_len else key >= 0
    blocks = 1 if isinstance(mask, (All, Causal)) or not static else min(query_len, _MOST_BLOCKS)
    low, high = interval(in_blocks(query, -(-query_len // blocks)))
    single_keys = Interval(key[:, :, None], key[:, :, None])
    queries = Interval(low[:, None, :], high[:, None, :])
    return (key >= 0) & may_meet(mask, queries, single_keys).any(-1)


def in_blocks(x: Array, size: int) -> Array:
    """Tokens `[B, L]` as `[B, blocks, size]`, with absent ones in the last block."""
    blocks = -(-x.shape[1] // size)
    x = jnp.pad(x, ((0, 0), (0, blocks * size - x.shape[1])), constant_values=-1)
    return x.reshape(x.shape[0], blocks, size)


# positions or segments of queries and of keys, in blocks
Pair = tuple[Int[Array, "#B query_blocks rows"], Int[Array, "#B key_blocks keys"]]


def meeting(
    mask: AbstractMask, positions: Pair | None, segments: Pair | None
) -> Bool[Array, "_ query_blocks key_blocks"] | None:
    """Whether blocks of queries might see any key of blocks of keys; None for all."""
    meet = None
    if positions is not None:
        if mask._told_by_intervals():
            meet = may_meet(mask, *facing(*map(interval, positions)))
        else:
            meet = _compare_pairs(mask, *positions, "blocks")
    if segments is not None:
        query, key = facing(*(Interval(x.min(-1), x.max(-1)) for x in segments))
        share = (query.low <= key.high) & (key.low <= query.high)
        meet = share if meet is None else meet & share
    return meet


def facing(queries: Interval, keys: Interval) -> tuple[Interval, Interval]:
    return Interval(*(x[:, :, None] for x in queries)), Interval(*(x[:, None, :] for x in keys))


def _compare_pairs(
    mask: AbstractMask,
    queries: Int[Array, "#B x rows"],
    keys: Int[Array, "#B y keys"],
    result: Literal["blocks", "keys"],
) -> Bool[Array, "b _ _"]:
    # Whether pairs of blocks have a visible pair, `[b, x, y]`, or keys are seen by any query, `[b, y, keys]`. One block
    # of pairs is in memory at a time, and is evaluated only if intervals do not determine it.
    mask, queries, keys = vary_together((mask, queries, keys))
    rows, columns = interval(queries), interval(keys)
    may = may_meet(mask, *facing(rows, columns))
    key_range = Interval(keys.min(-1), keys.max(-1))
    all_visible = may & must_meet(mask, *facing(rows, key_range))

    def key_block(block: tuple[Array, Array, Array]) -> Array:
        key, may, all_visible = block

        def query_block(block: tuple[Array, Array, Array]) -> Array:
            query, may, all_visible = block

            def compared() -> Array:
                return visible(mask, query[:, :, None], key[:, None, :]).any(1)

            def known() -> Array:
                return jnp.broadcast_to(all_visible[:, None], (len(all_visible), key.shape[1]))

            return lax.cond((may & ~all_visible).any(), compared, known)

        blocks = queries.swapaxes(0, 1), may.T, all_visible.T
        visible_pairs = lax.map(query_block, blocks)  # [x, b, keys]
        return visible_pairs.any(0) if result == "keys" else visible_pairs.any(-1).swapaxes(0, 1)

    blocks = keys.swapaxes(0, 1), jnp.moveaxis(may, 2, 0), jnp.moveaxis(all_visible, 2, 0)
    return jnp.moveaxis(lax.map(key_block, blocks), 0, 1 if result == "keys" else 2)


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
        whole: how many blocks before a corner have no hidden pair, in the same form.
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
        # the sum over [x0, x1) × [y0, y1) is S(x1, y1) - S(x0, y1) - S(x1, y0) + S(x0, y0)
        (top, bottom), (left, right) = sides
        total = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
        return total, (bottom - top) * (right - left)

    def _past_end(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        return (query.high >= self.query_len) | (key.high >= self.key_len)


def tabulate(
    mask: AbstractMask, query_len: int, key_len: int | None = None, *, block: int = 128
) -> BlockTable:
    r"""Adds to a mask a table of its blocks, to be used in many calls: layers, heads and steps.

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

    Returns:
        A mask that shows the same pairs. Its `mask` is the mask given; if the arrays in it are replaced, the table is
        wrong, and another has to be made. Positions past the table's end are evaluated by the mask itself.

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
    check_mask("mask", mask)
    query_len = check_integer("query_len", query_len, least=1)
    key_len = query_len if key_len is None else check_integer("key_len", key_len, least=1)
    block = check_integer("block", block, least=1)
    leaves, tree = jax.tree.flatten(mask)
    pairs = list(zip(map(jnp.asarray, leaves), mask.ranks, strict=True))
    batched = tree.unflatten([x[None] if x.ndim == rank else x for x, rank in pairs])
    queries, keys = (
        in_blocks(jnp.arange(size, dtype=jnp.int32)[None], block) for size in (query_len, key_len)
    )
    some, hidden = (_compare_pairs(x, queries, keys, "blocks") for x in (batched, Not(batched)))
    tables = _corners(some), _corners(~hidden)
    if all(x.ndim == rank for x, rank in pairs):
        tables = tables[0][0], tables[1][0]
    return BlockTable(mask, *tables, block, query_len, key_len)


def _corners(x: Array) -> Array:
    """The number of true blocks before each corner, `[b, x + 1, y + 1]`."""
    sums = x.astype(np.int32).cumsum(1, dtype=np.int32).cumsum(2, dtype=np.int32)
    return jnp.pad(sums, ((0, 0), (1, 0), (1, 0)))
