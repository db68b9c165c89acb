"""A fold over numbered items by one binary tree over their numbers, whichever of the items are there."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

Join = Callable[[Any, Any], Any]  # of the items of smaller numbers and those of larger ones


class Fold(NamedTuple):
    """The items so far. Those that are not there are skipped, as the identity of a join changes no bit.

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


def insert(fold: Fold, number: Int[Array, ""], item: Any, join: Join) -> Fold:
    """The fold with one more item, of a larger number; the first of all has that given to `start`."""
    # where the paths to both items part; -1 for the first item
    level = 31 - lax.clz(number ^ fold.last)
    bit = jnp.left_shift(jnp.ones_like(level), jnp.maximum(level, 0))
    node, held = _raised(fold, bit - 1, join)
    place = lax.population_count(held)
    waiting = jax.tree.map(
        lambda xs, x: lax.dynamic_update_index_in_dim(xs, x, place, 0), fold.waiting, node
    )
    return Fold(waiting, jnp.where(level < 0, held, held | bit), item, number)


def result(fold: Fold, join: Join) -> Any:
    """The fold of all items; the identity if there was none."""
    return _raised(fold, jnp.full_like(fold.held, -1), join)[0]


def folded(numbers: Int[Array, " items"], items: Any, identity: Any, join: Join) -> Any:
    """The fold of items in any order; those of negative number are not there."""
    order = jnp.argsort(numbers)
    absent = (numbers < 0).sum(dtype=jnp.int32)
    first = numbers[order[jnp.minimum(absent, len(numbers) - 1)]]

    def add(i: Array, fold: Fold) -> Fold:
        item = jax.tree.map(lambda x: x[order[i]], items)
        return insert(fold, numbers[order[i]], item, join)

    begin = start(identity, min(len(numbers), 32), first)
    return result(lax.fori_loop(absent, jnp.full_like(absent, len(numbers)), add, begin), join)


def _raised(fold: Fold, levels: Array, join: Join) -> tuple[Any, Array]:
    """The last node joined with those that wait at some levels, lower ones first, and what waits then."""

    def climb(carry: tuple[Any, Array]) -> tuple[Any, Array]:
        node, held = carry
        place = lax.population_count(held) - 1
        left = jax.tree.map(
            lambda xs: lax.dynamic_index_in_dim(xs, place, 0, keepdims=False), fold.waiting
        )
        return join(left, node), held & (held - 1)

    return lax.while_loop(lambda carry: (carry[1] & levels) != 0, climb, (fold.node, fold.held))
