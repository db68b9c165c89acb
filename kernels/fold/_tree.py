"""The canonical tree, and its leaves and tiles: tokens in slots by their positions.

A fold over numbered items follows one binary tree over their numbers, whichever of the items are there. A tile of slots
has the positions from one multiple of its size to the next, and a number in the tree.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Bool, Int, PyTree

from .._slice import slice_at
from ..call._operands import Operands
from ..call._tokens import leaves_for
from ..masks._abstract import interval
from ._programs import add

Merge = Callable[[Any, Any], Any]  # of the items of smaller numbers and those of larger ones


class Fold(NamedTuple):
    """The fold of the items so far. Absent items are skipped, as merging the identity changes no bit.

    At level `l` of the tree a node holds the items of numbers from `i 2^l` to `(i + 1) 2^l`. Items come in the order
    of their numbers, so that at most one node per level waits for its right sibling.
    """

    waiting: Any  # nodes that wait for their right sibling, higher levels first; each array `[depth, ...]`
    held: Int[Array, ""]  # bit `l` is set if a node waits at level `l`
    node: Any  # the last item, a node at level 0
    last: Int[Array, ""]  # the number of the last item


def start(identity: Any, depth: int, first: Int[Array, ""]) -> Fold:
    """The fold of no items, if the next has number `first`; at most `depth` nodes will wait."""
    waiting = jax.tree.map(lambda x: jnp.broadcast_to(x, (depth, *x.shape)), identity)
    return Fold(waiting, jnp.zeros_like(first), identity, first)


def insert(fold: Fold, number: Int[Array, ""], item: Any, merge: Merge) -> Fold:
    """The fold with one more item, of a larger number than all before; the first has the number given to `start`."""
    # the level of the lowest common ancestor of both items, less one; -1 for the first item
    level = 31 - lax.clz(number ^ fold.last)
    bit = jnp.left_shift(jnp.ones_like(level), jnp.maximum(level, 0))
    node, held = _raised(fold, bit - 1, merge)
    place = lax.population_count(held)
    waiting = jax.tree.map(
        lambda xs, x: lax.dynamic_update_index_in_dim(xs, x, place, 0), fold.waiting, node
    )
    return Fold(waiting, jnp.where(level < 0, held, held | bit), item, number)


def result(fold: Fold, merge: Merge) -> Any:
    """The fold of all items; the identity if there was none."""
    return _raised(fold, jnp.full_like(fold.held, -1), merge)[0]


def folded(numbers: Int[Array, " items"], items: Any, identity: Any, merge: Merge) -> Any:
    """The fold of items in any order; items of negative number are absent."""
    order, count = jnp.argsort(numbers), len(numbers)
    absent = (numbers < 0).sum(dtype=jnp.int32)

    def item(i: Array) -> Any:
        return jax.tree.map(lambda x: x[order[i]], items)

    between = absent, jnp.full_like(absent, count)
    live = jnp.arange(count + 1, dtype=absent.dtype)
    return fold_live(live, numbers[order], item, identity, min(count, 32), merge, between)


def fold_live(
    live: Int[Array, " following"],
    numbers: Int[Array, " items"],
    item: Callable[[Array], Any],
    identity: Any,
    depth: int,
    merge: Merge,
    between: tuple[Array, Array],
) -> Any:
    """The fold of `item(i)` over the live `i` between two; `live[i]` is the first live index from `i` on."""
    first, stop = between

    def step(carry: tuple[Array, Fold]) -> tuple[Array, Fold]:
        i, fold = carry
        return live[i + 1], insert(fold, numbers[i], item(i), merge)

    begin = live[first], start(identity, depth, numbers[live[first]])
    return result(lax.while_loop(lambda carry: carry[0] < stop, step, begin)[1], merge)


def following(meets: Bool[Array, "*b y"]) -> Int[Array, "*b z"]:
    """Index of the next tile that is met, at or after each `y`; `len` if there is none. Has `len + 1` entries."""
    count, axis = meets.shape[-1], meets.ndim - 1
    numbers = jnp.where(meets, lax.broadcasted_iota(jnp.int32, meets.shape, axis), count)
    numbers = jnp.pad(numbers, [(0, 0)] * axis + [(0, 1)], constant_values=count)
    return lax.cummin(numbers, axis=axis, reverse=True)


def is_below(low: Array, high: Array) -> Array:
    """Whether the highest bit of `low` is below the highest bit of `high`."""
    # low ^ high is below low where both have the same highest bit
    return (low < high) & (low < (low ^ high))


def depth_of(count: int) -> int:
    return (count - 1).bit_length() + 1


def _raised(fold: Fold, levels: Array, merge: Merge) -> tuple[Any, Array]:
    """Merges the last node with the nodes that wait at `levels`, lower ones first.

    Returns it and the levels still held.
    """

    def climb(carry: tuple[Any, Array]) -> tuple[Any, Array]:
        node, held = carry
        place = lax.population_count(held) - 1
        left = jax.tree.map(
            lambda xs: lax.dynamic_index_in_dim(xs, place, 0, keepdims=False), fold.waiting
        )
        return merge(left, node), held & (held - 1)

    return lax.while_loop(lambda carry: (carry[1] & levels) != 0, climb, (fold.node, fold.held))


HEADS = 1 << 12  # most heads: number `batch * HEADS + head` in the tree


class PerHeadSums(NamedTuple):
    """Sums per head and batch entry, `[B, N, ...]`, with their numbers in the tree over heads and batch entries."""

    sums: PyTree[Array]
    numbers: Int[Array, "B N"]

    def summed(self) -> Any:
        sums, numbers = jax.tree.map(lambda x: lax.collapse(x, 0, 2), self)
        return tree_sum(numbers, sums)

    def of_heads(self) -> Any:
        return jax.vmap(tree_sum, (1, 1))(self.numbers, self.sums)


def tree_sum(numbers: Int[Array, " items"], items: PyTree[Array]) -> Any:
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x[0]), items)
    return folded(numbers, items, zeros, add)


def unit_numbers(operands: Operands) -> Int[Array, "B N"]:
    """Numbers of heads and batch entries in the tree over both. Raises as `unit_indices`."""
    batches, heads = unit_indices(operands)
    return batches[:, None] * HEADS + heads[None]


def unit_indices(operands: Operands) -> tuple[Int[Array, " B"], Int[Array, " N"]]:
    """Indices of a call's batch entries and heads. Raises `NotImplementedError` for too many."""
    batch, _, heads, _ = operands.query.shape
    if heads > HEADS or batch > (1 << 31) // HEADS:
        raise NotImplementedError(
            f"query: wanted at most {(1 << 31) // HEADS} entries of the batch and {HEADS} heads for gradients of "
            f"sinks, biases and scores with reproducible=True, got {batch} and {heads}"
        )
    return operands.part_indices()


