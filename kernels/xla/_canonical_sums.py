"""Gradients that are sums over the rows or scores of a call: of its sink, its bias and its score's arrays.

The canonical tree folds what tiles of queries of one head add, at a leaf of keys; then leaves; then heads; then entries
of the batch. An axis that an array has is kept.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from ..call._leaves import LEAF
from ..call._operands import KernelCall, Operands
from ..call._state import AttentionState, unfused
from ..scores._structure import floating
from . import _canonical_tree as tree
from ._canonical_call import QUERIES, CanonicalCall, Side, Tile, in_slots
from ._canonical_passes import add, following
from ._canonical_slots import depth_of, entry
from ._canonical_tiles import backward_rows, d_scores, raw_scores, sums
from ._each import hidden
from ._tile_program import computed

HEADS = 1 << 12  # at most: each head of an entry of the batch has a number of its own
Unit = Callable[[Array, Array], Any]  # (entry of the batch, head)
Item = Callable[[Tile, Any, list[Array]], Any]  # (tile, rows, keys)


class Units(NamedTuple):
    """Sums of each head of each entry of a batch, `[B, N, ...]`, and the numbers of these in the tree over all."""

    found: PyTree[Array]
    numbers: Int[Array, "B N"]

    def summed(self) -> Any:
        """The sum over all."""
        found, numbers = jax.tree.map(lambda x: lax.collapse(x, 0, 2), self)
        return tree_sum(numbers, found)

    def of_heads(self) -> Any:
        """The sum of each head over the batch, `[N, ...]`."""
        return jax.vmap(tree_sum, (1, 1))(self.numbers, self.found)


def unit_numbers(operands: Operands) -> Int[Array, "B N"]:
    """Those of the heads of the entries of a batch, in the tree over all. Raises as `Sums`."""
    batches, heads = _indices(operands)
    return batches[:, None] * HEADS + heads[None]


def sink_units(kernel: Any, call: KernelCall, *given: AttentionState) -> Units:
    """The gradient of a sink by a canonical kernel, of each head of each entry of the batch."""
    found = kernel.sink_sums(call, kernel.sink_terms(call, *given))
    return Units(found, unit_numbers(call.operands))


def _indices(operands: Operands) -> tuple[Array, Array]:
    batch, _, heads, _ = operands.query.shape
    if heads > HEADS or batch > (1 << 31) // HEADS:
        raise NotImplementedError(
            f"query: wanted at most {(1 << 31) // HEADS} entries of the batch and {HEADS} heads for gradients of "
            f"sinks, biases and scores beside reproducible=True, got {batch} and {heads}"
        )
    numbers = (operands.indices.batch, batch), (operands.indices.heads, heads)
    batches, heads = (_counted(size) if x is None else x for x, size in numbers)
    return batches, heads


def tree_sum(numbers: Int[Array, " items"], items: PyTree[Array]) -> Any:
    """The sum of items of these numbers, by the canonical tree."""
    return tree.folded(numbers, items, jax.tree.map(lambda x: jnp.zeros_like(x[0]), items), add)


class Sums:
    """Sums over the tiles of queries and leaves of keys of a call.

    Two queries of one position make them NaN, as they do gradients of keys. Raises `NotImplementedError` for more heads
    and entries of the batch than there are numbers.
    """

    def __init__(self, call: CanonicalCall):
        operands, self._call = call.operands, call
        self._batches, self._heads = _indices(operands)
        self._queries = call.queries_by_position(QUERIES)
        self._side: Side = in_slots(self._queries, operands.tokens.query_segments)

    def of_rows(self, x: Float[Array, "B T N"]) -> Float[Array, "B N"]:
        """Of numbers of rows, of each head of each entry of the batch."""
        by_head = x[:, :, None]
        live = following((self._side.positions >= 0).any(-1)[:, None])

        def unit(batch: Array, head: Array) -> Array:
            def item(index: Array) -> Array:
                (tile,) = self._read([by_head], batch, head, index)
                return sums(tile[..., 0])

            return self._over_tiles(batch, entry(live, batch)[0], item, self._call.empty(1), False)

        found = self._over_units(unit, self._call.empty(1), True, True)[..., 0]
        return self._queries.checked(found)

    def of_arrays(self, rows: Any, keys: list[Array]) -> tuple[Any, ...]:
        """Of the cotangents of the score's arrays; `rows` as `backward_rows` takes them, of `[B, T, N, ...]`."""
        zeros = self._like_arrays()
        over_leaves = self._over_leaves(rows, keys, self._to_arrays, zeros)
        return self._over_units(over_leaves, zeros, False, False)

    def nodes_of_arrays(
        self, rows: Any, keys: list[Array], share: Array, shares: int
    ) -> tuple[tuple[Any, ...], Int[Array, "nodes B"]]:
        """The same of units in nodes over a share of the leaves, `[nodes, B, N, ...]`, and the nodes' numbers.

        There are two: of leaves that begin in the middle of a node there is one node more than shares.
        """
        held, zeros = self._call.held, self._like_arrays()
        size = jnp.int32(1 << (-(-held.tiles // shares) - 1).bit_length())
        begin = jnp.broadcast_to(held.numbers[:, 0], (self._call.batch,))
        places = share + jnp.arange(2, dtype=jnp.int32) * shares

        def node(place: Array) -> Any:
            def between(batch: Array) -> tuple[Array, Array]:
                first = place * size - lax.rem(begin[batch], size)
                return jnp.clip(first, 0, held.tiles), jnp.clip(first + size, 0, held.tiles)

            over_leaves = self._over_leaves(rows, keys, self._to_arrays, zeros, between=between)
            return self._over_units(over_leaves, zeros, True, True)

        return lax.map(node, places), lax.div(begin, size)[None] + places[:, None]

    def of_bias(self, rows: Any, keys: list[Array]) -> Array:
        """Of the cotangents of the bias."""
        bias: Any = self._call.operands.bias
        with_batch, with_heads, with_queries, with_keys = (size > 1 for size in bias.shape)
        height, width = QUERIES if with_queries else 1, LEAF if with_keys else 1
        tiles = self._queries.tiles if with_queries else 1
        leaves = self._call.held.tiles if with_keys else 1

        def to_bias(tile: Tile, rows: Any, keys: list[Array]) -> Array:
            change = self._changes(tile, rows, keys)[1]
            change = change if with_keys else sums(change)[..., None]
            return change[0] if with_queries else sums(change.swapaxes(1, 2))

        over_leaves = self._over_leaves(
            rows, keys, to_bias, self._call.empty(height, width), with_queries, with_keys
        )

        def unit(batch: Array, head: Array) -> Array:
            x = over_leaves(batch, head).reshape(leaves, tiles, height, width)
            x = x.transpose(1, 2, 0, 3).reshape(tiles * height, leaves * width)
            x = self._queries.taken(x, batch) if with_queries else x
            return self._call.held.taken(x.T, batch).T if with_keys else x

        found = self._over_units(unit, self._call.empty(*bias.shape[2:]), with_batch, with_heads)
        return found.reshape(bias.shape)

    def _like_arrays(self) -> tuple[Any, ...]:
        arrays = self._call.operands.score_arrays
        return tuple(self._call.empty(*x.shape) if floating(x) else None for x in arrays)

    def _to_arrays(self, tile: Tile, rows: Any, keys: list[Array]) -> Any:
        raw, change = self._changes(tile, rows, keys)
        score: Any = self._call.score

        def pulled(raw: Array, change: Array) -> Any:
            return score.vjp(raw, self._call.at(tile))[1](change)[1]

        return lax.optimization_barrier(computed(pulled, raw, change))

    def _changes(self, tile: Tile, rows: Any, keys: list[Array]) -> tuple[Array, Array]:
        """The scaled products of a tile, and the cotangents of its scores."""
        call, (key, value), of_rows = self._call, keys, backward_rows(*rows)
        raw = raw_scores(of_rows.query, key, call.scale)
        change = d_scores(of_rows, call.scores(of_rows.query, key, tile), value)[1]
        return raw, unfused(change)

    def _over_units(self, unit: Unit, zeros: Any, with_batch: bool, with_heads: bool) -> Any:
        """`unit` of all entries of the batch and heads: summed, or on an axis each."""

        def one(batch: Array) -> Any:
            return _over(
                _counted(len(self._heads) + 1),
                self._heads,
                lambda head: unit(batch, head),
                zeros,
                with_heads,
            )

        of_entry = _stacked(zeros, len(self._heads)) if with_heads else zeros
        live = _counted(len(self._batches) + 1)
        return _over(live, self._batches, one, of_entry, with_batch)

    def _over_leaves(
        self,
        rows: Any,
        keys: list[Array],
        item: Item,
        zeros: Any,
        with_tiles: bool = False,
        with_leaves: bool = False,
        between: Callable[[Array], tuple[Array, Array]] | None = None,
    ) -> Unit:
        """`item` of all tiles that meet of a head: summed, or on axes, that of the leaves first."""
        call, held = self._call, self._call.held
        flat, form = jax.tree.flatten(rows)
        by_head = [lax.collapse(x, 2, x.ndim)[:, :, None] for x in flat]
        keys_by_head = [lax.collapse(x, 2, 4)[:, :, None] for x in keys]
        sound = self._queries.checked(held.checked(call.empty(call.batch, 1)))[:, 0]
        met = call.met(self._side)
        live_tiles, live_leaves = following(met.swapaxes(1, 2)), following(met.any(1)[:, None])

        def unit(batch: Array, head: Array) -> Any:
            def at_leaf(leaf: Array) -> Any:
                part = lax.div(head, jnp.int32(call.group)), call.key_heads
                parts = held.read(keys_by_head, batch, leaf, call.dtype, part)
                tokens, at = held.tokens(batch, leaf), call.keys.at(batch, leaf)

                def at_tile(index: Array) -> Any:
                    read = self._read(by_head, batch, head, index)
                    read = [
                        x if y.ndim == 4 else x[..., 0] for x, y in zip(read, flat, strict=True)
                    ]
                    queries, of_rows = (
                        self._queries.tokens(batch, index),
                        self._side.at(batch, index),
                    )
                    tile = Tile(batch, head[None, None], queries, tokens, of_rows, at)
                    return item(tile, jax.tree.unflatten(form, read), parts)

                live = entry(live_tiles, batch)[leaf]
                return self._over_tiles(batch, live, at_tile, zeros, with_tiles)

            of_leaf = _stacked(zeros, self._queries.tiles) if with_tiles else zeros
            found = _over(
                entry(live_leaves, batch)[0],
                entry(held.numbers, batch),
                at_leaf,
                of_leaf,
                with_leaves,
                held.depth,
                None if between is None else between(batch),
            )
            return jax.tree.map(lambda x: x + sound[batch], found)

        return unit

    def _over_tiles(self, batch: Array, live: Array, item: Any, zeros: Any, kept: bool) -> Any:
        return _over(
            live, entry(self._queries.numbers, batch), item, zeros, kept, self._queries.depth
        )

    def _read(self, arrays: list[Array], batch: Array, head: Array, index: Array) -> list[Array]:
        part = head, self._call.operands.query.shape[2]
        return self._queries.read(arrays, batch, index, self._call.dtype, part)


def _over(
    live: Int[Array, " following"],
    numbers: Int[Array, " count"],
    item: Callable[[Array], Any],
    zeros: Any,
    kept: bool,
    depth: int | None = None,
    between: tuple[Array, Array] | None = None,
) -> Any:
    """`item(i)`, of the form of `zeros`, for each `i` that is live: on a first axis, or summed by the canonical tree.

    `live` has the first such `i` from each on, and `numbers` are those in the tree.
    """
    count = len(numbers)
    first, stop = between or (jnp.int32(0), hidden(count))
    index = live[first]

    def keep(i: Array, found: Any) -> Any:
        return jax.tree.map(
            lambda xs, x: lax.dynamic_update_index_in_dim(xs, x, i, 0), found, item(i)
        )

    def insert(i: Array, found: tree.Fold) -> tree.Fold:
        return tree.insert(found, numbers[i], item(i), add)

    def step(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        i, found = carry
        return live[i + 1], (keep if kept else insert)(i, found)

    begin: Any = _stacked(zeros, count)
    if not kept:
        begin = tree.start(zeros, depth_of(count) if depth is None else depth, numbers[index])
    _, found = lax.while_loop(lambda carry: carry[0] < stop, step, (index, begin))
    return found if kept else tree.result(found, add)


def _stacked(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)


def _counted(count: int) -> Int[Array, " count"]:
    return jnp.arange(count, dtype=jnp.int32)
