"""The scores of a call in blocks, which keys of a block each of its queries sees, and sums over blocks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from .._slice import Corner, add_at, slice_at
from .._varying import vary_together
from ..call._operands import (
    Operands,
    Settings,
    all_meet,
    bound,
    bound_score,
    hide_unreachable,
    present_keys,
    zero_absent,
)
from ..call._state import lse_dtype, precision, unfused
from ..masks._abstract import Interval
from ..masks._visibility import may_meet, meeting, visible
from ..scores._abstract import ScoreIndices
from ._grid import BLOCK_SIZES, BlockSizes, Grid, Index, grid, numbers, pad


def with_block_positions(operands: Operands, settings: Settings, grid: Grid) -> Operands:
    """Operands with the positions that blocks read; None where a block computes them from its index."""
    if all_meet(operands, settings):
        return operands
    operands = hide_unreachable(operands, settings)
    # keys that pad the last block are absent
    return operands.positioned(settings.uses_positions or _pads(grid, operands))


def _pads(grid: Grid, operands: Operands) -> bool:
    return grid.keys * grid.key_blocks != operands.key.shape[1]


class BlockedOperands:
    """The operands of a call, split by a grid (None: chosen by sizes); a block of scores is `[B, rows, keys]`."""

    def __init__(
        self,
        operands: Operands,
        settings: Settings,
        sizes: BlockSizes = BLOCK_SIZES,
        on: Grid | None = None,
    ):
        self.grid = g = on or grid(operands, settings.mask, sizes)
        self.settings = settings
        self.score = bound_score(settings, operands)
        self._batches, self._heads = operands.indices
        exact = precision(operands.query.dtype)
        extras = self.score, operands.bias, settings.scored_width
        self._plain = settings.scale > 0 and all(x is None for x in extras)
        # Positive, so that the largest score has the largest multiple.
        self.unit = settings.scale if self._plain else 1.0
        self.outer = functools.partial(outer, precision=exact)
        self.product = functools.partial(product, precision=exact)
        self.operands = operands = with_block_positions(operands, settings, g)
        zeroed = zero_absent(operands)
        self.query = g.pad_queries(zeroed.query)
        self.key, self.value = g.pad_keys(zeroed.key), g.pad_keys(zeroed.value)
        self._lengths = operands.query.shape[1], operands.key.shape[1]
        present = present_keys(operands)
        if present is not None:
            present = jnp.broadcast_to(present, (present.shape[0], self._lengths[1]))
            present = g.pad_keys(present).reshape(present.shape[0], g.key_blocks, g.keys)
        self._present = present
        self.bias, self.mask = self.pad_scores(operands.bias), self.pad_scores(operands.mask)
        self._pads, self._rule = _pads(g, operands), bound(settings, operands)
        tokens = operands.tokens
        self._positions = self._cut(tokens.query_positions, tokens.key_positions, -1)
        self._segments = self._cut(tokens.query_segments, tokens.key_segments, 0)
        meet = meeting(self._rule, self._positions, self._segments)
        self._meet = None if meet is None else meet.any(0)

    def _cut(
        self, queries: Array | None, keys: Array | None, fill: int
    ) -> tuple[Array, Array] | None:
        if queries is None or keys is None:
            return None
        g = self.grid
        queries = g.pad_queries(queries, fill).reshape(-1, g.query_blocks, g.queries)
        return queries, g.pad_keys(keys, fill).reshape(-1, g.key_blocks, g.keys)

    def full(self, fill: float, *shape: int) -> Array:
        """A constant to start a loop with, in the dtype of the scores.

        Inside `jax.shard_map` it varies over the mesh axes of the operands, as loops require.
        """
        return lax.full_like(self.query, fill, dtype=lse_dtype(self.query.dtype), shape=shape)

    def index_of_queries(self, n: Array) -> Index:
        """The index of the `n`-th block of queries, which come head after head; `key` is `n`."""
        queries = jnp.asarray(self.grid.query_blocks, n.dtype)
        return Index(lax.div(n, queries), lax.rem(n, queries), n)

    def take_values(self, values: Array, index: Index) -> Array:
        """One block of `values`, padded to whole blocks, with zeros in absent slots."""
        block = self.grid.take_keys(values, index)
        if self._present is None:
            return block
        return jnp.where(self._present[:, index.key, :, None], block, 0)

    def scores_of(self, query: Array, key: Array, index: Index) -> Array:
        """The scores of one block, `[B, rows, keys]`, minus infinity where a key is hidden."""
        # s = g(scale q·k) + ζ·v + b, minus infinity where hidden
        raw, added = self.products(query, key)
        if self.score is not None:
            raw = self.score(raw, self.indices(index))
        return self.masked(raw, added, index)

    def unscaled(self, query: Array, key: Array, index: Index) -> Array:
        """`scores_of` divided by `unit`; XLA cannot fuse the multiplication with a following subtraction."""
        if self._plain:
            return self.masked(self.outer(query, key), None, index)
        return unfused(self.scores_of(query, key, index))

    def products(self, query: Array, key: Array) -> tuple[Array, Array | None]:
        """The scaled products that a block's scores are a function of, and those added to the scores."""
        scale, width = self.settings.scale, self.settings.scored_width
        if width is None:
            return self.outer(query, key) * scale, None
        scored, added = (self.outer(query[..., x], key[..., x]) for x in _both_sides(width))
        return scored * scale, added * scale

    def to_keys(self, queries: Array, d_raw: Array, d_scores: Array) -> Array:
        """Cotangents of keys, `[B, W, keys]`, given queries `[B, W, rows]` and cotangents of products and scores."""
        # Σ_i ds_i q_i; features of a source have cotangents of the scores, not of the products
        width = self.settings.scored_width
        if width is None:
            return self.product(queries, d_raw)
        pairs = zip(_both_sides(width), (d_raw, d_scores), strict=True)
        return jnp.concatenate([self.product(queries[:, x], y) for x, y in pairs], -2)

    def to_queries(self, keys: Array, d_raw: Array, d_scores: Array) -> Array:
        """Cotangents of queries, `[B, rows, W]`, given keys `[B, keys, W]` and cotangents of products and scores."""
        # Σ_a ds_a k_a, with the same split
        width = self.settings.scored_width
        if width is None:
            return self.product(d_raw, keys)
        pairs = zip(_both_sides(width), (d_raw, d_scores), strict=True)
        return jnp.concatenate([self.product(y, keys[..., x]) for x, y in pairs], -1)

    def indices(self, index: Index) -> ScoreIndices:
        """Batch, head and positions of the scores of a block, for a score."""
        g = self.grid
        index = Index(*(x.astype(jnp.int32) for x in index))
        batch = jnp.arange(self.query.shape[0], dtype=jnp.int32)
        head = index.head * g.group + jnp.arange(g.group, dtype=jnp.int32)
        batch = batch if self._batches is None else self._batches
        head = head if self._heads is None else self._heads[head]
        head = jnp.repeat(head, g.queries)[None, :, None]
        if self.settings.score is None or not self.settings.score.uses_positions:
            return ScoreIndices(batch[:, None, None], head, None, None)  # pyright: ignore[reportArgumentType]
        return ScoreIndices(batch[:, None, None], head, *self.positions(index))

    def masked(self, scores: Array, added: Array | None, index: Index) -> Array:
        """The scores of a block plus `added`, minus infinity where a key is hidden."""
        if added is not None:
            scores = scores + added
        if self.bias is not None:
            scores = scores + self.score_block(self.bias, index).astype(scores.dtype)
        if self.mask is not None:
            scores = jnp.where(self.score_block(self.mask, index), scores, -jnp.inf)
        return self._hide(scores, index)

    def meet(self, index: Index) -> Bool[Array, ""] | None:
        """Whether any query of the block may see any of its keys; None if all do."""
        meet, g = None if self._meet is None else self._meet[index.query, index.key], self.grid
        counts = self._positions is None and self.settings.mask.constrains
        if not counts or g.query_blocks * g.key_blocks == 1:
            return meet
        first = self._first(index)
        sizes = zip(first, (g.queries, g.keys), self._lengths, strict=True)
        last = (jnp.minimum(x + size, length) - 1 for x, size, length in sizes)
        by_position = may_meet(self._rule, *map(Interval, first, last))
        return by_position if meet is None else meet & by_position

    def _first(self, index: Index) -> tuple[Array, Array]:
        queries, keys = (jnp.asarray(x, jnp.int32) for x in index[1:])
        return queries * self.grid.queries, keys * self.grid.keys

    def positions(self, index: Index) -> tuple[Array, Array]:
        """The positions of a block's rows and keys, `[B or 1, rows, 1]` and `[B or 1, 1, keys]`."""
        if self._positions is not None:
            return self._facing(self._positions, index)
        g = self.grid
        sizes = (g.queries, g.query_blocks), (g.keys, g.key_blocks)
        queries, keys = (
            _counted(first, *size, length)
            for first, size, length in zip(self._first(index), sizes, self._lengths, strict=True)
        )
        return jnp.tile(queries, g.group)[None, :, None], keys[None, None, :]

    def _hide(self, scores: Array, index: Index) -> Array:
        if self._positions is not None:
            is_visible = visible(self._rule, *self.positions(index))
            scores = jnp.where(is_visible, scores, -jnp.inf)
        elif self.settings.mask.constrains or self._pads:
            queries, keys = self.positions(index)
            if self.settings.mask.constrains:
                scores = jnp.where(self._rule.visible(queries, keys), scores, -jnp.inf)
            if self._pads:
                scores = jnp.where(keys >= 0, scores, -jnp.inf)
        if self._segments is not None:
            queries, keys = self._facing(self._segments, index)
            scores = jnp.where(queries == keys, scores, -jnp.inf)
        return scores

    def _facing(self, numbers: tuple[Array, Array], index: Index) -> tuple[Array, Array]:
        queries, keys = (x[:, i] for x, i in zip(numbers, index[1:], strict=True))
        return jnp.tile(queries, (1, self.grid.group))[:, :, None], keys[:, None, :]

    def pad_scores(self, x: Array | None) -> Array | None:
        """An array that broadcasts to the scores, padded to whole blocks."""
        if x is None:
            return None
        g = self.grid
        x = x if x.shape[2] == 1 else pad(x, 2, g.queries * g.query_blocks)
        return x if x.shape[3] == 1 else pad(x, 3, g.keys * g.key_blocks)

    def score_block(self, x: Array, index: Index) -> Array:
        """One block `[B, rows, keys]` of an array that `pad_scores` returns."""
        g = self.grid
        block = slice_at(x, *self._corner(x.shape, index))
        block = jnp.broadcast_to(block, (x.shape[0], g.group, g.queries, g.keys))
        return block.reshape(x.shape[0], g.rows, g.keys)

    def _corner(self, shape: tuple[int, ...], index: Index) -> tuple[Corner, tuple[int, ...]]:
        g = self.grid
        steps = (g.group, g.queries, g.keys)
        start = (
            i * step if n > 1 else 0 * i for n, i, step in zip(shape[1:], index, steps, strict=True)
        )
        sizes = (min(n, step) for n, step in zip(shape[1:], steps, strict=True))
        return (0 * index.head, *start), (shape[0], *sizes)

    def add_to_bias(self, total: Array, block: Array, index: Index) -> Array:
        """Adds the gradient of one block of scores to the gradient of the padded bias."""
        g = self.grid
        start, sizes = self._corner(total.shape, index)
        block = block.reshape(-1, g.group, g.queries, g.keys)
        axes = tuple(i for i in range(4) if sizes[i] == 1 and block.shape[i] > 1)
        return add_at(total, block.sum(axes, keepdims=True), start)


