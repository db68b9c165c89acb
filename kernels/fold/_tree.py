"""A fold over numbered items by one binary tree over their numbers, whichever of the items are there."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

Merge = Callable[[Any, Any], Any]  # of the items of smaller numbers and those of larger ones


class Fold(NamedTuple):
    """The items so far. Those that are not there are skipped, as the identity of a merge changes no bit.

    At level `l` of the tree a node holds the items of numbers from `i 2^l` to `(i + 1) 2^l`. Items come in the order
    of their numbers, so that the nodes that wait for their right neighbour are at most one a level.

    Attributes:
        waiting: the nodes that wait, those of higher levels first, `[depth, ...]` each.
        held: the levels at which one waits, as bits.
        node: that of the last item, at level 0.
        last: its number.
    """

    waiting: Any
    held: Int[Array, ""]
    node: Any
    last: Int[Array, ""]


def start(identity: Any, depth: int, first: Int[Array, ""]) -> Fold:
    """The fold of nothing, before an item of number `first` or none; at most `depth` nodes will wait."""
    waiting = jax.tree.map(lambda x: jnp.broadcast_to(x, (depth, *x.shape)), identity)
    return Fold(waiting, jnp.zeros_like(first), identity, first)


def insert(fold: Fold, number: Int[Array, ""], item: Any, merge: Merge) -> Fold:
    """The fold with one more item, of a larger number; the first of all has that given to `start`."""
    # where the paths to both items part; -1 for the first item
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
    """The fold of items in any order; those of negative number are not there."""
    order = jnp.argsort(numbers)
    absent = (numbers < 0).sum(dtype=jnp.int32)
    first = numbers[order[jnp.minimum(absent, len(numbers) - 1)]]

    def add(i: Array, fold: Fold) -> Fold:
        item = jax.tree.map(lambda x: x[order[i]], items)
        return insert(fold, numbers[order[i]], item, merge)

    begin = start(identity, min(len(numbers), 32), first)
    return result(lax.fori_loop(absent, jnp.full_like(absent, len(numbers)), add, begin), merge)


def fold_live(
    live: Int[Array, " following"],
    numbers: Int[Array, " items"],
    item: Callable[[Array], Any],
    identity: Any,
    depth: int,
    merge: Merge,
    between: tuple[Array, Array],
) -> Any:
    """The fold of `item(i)` for each `i` between two that is live; `live` has the first such `i` from each on."""
    first, stop = between

    def step(carry: tuple[Array, Fold]) -> tuple[Array, Fold]:
        i, fold = carry
        return live[i + 1], insert(fold, numbers[i], item(i), merge)

    begin = live[first], start(identity, depth, numbers[live[first]])
    return result(lax.while_loop(lambda carry: carry[0] < stop, step, begin)[1], merge)


def following(met: Bool[Array, "*b y"]) -> Int[Array, "*b z"]:
    """For each `y`, the first `y' >= y` that is met, or their number; one entry more."""
    count, axis = met.shape[-1], met.ndim - 1
    numbers = jnp.where(met, lax.broadcasted_iota(jnp.int32, met.shape, axis), count)
    numbers = jnp.pad(numbers, [(0, 0)] * axis + [(0, 1)], constant_values=count)
    return lax.cummin(numbers, axis=axis, reverse=True)


def is_below(low: Array, high: Array) -> Array:
    """Whether the highest bit of a number is below that of another."""
    return (low < high) & (low < (low ^ high))


def depth_of(count: int) -> int:
    """The nodes that a fold over so many items in a row keeps: those below the smallest that may hold all, and one."""
    return (count - 1).bit_length() + 1


def _raised(fold: Fold, levels: Array, merge: Merge) -> tuple[Any, Array]:
    """The last node merged with those that wait at some levels, lower ones first, and what waits then."""

    def climb(carry: tuple[Any, Array]) -> tuple[Any, Array]:
        node, held = carry
        place = lax.population_count(held) - 1
        left = jax.tree.map(
            lambda xs: lax.dynamic_index_in_dim(xs, place, 0, keepdims=False), fold.waiting
        )
        return merge(left, node), held & (held - 1)

    return lax.while_loop(lambda carry: (carry[1] & levels) != 0, climb, (fold.node, fold.held))
