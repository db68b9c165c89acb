"""Sums or maxima over keys, block by block, which JAX differentiates to any order without storing a block."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, PyTree

from ..call._operands import Operands
from ..call._state import lse_dtype
from ._blocks import BlockedOperands
from ._grid import Index, cut_keys, cut_queries, join_queries, numbers

Arrays = tuple[Array, ...]
# From the index of a block, its queries and keys, and trees of more arrays of its rows [B, rows, W]
# and of its keys [B, keys, W], to terms [B, rows, width].
BlockFunction = Callable[[Index, Array, Array, Any, Any], Arrays]


def reduced_of_nothing(operands: Operands, start: float, widths: tuple[int, ...]) -> Arrays | None:
    """The result of `reduce_blocks` for a call with an empty axis; None for others."""
    (batch, query_len, heads), key_len = operands.query.shape[:3], operands.key.shape[1]
    if 0 not in (batch, query_len, key_len):
        return None
    dtype, shape = lse_dtype(operands.query.dtype), (batch, query_len, heads)
    return tuple(
        lax.full_like(operands.query, start, dtype=dtype, shape=(*shape, width)) for width in widths
    )


def reduce_blocks(
    block_terms: BlockFunction,
    join: Callable[[Array, Array], Array],
    start: float,
    widths: tuple[int, ...],
    blocks: BlockedOperands,
    query_len: int,
    rows: PyTree[Array],
    keys: PyTree[Array],
) -> Arrays:
    """The terms of all blocks of keys joined, `[B, T, N, width]` for each of `widths`.

    `rows` is a tree of `[B, T, N, W]`, and `keys` of `[B, S, K, W]`. A block in which no query sees a key is skipped.
    """
    g, batch = blocks.grid, blocks.query.shape[0]
    # The results of rows that pad the last block are dropped.
    rows = jax.tree.map(lambda x: cut_queries(g, x), (blocks.query, rows))
    keys = jax.tree.map(lambda x: cut_keys(g, x), (blocks.key, keys))

    def no_terms() -> Arrays:
        return tuple(blocks.full(start, batch, g.rows, width) for width in widths)

    # A derivative stores the arguments and recomputes the block.
    @jax.checkpoint
    def one_block(index: Index, query: Array, key: Array, rows: Any, keys: Any) -> Arrays:
        def visible() -> Arrays:
            # again, as JAX stores numbers of a branch that the derivative does not depend on, such as its mask
            return jax.checkpoint(block_terms)(index, query, key, rows, keys)

        meet = blocks.meet(index)
        return visible() if meet is None else lax.cond(meet, visible, no_terms)

    # Blocks are scanned inputs, so that the transposed loops return the cotangents of each block.
    def one_head(taken: tuple[Any, ...]) -> Arrays:
        h, rows, keys = taken

        def one_block_of_queries(taken: tuple[Any, ...]) -> Arrays:
            i, (query, rows) = taken

            def one_block_of_keys(carry: Arrays, taken: tuple[Any, ...]) -> Any:
                j, (key, keys) = taken
                terms = one_block(Index(h, i, j), query, key, rows, keys)
                return tuple(map(join, carry, terms)), None

            over = numbers(g.key_blocks), keys
            return lax.scan(one_block_of_keys, no_terms(), over)[0]

        return lax.map(one_block_of_queries, (numbers(g.query_blocks), rows))

    over = numbers(g.kv_heads), rows, keys
    return tuple(join_queries(g, x, query_len) for x in lax.map(one_head, over))