def _counted(first: Array, size: int, blocks: int, length: int) -> Array:
    """Consecutive positions from `first` on; -1 for the padding of the last block."""
    positions = first + jnp.arange(size, dtype=jnp.int32)
    return positions if size * blocks == length else jnp.where(positions < length, positions, -1)


def _both_sides(width: int) -> tuple[slice, slice]:
    return slice(width), slice(width, None)


def outer(a: Array, b: Array, precision: lax.Precision | None) -> Array:
    """`a bᵀ` of `[B, m, w]` and `[B, n, w]`, accumulated in float32 or wider."""
    return _dot(a, b, (1, 1), precision)


def product(a: Array, b: Array, precision: lax.Precision | None) -> Array:
    """`a b` of `[B, m, k]` and `[B, k, n]`, accumulated in float32 or wider."""
    return _dot(a, b, (1, 0), precision)


def _dot(a: Array, b: Array, contract: tuple[int, int], precision: lax.Precision | None) -> Array:
    def dot(a: Array, b: Array) -> Array:
        axes = ((contract[0],), (contract[1],)), ((), ())
        dtype = lse_dtype(a.dtype)
        return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=dtype)

    # XLA:CPU runs products without a batch axis faster
    return dot(a[0], b[0])[None] if a.shape[0] == 1 else jax.vmap(dot)(a, b)


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
    rows = jax.tree.map(lambda x: g.cut_queries(x), (blocks.query, rows))
    keys = jax.tree.map(lambda x: g.cut_keys(x), (blocks.key, keys))

    def no_terms() -> Arrays:
        return tuple(blocks.full(start, batch, g.rows, width) for width in widths)

    # A derivative stores the arguments and recomputes the block.
    @jax.checkpoint
    def one_block(index: Index, query: Array, key: Array, rows: Any, keys: Any) -> Arrays:
        def visible() -> Arrays:
            # checkpointed again: JAX stores residuals of a branch that its derivative does not need, such as the mask
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
    return tuple(g.join_queries(x, query_len) for x in lax.map(one_head, over))


