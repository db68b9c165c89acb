"""Scores in blocks: how operands are cut, and which blocks are computed."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from ..call._operands import (
    Operands,
    Settings,
    bound,
    bound_score,
    hide_unreachable,
    is_static,
    positioned,
    present_keys,
    zero_absent,
)
from ..call._state import lse_dtype, precision
from ..masks._structure import Structure
from ..masks._visibility import meeting, visible
from ..scores._abstract import At
from ._index import Index, entry


class BlockSizes(NamedTuple):
    """How large blocks may be; static.

    The defaults were chosen by measurement: large enough for matrix products at full speed, small
    enough to stay in a CPU's cache.

    Attributes:
        rows: query rows in a block, of all heads that share a key head and of the whole batch. (The
            batch stays in one block, so that one that is sharded over devices stays where it is.)
        least_rows: query rows of each batch entry, even if a block then has more than `rows`.
        keys: keys in a block.
        keys_of_few_rows: keys in a block of at most half of `rows`.
        sparse: most rows and keys in a block under a rule that its sides do not tell, so that more blocks
            are skipped. As fast as larger ones (CPU), which need fewer products of statistics.
    """

    rows: int = 2048
    least_rows: int = 256
    keys: int = 512
    keys_of_few_rows: int = 1024
    sparse: int = 512


BLOCK_SIZES = BlockSizes()


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
        """The number of query rows in a block."""
        return self.group * self.queries


def grid(operands: Operands, rule: Structure, sizes: BlockSizes) -> Grid:
    """The grid with the fewest blocks within `sizes`, evenly filled, or of whole blocks of a table.

    Under a rule that hides what comes later the numbers of blocks are even, so that no block holds parts of both of the
    two distant pieces of a sequence that the zigzag layout puts on a device.
    """
    batch, query_len, heads, _ = operands.query.shape
    key_len, kv_heads = operands.key.shape[1:3]
    group = heads // kv_heads
    rows = sizes.rows if rule.sided else min(sizes.rows, sizes.sparse)
    least = min(sizes.least_rows, rows)
    most = max(rows // max(batch, 1), least) if is_static(batch) else least
    causal = rule.sides[1] == 0
    queries, query_blocks = _cut(query_len, group, most, causal, rule.block)
    few = is_static(batch) and 2 * batch * group * queries <= sizes.rows
    most = sizes.keys_of_few_rows if few else sizes.keys
    most = most if rule.sided else min(most, sizes.sparse)
    keys, key_blocks = _cut(key_len, 1, most, causal, rule.block)
    return Grid(kv_heads, group, queries, query_blocks, keys, key_blocks)


def _cut(size: int, group: int, most: int, even: bool, unit: int | None) -> tuple[int, int]:
    """The length of a block of at most `most // group`, and the number of blocks.

    If it is in whole units, of which one may have twice as many, blocks of a table are not cut.
    """
    if unit is not None and is_static(size) and unit * group <= 2 * most and unit < size:
        length = max(most // group // unit, 1) * unit
        return min(length, size), math.ceil(size / length)
    if not is_static(size):
        length = max(most // group, 1)
        return length, -(-size // length)
    blocks = min(size, _number(size * group, most, even))
    return math.ceil(size / max(blocks, 1)), blocks


def _number(size: int, most: int, even: bool) -> int:
    blocks = math.ceil(size / most)
    return blocks + blocks % 2 if even and 2 * size > most else blocks


def cut_queries(grid: Grid, x: Array, fill: int | float = 0) -> Array:
    """`[B, T, N, W]` to `[K, blocks, B, rows, W]`, rows ordered by (head of the group, time)."""
    batch, _, heads, width = x.shape
    x = _pad(x, 1, grid.queries * grid.query_blocks, fill)
    x = x.reshape(batch, grid.query_blocks, grid.queries, grid.kv_heads, grid.group, width)
    x = x.transpose(3, 1, 0, 4, 2, 5)
    return x.reshape(grid.kv_heads, grid.query_blocks, batch, grid.rows, width)


def join_queries(grid: Grid, x: Array, query_len: int) -> Array:
    """The inverse of `cut_queries`: `[K, blocks, B, rows, W]` to `[B, T, N, W]`."""
    batch, width = x.shape[2], x.shape[-1]
    x = x.reshape(grid.kv_heads, grid.query_blocks, batch, grid.group, grid.queries, width)
    x = x.transpose(2, 1, 4, 0, 3, 5)
    x = x.reshape(batch, grid.query_blocks * grid.queries, grid.kv_heads * grid.group, width)
    return x[:, :query_len]


def cut_keys(grid: Grid, x: Array) -> Array:
    """`[B, S, K, W]` to `[K, blocks, B, keys, W]`."""
    batch, _, kv_heads, width = x.shape
    x = whole_blocks(grid, x)
    x = x.reshape(batch, grid.key_blocks, grid.keys, kv_heads, width)
    return x.transpose(3, 1, 0, 2, 4)


def whole_blocks(grid: Grid, x: Array) -> Array:
    """`[B, S, K, W]` padded to whole blocks of keys."""
    return _pad(x, 1, grid.keys * grid.key_blocks)


def take_keys(grid: Grid, x: Array, at: Index) -> Array:
    """One block `[B, keys, W]` of `whole_blocks`, with no copy of the others."""
    batch, _, _, width = x.shape
    zero = jnp.zeros_like(at.key)
    corner = zero, at.key * grid.keys, at.head, zero
    # In JAX 0.8 to 0.10 XLA:CPU slices 16-bit floats through a float32 copy of the whole array (see the
    # compiled HLO), but integers without.
    bits = lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x
    block = lax.dynamic_slice(bits, corner, (batch, grid.keys, 1, width))
    return lax.bitcast_convert_type(block, x.dtype).reshape(batch, grid.keys, width)


def join_keys(grid: Grid, x: Array, key_len: int) -> Array:
    """The inverse of `cut_keys`: `[K, blocks, B, keys, W]` to `[B, S, K, W]`."""
    batch, width = x.shape[2], x.shape[-1]
    x = x.transpose(2, 1, 3, 0, 4)
    return x.reshape(batch, grid.key_blocks * grid.keys, grid.kv_heads, width)[:, :key_len]


def _pad(x: Array, axis: int, size: int, fill: int | float = 0) -> Array:
    missing = size - x.shape[axis]
    if missing == 0:
        return x
    widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill)


class BlockedOperands:
    """The operands of a call, cut by a grid; a block of scores is `[B, rows, keys]`."""

    def __init__(self, operands: Operands, settings: Settings, sizes: BlockSizes = BLOCK_SIZES):
        self.grid = g = grid(operands, settings.rule, sizes)
        self.settings = settings
        self.rule = bound(settings, operands)
        self.score = bound_score(settings, operands)
        self._batches, self._heads = operands.batch_indices, operands.head_indices
        exact = precision(operands.query.dtype)
        self.outer = functools.partial(outer, precision=exact)
        self.product = functools.partial(product, precision=exact)
        operands = hide_unreachable(operands, settings)
        clear = zero_absent(operands)
        self.query = cut_queries(g, clear.query)
        self.key = cut_keys(g, clear.key)
        self.value = cut_keys(g, clear.value)
        shown = present_keys(operands)
        if shown is not None:
            shown = jnp.broadcast_to(shown, (shown.shape[0], operands.key.shape[1]))
            shown = _pad(shown, 1, g.keys * g.key_blocks)
            shown = shown.reshape(shown.shape[0], g.key_blocks, g.keys)
        self._shown = shown
        self.bias = self.pad_scores(operands.bias)
        self.mask = self.pad_scores(operands.mask)
        padded = g.keys * g.key_blocks != operands.key.shape[1]
        if padded and settings.compares:
            operands = positioned(operands)
        query_positions, key_positions = operands.query_positions, operands.key_positions
        if padded and key_positions is None:
            # keys that pad the last block are absent
            query_positions = jnp.zeros((1, operands.query.shape[1]), jnp.int32)
            key_positions = jnp.zeros((1, operands.key.shape[1]), jnp.int32)
        self.positions = self.segments = None
        if query_positions is not None and key_positions is not None:
            self.positions = self._cut(query_positions, key_positions, fill=-1)
        if operands.query_segments is not None and operands.key_segments is not None:
            self.segments = self._cut(operands.query_segments, operands.key_segments, fill=0)
        meet = meeting(self.rule, self.positions, self.segments)
        self._meet = None if meet is None else meet.any(0)

    def _cut(self, queries: Array, keys: Array, fill: int) -> tuple[Array, Array]:
        g = self.grid
        queries = _pad(queries, 1, g.queries * g.query_blocks, fill)
        keys = _pad(keys, 1, g.keys * g.key_blocks, fill)
        return queries.reshape(-1, g.query_blocks, g.queries), keys.reshape(
            -1, g.key_blocks, g.keys
        )

    def full(self, fill: float, *shape: int) -> Array:
        """A constant to start a loop with, in the dtype of the scores.

        Inside `jax.shard_map` it varies over the mesh axes of the operands, as loops require.
        """
        return lax.full_like(self.query, fill, dtype=lse_dtype(self.query.dtype), shape=shape)

    def index(self, n: Array) -> Index:
        """The `n`-th block of all: those of a key head together, and of these those of a block of keys."""
        g = self.grid
        queries, keys = (jnp.asarray(x, n.dtype) for x in (g.query_blocks, g.key_blocks))
        rest, query = lax.div(n, queries), lax.rem(n, queries)
        return Index(lax.div(rest, keys), query, lax.rem(rest, keys))

    def meet(self, at: Index) -> Bool[Array, ""] | None:
        """Whether any query of the block may see any of its keys; None if all see all."""
        return None if self._meet is None else self._meet[at.query, at.key]

    def take_values(self, values: Array, at: Index) -> Array:
        """One block of `values`, whole blocks of the operands', with zeros in absent slots."""
        block = take_keys(self.grid, values, at)
        return (
            block if self._shown is None else jnp.where(self._shown[:, at.key, :, None], block, 0)
        )

    def scores(self, at: Index) -> Array:
        """The scores of one block, `[B, rows, keys]`, minus infinity where a key is hidden."""
        query, key = entry(self.query, at.head, at.query), entry(self.key, at.head, at.key)
        return self.scores_of(query, key, at)

    def scores_of(self, query: Array, key: Array, at: Index) -> Array:
        """The same from the queries and keys of the block."""
        raw, added = self.products(query, key)
        if self.score is not None:
            raw = self.score(raw, self.place(at))
        return self.masked(raw, added, at)

    def unscaled(self, query: Array, key: Array, at: Index) -> tuple[Array, float]:
        """`scores_of` as a product and a factor that is not negative, so that its maximum needs no other array."""
        given = self.score, self.bias, self.settings.scored_width
        if self.settings.scale <= 0 or any(x is not None for x in given):
            return self.scores_of(query, key, at), 1.0
        return self.masked(self.outer(query, key), None, at), self.settings.scale

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

    def place(self, at: Index) -> At:
        """Where the scores of a block are, for a score."""
        g = self.grid
        at = Index(*(x.astype(jnp.int32) for x in at))
        batch = jnp.arange(self.query.shape[2], dtype=jnp.int32)
        head = at.head * g.group + jnp.arange(g.group, dtype=jnp.int32)
        batch = batch if self._batches is None else self._batches
        head = head if self._heads is None else self._heads[head]
        head = jnp.repeat(head, g.queries)[None, :, None]
        if self.settings.score is None or not self.settings.score.compares:
            return At(batch[:, None, None], head, None, None)  # pyright: ignore[reportArgumentType]
        if self.positions is not None:
            return At(batch[:, None, None], head, *self._facing(self.positions, at))
        queries = at.query * g.queries + jnp.arange(g.queries, dtype=jnp.int32)
        keys = at.key * g.keys + jnp.arange(g.keys, dtype=jnp.int32)
        queries = jnp.tile(queries, g.group)[None, :, None]
        return At(batch[:, None, None], head, queries, keys[None, None, :])

    def masked(self, scores: Array, added: Array | None, at: Index) -> Array:
        """The scores of a block with what is added, minus infinity where a key is hidden."""
        if added is not None:
            scores = scores + added
        if self.bias is not None:
            scores = scores + self.score_block(self.bias, at).astype(scores.dtype)
        if self.mask is not None:
            scores = jnp.where(self.score_block(self.mask, at), scores, -jnp.inf)
        if self.positions is not None:
            seen = visible(self.rule, *self._facing(self.positions, at))
            scores = jnp.where(seen, scores, -jnp.inf)
        if self.segments is not None:
            queries, keys = self._facing(self.segments, at)
            scores = jnp.where(queries == keys, scores, -jnp.inf)
        return scores

    def _facing(self, numbers: tuple[Array, Array], at: Index) -> tuple[Array, Array]:
        """The numbers of a block's rows and keys, `[B, rows, 1]` and `[B, 1, keys]`."""
        queries, keys = (x[:, i] for x, i in zip(numbers, at[1:], strict=True))
        return jnp.tile(queries, (1, self.grid.group))[:, :, None], keys[:, None, :]

    def pad_scores(self, x: Array | None) -> Array | None:
        """An array that broadcasts to the scores, padded to whole blocks."""
        if x is None:
            return None
        g = self.grid
        x = x if x.shape[2] == 1 else _pad(x, 2, g.queries * g.query_blocks)
        return x if x.shape[3] == 1 else _pad(x, 3, g.keys * g.key_blocks)

    def score_block(self, x: Array, at: Index) -> Array:
        """One block `[B, rows, keys]` of an array that `pad_scores` returns."""
        g = self.grid
        block = lax.dynamic_slice(x, *self._corner(x.shape, at))
        block = jnp.broadcast_to(block, (x.shape[0], g.group, g.queries, g.keys))
        return block.reshape(x.shape[0], g.rows, g.keys)

    def _corner(self, shape: tuple[int, ...], at: Index) -> tuple[list[Array], list[int]]:
        g = self.grid
        steps = (g.group, g.queries, g.keys)
        start = [
            i * step if n > 1 else 0 * i for n, i, step in zip(shape[1:], at, steps, strict=True)
        ]
        sizes = [min(n, step) for n, step in zip(shape[1:], steps, strict=True)]
        return [0 * at.head, *start], [shape[0], *sizes]

    def add_to_bias(self, total: Array, block: Array, at: Index) -> Array:
        """Adds the gradient of one block of scores to that of the (padded) bias."""
        g = self.grid
        start, sizes = self._corner(total.shape, at)
        block = block.reshape(-1, g.group, g.queries, g.keys)
        axes = tuple(i for i in range(4) if sizes[i] == 1 and block.shape[i] > 1)
        block = block.sum(axes, keepdims=True)
        return lax.dynamic_update_slice(
            total, lax.dynamic_slice(total, start, sizes) + block, start
        )


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
        wide = lse_dtype(a.dtype)
        return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=wide)

    # without a batch axis for a single entry: XLA:CPU had its fast 16-bit product only so when this was
    # written; in JAX 0.8 to 0.12 both are equally fast
    return dot(a[0], b[0])[None] if a.shape[0] == 1 else jax.vmap(dot)(a, b)
