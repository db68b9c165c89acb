"""The canonical kernel in XLA's operations, for CPUs, and gradients that are sums over the scores of a call.

For a bias and a score's arrays the canonical tree sums tiles of queries of one head at a leaf of keys, then leaves,
then heads, then batch entries. Axes of the array itself are kept.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from ..call._kernel import check_dtypes
from ..call._operands import KernelCall
from ..call._state import AttentionState, divided, of_each
from ..call._tokens import LEAF
from ..fold import _tree as tree
from ..fold._call import QUERIES, rounded
from ..fold._kernel import AbstractCanonical, backward_rows, check_whole
from ..fold._programs import Blocks, ScoreChanges, add, score_changes
from ..fold._tree import entry
from ..masks._abstract import AbstractMask
from ..masks._ready import Lengths
from ..scores._structure import floating
from ._canonical_schedule import XLASchedule
from ._canonical_tiles import PairsOfTile
from ._loops import hidden

Unit = Callable[[Array, Array], Any]  # (entry of the batch, head)
Term = Callable[[ScoreChanges, PairsOfTile], Any]
Between = Callable[[Array], tuple[Array, Array]]  # the leaves of an entry of the batch


class ScoreSums:
    """Sums over the tiles of queries and leaves of keys of a call.

    Two queries of one position make them NaN, as they do gradients of keys. Raises `NotImplementedError` for more heads
    and entries of the batch than there are numbers.
    """

    def __init__(self, of: XLASchedule, rows: Blocks):
        """`rows`: of a backward."""
        self._of, self._rows = of, rows
        self._batches, self._heads = tree.unit_indices(of.operands)
        self._keys = {"key": of.operands.key, "value": of.operands.value}

    def of_arrays(self) -> tuple[Any, ...]:
        return self._over_units(*self._arrays(), False, False)

    def nodes_of_arrays(
        self, share: Array, shares: int
    ) -> tuple[tuple[Any, ...], Int[Array, "nodes B"]]:
        """Gradients of arrays in nodes over a share of the leaves, `[nodes, B, N, ...]`, with the nodes' numbers.

        There are two per share: leaves that begin inside a node fill one node more than there are shares.
        """
        key_slots = self._of.key_slots
        size = jnp.int32(1 << (-(-key_slots.tiles // shares) - 1).bit_length())
        begin = jnp.broadcast_to(key_slots.numbers[:, 0], (self._of.batch,))
        places = share + jnp.arange(2, dtype=jnp.int32) * shares

        def node(place: Array) -> Any:
            def between(batch: Array) -> tuple[Array, Array]:
                first = place * size - lax.rem(begin[batch], size)
                tiles = key_slots.tiles
                return jnp.clip(first, 0, tiles), jnp.clip(first + size, 0, tiles)

            return self._over_units(*self._arrays(between), True, True)

        return lax.map(node, places), lax.div(begin, size)[None] + places[:, None]

    def of_bias(self) -> Array:
        of, query_slots = self._of, self._of.query_slots
        bias: Any = of.operands.bias
        with_batch, with_heads, with_queries, with_keys = (size > 1 for size in bias.shape)
        height, width = QUERIES if with_queries else 1, LEAF if with_keys else 1
        tiles = query_slots.tiles if with_queries else 1
        leaves = of.key_slots.tiles if with_keys else 1

        # db = Σ ds over the axes along which the bias broadcasts
        def to_bias(result: ScoreChanges, pairs: PairsOfTile) -> Array:
            del pairs
            change = result.change if with_keys else of.arithmetic.total(result.change)
            return change[0] if with_queries else of.arithmetic.total(change.mT)[0].mT

        zeros = of.empty(height, width)
        over_leaves = self._over_leaves(to_bias, zeros, with_queries, with_keys)

        def unit(batch: Array, head: Array) -> Array:
            x = over_leaves(batch, head).reshape(leaves, tiles, height, width)
            x = x.transpose(1, 2, 0, 3).reshape(tiles * height, leaves * width)
            x = query_slots.taken(x, batch) if with_queries else x
            return of.key_slots.taken(x.T, batch).T if with_keys else x

        result = self._over_units(unit, of.empty(*bias.shape[2:]), with_batch, with_heads)
        return result.reshape(bias.shape)

    def _arrays(self, between: Between | None = None) -> tuple[Unit, tuple[Any, ...]]:
        of, arrays = self._of, self._of.operands.score_arrays
        zeros = tuple(of.empty(*x.shape) if floating(x) else None for x in arrays)

        # dθ = Σ ds ∂g/∂θ
        def to_arrays(result: ScoreChanges, pairs: PairsOfTile) -> Any:
            return of.scores().pulled(result.raw, result.change, pairs)

        return self._over_leaves(to_arrays, zeros, between=between), zeros

    def _over_units(self, unit: Unit, zeros: PyTree, with_batch: bool, with_heads: bool) -> Any:
        """`unit` of all entries of the batch and heads: summed, or on an axis each."""

        def one(batch: Array) -> Any:
            return _over(self._heads, lambda head: unit(batch, head), zeros, with_heads)

        of_entry = _stacked(zeros, len(self._heads)) if with_heads else zeros
        return _over(self._batches, one, of_entry, with_batch)

    def _over_leaves(
        self,
        term: Term,
        zeros: PyTree,
        with_tiles: bool = False,
        with_leaves: bool = False,
        between: Between | None = None,
    ) -> Unit:
        """`term` of all tiles of a head that meet: summed, or on axes, the leaves first."""
        of, key_slots, query_slots = self._of, self._of.key_slots, self._of.query_slots
        keys_by_head = {n: lax.collapse(x, 2, 4)[:, :, None] for n, x in self._keys.items()}
        sound = query_slots.checked(key_slots.checked(of.empty(of.batch, 1)))[:, 0]
        meets = of.meets(of.query_ids)
        live_tiles = tree.following(meets.swapaxes(1, 2))
        live_leaves = tree.following(meets.any(1))
        of_leaf = _stacked(zeros, query_slots.tiles) if with_tiles else zeros

        def unit(batch: Array, head: Array) -> Any:
            def at_leaf(leaf: Array) -> Any:
                part = lax.div(head, jnp.int32(of.group)), of.key_heads
                keys, of_keys = of.leaf(keys_by_head, batch, leaf, part)

                def at_tile(index: Array) -> Any:
                    alone = head[None, None], (head, of.operands.query.shape[2])
                    rows, of_rows = of.queries_of(self._rows, batch, index, *alone)
                    pairs = of.pairs(batch, of_rows, of_keys)
                    args = of.arithmetic, of.scores(), rows, keys, pairs
                    return term(score_changes(*args, pulled=False), pairs)

                live = entry(live_tiles, batch)[leaf]
                numbers = entry(query_slots.numbers, batch)
                return _over(numbers, at_tile, zeros, with_tiles, live, query_slots.depth)

            live, numbers = entry(live_leaves, batch), entry(key_slots.numbers, batch)
            bounds = None if between is None else between(batch)
            result = _over(numbers, at_leaf, of_leaf, with_leaves, live, key_slots.depth, bounds)
            return jax.tree.map(lambda x: x + sound[batch], result)

        return unit


def _over(
    numbers: Int[Array, " count"],
    term: Callable[[Array], Any],
    zeros: PyTree,
    kept: bool,
    live: Int[Array, " following"] | None = None,
    depth: int | None = None,
    between: tuple[Array, Array] | None = None,
) -> Any:
    """`term(i)` for each live `i`: stacked on a first axis, or summed by the canonical tree."""
    count = len(numbers)
    live = jnp.arange(count + 1, dtype=jnp.int32) if live is None else live
    first, stop = between or (jnp.int32(0), hidden(count))
    if not kept:
        depth = tree.depth_of(count) if depth is None else depth
        return tree.fold_live(live, numbers, term, zeros, depth, add, (first, stop))

    def keep(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        i, result = carry
        result = jax.tree.map(
            lambda xs, x: lax.dynamic_update_index_in_dim(xs, x, i, 0), result, term(i)
        )
        return live[i + 1], result

    begin = live[first], _stacked(zeros, count)
    return lax.while_loop(lambda carry: carry[0] < stop, keep, begin)[1]


def _stacked(tree: PyTree, count: int) -> Any:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)


@dataclasses.dataclass(frozen=True)
class Canonical(AbstractCanonical):
    """Attention whose bits depend on a row and the keys that it sees, in XLA's operations.

    Keys may be in any order. Two present keys of one position, or keys in more than `S / LEAF + 1` leaves, make all
    results of their batch entry NaN; two queries of one position, the gradients of keys and values.
    """

    name = "canonical"
    platforms = ()
    interpreted = ()
    exported = True
    masks = (AbstractMask, Lengths)

    def check(self, call: KernelCall) -> None:
        check_whole(call.settings)
        check_dtypes(call.operands, ("float32", "bfloat16", "float16", "float64"))

    def schedule(self, call: KernelCall, in_order: bool) -> XLASchedule:
        return XLASchedule(call, in_order)

    def corrected(self, cotangent: AttentionState, rest: Array) -> AttentionState:
        """Rounds the cotangent first: XLA would fold a constant factor of it into this one."""
        return divided(rounded(cotangent), of_each(jnp.exp, -rest))

    def bias_cotangent(self, call: KernelCall, *states: AttentionState) -> Array:
        return self.sums(call, *states).of_bias()

    def array_cotangents(self, call: KernelCall, *states: AttentionState) -> tuple[Any, ...]:
        return self.sums(call, *states).of_arrays()

    def sums(self, call: KernelCall, *states: AttentionState) -> ScoreSums:
        rows = backward_rows(call.operands, *states)
        return ScoreSums(self.schedule(call, self.in_order), rows)
