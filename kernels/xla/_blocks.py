"""The scores of a call in blocks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..call._operands import Operands, Settings, bound_score, present_keys, zero_absent
from ..call._state import lse_dtype, precision, unfused
from ..scores._abstract import At
from ._block_visibility import BlockVisibility, with_block_positions
from ._grid import (
    BLOCK_SIZES,
    BlockSizes,
    Grid,
    Index,
    grid,
    pad,
    pad_keys,
    pad_queries,
    take_keys,
    take_queries,
)
from ._slice import Corner, add_at, slice_at


class BlockedOperands:
    """The operands of a call, cut by a grid (None: the best for it); a block of scores is `[B, rows, keys]`."""

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
        self.visibility = BlockVisibility(operands, settings, g)
        self.meet = self.visibility.meet
        zeroed = zero_absent(operands)
        self.query = pad_queries(g, zeroed.query)
        self.key = pad_keys(g, zeroed.key)
        self.value = pad_keys(g, zeroed.value)
        present = present_keys(operands)
        if present is not None:
            present = jnp.broadcast_to(present, (present.shape[0], operands.key.shape[1]))
            present = pad(present, 1, g.keys * g.key_blocks)
            present = present.reshape(present.shape[0], g.key_blocks, g.keys)
        self._present = present
        self.bias = self.pad_scores(operands.bias)
        self.mask = self.pad_scores(operands.mask)

    def full(self, fill: float, *shape: int) -> Array:
        """A constant to start a loop with, in the dtype of the scores.

        Inside `jax.shard_map` it varies over the mesh axes of the operands, as loops require.
        """
        return lax.full_like(self.query, fill, dtype=lse_dtype(self.query.dtype), shape=shape)

    def index_of_queries(self, n: Array) -> Index:
        """The index of the `n`-th block of queries, those of a key head being consecutive; `key` is `n`."""
        queries = jnp.asarray(self.grid.query_blocks, n.dtype)
        return Index(lax.div(n, queries), lax.rem(n, queries), n)

    def take_values(self, values: Array, index: Index) -> Array:
        """One block of `values`, padded to whole blocks, with zeros in absent slots."""
        block = take_keys(self.grid, values, index)
        if self._present is None:
            return block
        return jnp.where(self._present[:, index.key, :, None], block, 0)

    def scores(self, index: Index) -> Array:
        """The scores of one block, `[B, rows, keys]`, minus infinity where a key is hidden."""
        query, key = (
            take_queries(self.grid, self.query, index),
            take_keys(self.grid, self.key, index),
        )
        return self.scores_of(query, key, index)

    def scores_of(self, query: Array, key: Array, index: Index) -> Array:
        """`scores`, from the queries and keys of the block."""
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
        """The cotangents `[B, W, keys]` of keys from those of products and scores; queries `[B, W, rows]`."""
        width = self.settings.scored_width
        if width is None:
            return self.product(queries, d_raw)
        pairs = zip(_both_sides(width), (d_raw, d_scores), strict=True)
        return jnp.concatenate(
            [self.product(queries[:, x], cotangents) for x, cotangents in pairs], -2
        )

    def to_queries(self, keys: Array, d_raw: Array, d_scores: Array) -> Array:
        """The cotangents `[B, rows, W]` of queries from those of products and scores; keys `[B, keys, W]`."""
        width = self.settings.scored_width
        if width is None:
            return self.product(d_raw, keys)
        pairs = zip(_both_sides(width), (d_raw, d_scores), strict=True)
        return jnp.concatenate(
            [self.product(cotangents, keys[..., x]) for x, cotangents in pairs], -1
        )

    def indices(self, index: Index) -> At:
        """Batch, head and positions of the scores of a block, for a score."""
        g = self.grid
        index = Index(*(x.astype(jnp.int32) for x in index))
        batch = jnp.arange(self.query.shape[0], dtype=jnp.int32)
        head = index.head * g.group + jnp.arange(g.group, dtype=jnp.int32)
        batch = batch if self._batches is None else self._batches
        head = head if self._heads is None else self._heads[head]
        head = jnp.repeat(head, g.queries)[None, :, None]
        if self.settings.score is None or not self.settings.score.compares:
            return At(batch[:, None, None], head, None, None)  # pyright: ignore[reportArgumentType]
        return At(batch[:, None, None], head, *self.visibility.positions(index))

    def masked(self, scores: Array, added: Array | None, index: Index) -> Array:
        """The scores of a block plus `added`, minus infinity where a key is hidden."""
        if added is not None:
            scores = scores + added
        if self.bias is not None:
            scores = scores + self.score_block(self.bias, index).astype(scores.dtype)
        if self.mask is not None:
            scores = jnp.where(self.score_block(self.mask, index), scores, -jnp.inf)
        return self.visibility.hide(scores, index)

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
        """Adds the gradient of one block of scores to that of the (padded) bias."""
        g = self.grid
        start, sizes = self._corner(total.shape, index)
        block = block.reshape(-1, g.group, g.queries, g.keys)
        axes = tuple(i for i in range(4) if sizes[i] == 1 and block.shape[i] > 1)
        return add_at(total, block.sum(axes, keepdims=True), start)


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

    return each_entry(dot, a, b)


def each_entry(f: Callable[..., Any], first: Array, *rest: Array | None) -> Any:
    """`jax.vmap(f)`; for a batch of one, `f` without a batch axis, which XLA:CPU runs faster."""
    if first.shape[0] != 1:
        return jax.vmap(f)(first, *rest)
    out = f(first[0], *(x if x is None else x[0] for x in rest))
    return jax.tree.map(lambda x: x[None], out)