Part = tuple[Array | int, int]  # index of a part of the heads, and the number of parts
Arrays = TypeVar("Arrays")


class PositionSlots:
    """The token of an array in each slot of each tile.

    By default tokens may be in any order, and tokens of negative position have no slot; there is one tile more than
    they fill, as they may begin inside a tile. In an array in the order of positions, token `i` is in slot `i`.
    """

    positions: Int[Array, "_ tiles size"]  # of the tokens, -1 for an empty slot
    numbers: Int[Array, "_ tiles"]  # of tiles, in the tree; increasing over tiles with a token
    tokens: Int[Array, "_ tiles size"]  # the token in each slot; some token for an empty one
    depth: int  # how many nodes a fold over the tiles keeps

    def __init__(self, positions: Int[Array, "b length"], size: int, counted: bool, sorted_: bool):
        """`counted`: positions are indices, so that numbers of tiles are, too."""
        batch, self._length = positions.shape
        self._size, self.scattered = size, not (counted or sorted_)
        self.tiles = leaves_for(self._length, size) if self.scattered else -(-self._length // size)
        self.depth = depth_of(self.tiles) if counted or self.scattered else min(self.tiles, 32)
        number, slots = jnp.arange(self.tiles, dtype=jnp.int32)[None], self.tiles * size
        tokens = jnp.arange(self._length, dtype=jnp.int32)[None]
        if not self.scattered:
            self.positions, self.tokens = self.spread(positions, -1), self.spread(tokens, 0)
            self.numbers = number if counted else lax.div(self.positions.max(-1), jnp.int32(size))
            return
        present = positions >= 0
        base = lax.div(interval(positions).low, jnp.int32(size))[:, None]
        place = positions - base * size
        inside = present & (place < slots)
        self._place = jnp.where(inside, place, slots)
        tokens = jnp.broadcast_to(tokens, positions.shape)
        entries = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], positions.shape)
        token = jnp.full((batch, slots), -1, jnp.int32)
        token = token.at[entries, self._place].set(tokens, mode="drop")
        kept_token = jnp.take_along_axis(token, jnp.minimum(self._place, slots - 1), 1)
        # the slot of a token holds another one if both have one position
        self._sound = (~present | (inside & (kept_token == tokens))).all(1)
        token = token.reshape(batch, self.tiles, size)
        self.tokens = jnp.maximum(token, 0)
        self.numbers = base + number
        offset = jnp.arange(size, dtype=jnp.int32)[None, None]
        self.positions = jnp.where(token >= 0, self.numbers[:, :, None] * size + offset, -1)
        self._first = _first(token, self._length)

    def spread(self, x: Array, fill: int = 0) -> Array:
        """Lays `[B, S, ...]` out as `[B, tiles, size, ...]`; empty slots have `fill` or anything."""
        if self.scattered:
            batch = max(len(x), len(self.tokens))
            token = self.tokens.reshape(len(self.tokens), -1)
            token = jnp.broadcast_to(token, (batch, token.shape[1]))
            x = jnp.broadcast_to(x, (batch, *x.shape[1:]))
            x = jnp.take_along_axis(x, _like(token, x), 1)
        elif missing := self.tiles * self._size - self._length:
            pads = (0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)
            x = jnp.pad(x, pads, constant_values=fill)
        return x.reshape(len(x), self.tiles, self._size, *x.shape[2:])

    def read(
        self, arrays: Arrays, batch: Array, tile: Array, dtype: jnp.dtype, part: Part = (0, 1)
    ) -> Arrays:
        """A tile `[K, size, W]` of each array `[B, S, K, W]`, or part of its last axis; zeros in empty slots."""
        present, size = entry(self.positions, batch)[tile] >= 0, self._size
        index, parts = part

        def as_read(x: Array) -> Array:
            # inside the branches that slice, so that XLA fuses it with the slice
            x = jnp.where(present[:, None, None], x.astype(dtype), 0)
            return as_written(x.transpose(1, 0, 2), "cpu")

        def sliced(first: Array, size: int) -> Callable[[], Arrays]:
            zero = jnp.zeros_like(first)

            def one(x: Array) -> Array:
                width = x.shape[3] // parts
                corner = batch, first, zero, zero + index * width
                x = slice_at(x, corner, (1, size, x.shape[2], width))[0]
                pads = (0, self._size - size), (0, 0), (0, 0)
                return as_read(jnp.pad(x, pads) if size < self._size else x)

            return lambda: jax.tree.map(one, arrays)

        def one_by_one() -> Arrays:
            token = entry(self.tokens, batch)[tile]

            def one(x: Array) -> Array:
                return as_read(x.reshape(*x.shape[:3], parts, -1)[batch, token, :, index])

            return jax.tree.map(one, arrays)

        if self.scattered:
            if self._length < size:
                return one_by_one()
            first = entry(self._first, batch)[tile]
            return lax.cond(first >= 0, sliced(jnp.maximum(first, 0), size), one_by_one)
        whole, tail = sliced(tile * size, size), self._length % size
        if tail == 0:
            return whole()
        last = sliced(jnp.full_like(tile, self._length - tail), tail)  # filled up
        return last() if self.tiles == 1 else lax.cond(tile == self.tiles - 1, last, whole)

    def taken(self, x: Array, batch: Array) -> Array:
        """Takes `[S, ...]` out of the slots `[tiles * size, ...]` of a batch entry; zeros for absent tokens."""
        if self.scattered:
            place = entry(self._place, batch)
            return jnp.where(_like(place < len(x), x), x[jnp.minimum(place, len(x) - 1)], 0.0)
        present = entry(self.positions, batch).reshape(-1)[: self._length] >= 0
        return jnp.where(_like(present, x), x[: self._length], 0.0)

    def checked(self, x: Array) -> Array:
        """`x` with NaN in batch entries where two tokens have one slot, or tokens are in too many tiles."""
        if not self.scattered:
            return x
        return jnp.where(self._sound.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.nan)