def score_sums(
    block_sums: Callable[..., Array],
    width: int,
    settings: Settings,
    operands: Operands,
    *rows: Float[Array, "B T N _"],
    join: Callable[[Array, Array], Array] = jnp.add,
    start: float = 0.0,
) -> Float[Array, "B T N width"]:
    """The sum over all keys of `block_sums(scores, value, *rows)`, `[B, rows, width]` for each block.

    `join` merges the results of two blocks, beginning with `start`.
    """
    operands, rows = vary_together((operands, rows))
    empty = reduced_of_nothing(operands, start, (width,))
    if empty is not None:
        return empty[0]
    blocks = BlockedOperands(operands, settings)

    def terms(index: Index, query: Array, key: Array, rows: Any, keys: Any) -> Arrays:
        return (block_sums(blocks.scores_of(query, key, index), *keys, *rows),)

    query_len, dtype = operands.query.shape[1], lse_dtype(operands.query.dtype)
    values = (blocks.value.astype(dtype),)
    return reduce_blocks(terms, join, start, (width,), blocks, query_len, rows, values)[0]


def larger(x: Array, y: Array) -> Array:
    """The larger of two numbers, NaN if one is, with the derivative of one of them; see `score_maximum`."""
    return jnp.where((x >= y) | jnp.isnan(x), x, y)


def score_maximum(settings: Settings, operands: Operands) -> Float[Array, "B T N"]:
    r"""The largest score of each row, $\max_a s_a$; minus infinity for a fully masked row.

    The derivative is that of one of the largest scores.
    """
    # By its number: JAX's derivative of a maximum looks for entries that equal it, and XLA may round a score that it
    # computes twice in two ways.

    def largest(scores: Array, value: Array) -> Array:
        del value
        chosen = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
        chosen = chosen == lax.argmax(scores, scores.ndim - 1, jnp.int32)[..., None]
        return jnp.where(chosen, scores, 0.0).sum(-1, keepdims=True)

    return score_sums(largest, 1, settings, operands, join=larger, start=-jnp.inf)[..., 0]
