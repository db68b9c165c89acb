"""The scores of a call in blocks."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..call._operands import (
    Operands,
    Settings,
    bound_score,
    present_keys,
    zero_absent,
)
from ..call._state import lse_dtype, precision, unfused
from ..scores._abstract import At
from ._block_visibility import BlockVisibility, with_block_positions
from ._entries import each_entry
from ._grid import (
    BLOCK_SIZES,
    BlockSizes,
    grid,
    pad,
    take_keys,
    take_queries,
    whole_keys,
    whole_queries,
)
from ._index import Index
from ._slice import Corner, add_at, slice_at


class BlockedOperands:
    """The operands of a call, cut by a grid; a block of scores is `[B, rows, keys]`."""

    def __init__(self, operands: Operands, settings: Settings, sizes: BlockSizes = BLOCK_SIZES):
        self.grid = g = grid(operands, settings.mask, sizes)
        self.settings = settings
        self.score = bound_score(settings, operands)
        self._batches, self._heads = operands.batch_indices, operands.head_indices
        exact = precision(operands.query.dtype)
        given = self.score, operands.bias, settings.scored_width
        self._plain = settings.scale > 0 and all(x is None for x in given)
        # Positive, so that the largest score has the largest multiple.
        self.unit = settings.scale if self._plain else 1.0
        self.outer = functools.partial(outer, precision=exact)
        self.product = functools.partial(product, precision=exact)
        self.operands = operands = with_block_positions(operands, settings, g)
        self.visibility = BlockVisibility(operands, settings, g)
        self.meet = self.visibility.meet
        clear = zero_absent(operands)
        self.query = whole_queries(g, clear.query)
        self.key = whole_keys(g, clear.key)
        self.value = whole_keys(g, clear.value)
        shown = present_keys(operands)
        if shown is not None:
            shown = jnp.broadcast_to(shown, (shown.shape[0], operands.key.shape[1]))
            shown = pad(shown, 1, g.keys * g.key_blocks)
            shown = shown.reshape(shown.shape[0], g.key_blocks, g.keys)
        self._shown = shown
        self.bias = self.pad_scores(operands.bias)
        self.mask = self.pad_scores(operands.mask)

    def full(self, fill: float, *shape: int) -> Array:
        """A constant to start a loop with, in the dtype of the scores.

        Inside `jax.shard_map` it varies over the mesh axes of the operands, as loops require.
        """
        return lax.full_like(self.query, fill, dtype=lse_dtype(self.query.dtype), shape=shape)

    def index_of_queries(self, n: Array) -> Index:
        """The `n`-th block of queries, those of a key head together; its keys are to be named."""
        queries = jnp.asarray(self.grid.query_blocks, n.dtype)
        return Index(lax.div(n, queries), lax.rem(n, queries), n)

    def take_values(self, values: Array, at: Index) -> Array:
        """One block of `values`, whole blocks of the operands', with zeros in absent slots."""
        block = take_keys(self.grid, values, at)
        return (
            block if self._shown is None else jnp.where(self._shown[:, at.key, :, None], block, 0)
        )

    def scores(self, at: Index) -> Array:
        """The scores of one block, `[B, rows, keys]`, minus infinity where a key is hidden."""
        query, key = take_queries(self.grid, self.query, at), take_keys(self.grid, self.key, at)
        return self.scores_of(query, key, at)

    def scores_of(self, query: Array, key: Array, at: Index) -> Array:
        """The same from the queries and keys of the block."""
        raw, added = self.products(query, key)
        if self.score is not None:
            raw = self.score(raw, self.indices(at))
        return self.masked(raw, added, at)

    def unscaled(self, query: Array, key: Array, at: Index) -> Array:
        """`scores_of` divided by `unit`: numbers that are rounded, whatever XLA fuses with a product."""
        if self._plain:
            return self.masked(self.outer(query, key), None, at)
        return unfused(self.scores_of(query, key, at))

    def products(self, query: Array, key: Array) -> tuple[Array, Array | None]:
        """The scaled products of a block that its scores are of, and those that are added to them."""
        scale, width = self.settings.scale, self.settings.scored_width
        if width is None:
            return self.outer(query, key) * scale, None
        scored, added = (self.outer(query[..., x], key[..., x]) for x in _both_sides(width))
        return scored * scale, added * scale

    def to_keys(self, queries: Array, to_raw: Array, to_scores: Array) -> Array:
        """The cotangents `[B, W, keys]` of keys by those of products and scores; queries `[B, W, rows]`."""
        width = self.settings.scored_width
        if width is None:
            return self.product(queries, to_raw)
        pairs = zip(_both_sides(width), (to_raw, to_scores), strict=True)
        return jnp.concatenate([self.product(queries[:, x], to) for x, to in pairs], -2)

    def to_queries(self, keys: Array, to_raw: Array, to_scores: Array) -> Array:
        """The cotangents `[B, rows, W]` of queries likewise; keys `[B, keys, W]`."""
        width = self.settings.scored_width
        if width is None:
            return self.product(to_raw, keys)
        pairs = zip(_both_sides(width), (to_raw, to_scores), strict=True)
        return jnp.concatenate([self.product(to, keys[..., x]) for x, to in pairs], -1)

    def indices(self, at: Index) -> At:
        """Batch, head and positions of the scores of a block, for a score."""
        g = self.grid
        at = Index(*(x.astype(jnp.int32) for x in at))
        batch = jnp.arange(self.query.shape[0], dtype=jnp.int32)
        head = at.head * g.group + jnp.arange(g.group, dtype=jnp.int32)
        batch = batch if self._batches is None else self._batches
        head = head if self._heads is None else self._heads[head]
        head = jnp.repeat(head, g.queries)[None, :, None]
        if self.settings.score is None or not self.settings.score.compares:
            return At(batch[:, None, None], head, None, None)  # pyright: ignore[reportArgumentType]
        return At(batch[:, None, None], head, *self.visibility.positions(at))

    def masked(self, scores: Array, added: Array | None, at: Index) -> Array:
        """The scores of a block with what is added, minus infinity where a key is hidden."""
        if added is not None:
            scores = scores + added
        if self.bias is not None:
            scores = scores + self.score_block(self.bias, at).astype(scores.dtype)
        if self.mask is not None:
            scores = jnp.where(self.score_block(self.mask, at), scores, -jnp.inf)
        return self.visibility.hide(scores, at)

    def pad_scores(self, x: Array | None) -> Array | None:
        """An array that broadcasts to the scores, padded to whole blocks."""
        if x is None:
            return None
        g = self.grid
        x = x if x.shape[2] == 1 else pad(x, 2, g.queries * g.query_blocks)
        return x if x.shape[3] == 1 else pad(x, 3, g.keys * g.key_blocks)

    def score_block(self, x: Array, at: Index) -> Array:
        """One block `[B, rows, keys]` of an array that `pad_scores` returns."""
        g = self.grid
        block = slice_at(x, *self._corner(x.shape, at))
        block = jnp.broadcast_to(block, (x.shape[0], g.group, g.queries, g.keys))
        return block.reshape(x.shape[0], g.rows, g.keys)

    def _corner(self, shape: tuple[int, ...], at: Index) -> tuple[Corner, tuple[int, ...]]:
        g = self.grid
        steps = (g.group, g.queries, g.keys)
        start = (
            i * step if n > 1 else 0 * i for n, i, step in zip(shape[1:], at, steps, strict=True)
        )
        sizes = (min(n, step) for n, step in zip(shape[1:], steps, strict=True))
        return (0 * at.head, *start), (shape[0], *sizes)

    def add_to_bias(self, total: Array, block: Array, at: Index) -> Array:
        """Adds the gradient of one block of scores to that of the (padded) bias."""
        g = self.grid
        start, sizes = self._corner(total.shape, at)
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


def inner(a: Array, b: Array, precision: lax.Precision | None) -> Array:
    """`aᵀ b` of `[B, k, m]` and `[B, k, n]`, accumulated in float32 or wider."""
    return _dot(a, b, (0, 0), precision)


def _dot(a: Array, b: Array, contract: tuple[int, int], precision: lax.Precision | None) -> Array:
    def dot(a: Array, b: Array) -> Array:
        axes = ((contract[0],), (contract[1],)), ((), ())
        dtype = lse_dtype(a.dtype)
        return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=dtype)

    return each_entry(dot, a, b)