def entry(x: Array, batch: Array) -> Array:
    """The batch entry of an array whose first axis is `B` or 1."""
    return lax.dynamic_index_in_dim(x, batch if x.shape[0] > 1 else 0, 0, keepdims=False)


def _like(x: Array, like: Array) -> Array:
    return x.reshape(*x.shape, *[1] * (like.ndim - x.ndim))


def _first(token: Array, length: int) -> Array:
    """Index of the first token of each tile whose tokens are consecutive in the array; -1 for other tiles."""
    size = token.shape[-1]
    if length < size:
        return jnp.full(token.shape[:-1], -1, jnp.int32)
    shift = token - jnp.arange(size, dtype=jnp.int32)[None, None]
    low = jnp.where(token >= 0, shift, length).min(-1)
    high = jnp.where(token >= 0, shift, -size).max(-1)
    return jnp.where((low == high) & (low >= 0) & (low <= length - size), low, -1)


def as_written(part: Array, platform: str = "tpu") -> Array:
    """Constrains a slice that a loop takes of an array to the row-major layout.

    Without this, XLA:TPU copies the whole array before the loop, in the layout that it prefers for the slice, and
    XLA:CPU copies a transposed slice. Exported programs have no constraint, as JAX does not serialise it.
    """
    return as_written_p.bind(part, platform=platform)


def _lower(ctx: mlir.LoweringRuleContext, x: Any, *, platform: str) -> Any:
    module = ctx.module_context
    if module.lowering_parameters.for_export or tuple(module.platforms) != (platform,):
        return [x]

    def constrained(x: Array) -> Array:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return mlir.lower_fun(constrained, multiple_results=False)(ctx, x)


as_written_p = Primitive("as_written")
as_written_p.def_impl(lambda x, platform: x)
as_written_p.def_abstract_eval(lambda x, platform: x)
ad.deflinear2(as_written_p, lambda cotangent, _, platform: [cotangent])
batching.defvectorized(as_written_p)
mlir.register_lowering(as_written_p, _lower)
