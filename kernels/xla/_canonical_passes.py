"""The two passes over the tiles of a call: folds over keys for tiles of rows, over queries for leaves of keys."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from . import _canonical_tree as tree
from ._canonical_call import QUERIES, CanonicalCall, Side, Tile, in_slots
from ._canonical_slots import AbstractSlots, entry
from ._each import each


def add(a: PyTree[Array], b: PyTree[Array]) -> Any:
    """The sum of each pair."""
    return jax.tree.map(jnp.add, a, b)


class OverKeys(NamedTuple):
    """`finish(rows, fold of term(rows, tile, *keys) over the leaves)` for each tile of rows.

    `rows` are arrays `[B, T, N, W]` or `[B, T, N]`, of which a tile is `[K, rows, W]`; `keys` are arrays
    `[B, S, K, W]`, of which a leaf is `[K, LEAF, W]`. Rows of all query heads of a key head fill tiles together,
    wherever they are: a row's sums do not depend on its place.
    """

    call: CanonicalCall
    rows: Any
    keys: Sequence[Array]
    identity: Any
    term: Callable[..., Any]
    join: tree.Join
    finish: Callable[[Any, Any], Any]

    def whole(self) -> Any:
        """The results, over all leaves."""
        fold, count = self._folds(), self.call.held.tiles
        return self._results(lambda n: fold(n, jnp.zeros_like(n), jnp.full_like(n, count)))

    def nodes(self, leaves: int) -> tuple[list[Array], Int[Array, "b nodes"]]:
        """The folds over so many leaves at a time, `[nodes, B, T, N, ...]`, and the number of a leaf of each, or -1.

        There must be a power of two of them, of which the first has a number that is a multiple of it.
        """
        call, held, fold = self.call, self.call.held, self._folds()
        count = -(-held.tiles // leaves)

        def node(number: Array) -> Any:
            first = number * leaves
            stop = jnp.minimum(first + leaves, held.tiles)
            return call.tiles.each(lambda n: fold(n, first, stop), call.operands.query)

        found = each(node, count, call.operands.query)
        numbers = jnp.broadcast_to(node_numbers(held, leaves), (call.batch, count))
        return jax.tree.leaves(found), numbers

    def of_nodes(self, nodes: Sequence[Array], numbers: Int[Array, "b nodes"]) -> Any:
        """The results, over nodes of all devices."""
        call = self.call
        items = jax.tree.unflatten(jax.tree.structure(self.identity), list(nodes))

        def whole(n: Array) -> Any:
            some = jax.tree.map(jax.vmap(lambda x: call.tiles.cut(x, n)), items)
            return tree.folded(numbers[call.tiles.place(n)[0]], some, self.identity, self.join)

        return self._results(whole)

    def _folds(self) -> Callable[[Array, Array, Array], Any]:
        """The fold of the `n`-th tile over leaves from one number to another."""
        call, held, tiles = self.call, self.call.held, self.call.tiles
        ids = call.operands.tokens.query_positions, call.operands.tokens.query_segments
        side = Side(*(None if x is None else tiles.spread(x) for x in ids))  # pyright: ignore[reportArgumentType]
        live_after = following(call.met(side))
        first_heads = jnp.arange(call.key_heads, dtype=jnp.int32)[:, None] * call.group

        def fold(n: Array, first: Array, stop: Array) -> Any:
            batch, index, _ = tiles.place(n)
            row = cut_rows(call, self.rows, n)
            at, live, numbers = (
                side.at(batch, index),
                entry(live_after, batch)[index],
                entry(held.numbers, batch),
            )
            queries, members = tiles.of_rows(n)

            def one_leaf(carry: tuple[Array, tree.Fold]) -> tuple[Array, tree.Fold]:
                leaf, fold = carry
                tokens = held.tokens(batch, leaf)
                of_keys = call.keys.at(batch, leaf)
                tile = Tile(batch, first_heads + members[None], queries, tokens, at, of_keys)
                item = self.term(row, tile, *held.read(self.keys, batch, leaf, call.dtype))
                return live[leaf + 1], tree.insert(fold, numbers[leaf], item, self.join)

            begin = live[first], tree.start(self.identity, held.depth, numbers[live[first]])
            _, fold = lax.while_loop(lambda carry: carry[0] < stop, one_leaf, begin)
            return tree.result(fold, self.join)

        return fold

    def _results(self, whole: Callable[[Array], Any]) -> Any:
        """`finish(rows, whole(n))` of each tile."""
        call = self.call
        found = call.tiles.each(
            lambda n: self.finish(cut_rows(call, self.rows, n), whole(n)), call.operands.query
        )
        return jax.tree.map(call.held.checked, found)


def of_rows(call: CanonicalCall, rows: Any, f: Callable[[Any], Any]) -> Any:
    """`f` of each tile of rows, as `OverKeys` has them, which returns the like."""
    return call.tiles.each(lambda n: f(cut_rows(call, rows, n)), call.operands.query)


def cut_rows(call: CanonicalCall, rows: Any, n: Array) -> Any:
    """The `n`-th tile of arrays of rows."""
    return jax.tree.map(lambda x: call.tiles.cut(x, n).astype(call.dtype), rows)


def node_numbers(held: AbstractSlots, leaves: int) -> Int[Array, "b nodes"]:
    """The number of some leaf of each so many leaves, -1 where there is no key."""
    numbers = jnp.where((held.positions >= 0).any(-1), held.numbers, -1)
    numbers = jnp.pad(numbers, ((0, 0), (0, -numbers.shape[1] % leaves)), constant_values=-1)
    return numbers.reshape(numbers.shape[0], -1, leaves).max(-1)


def over_queries(
    call: CanonicalCall,
    rows: Any,
    keys: Sequence[Array],
    identity: Any,
    term: Callable[..., Any],
    join: tree.Join,
    finish: Callable[[Any], Any],
) -> Any:
    """`finish(fold of term(rows, tile, *keys) over tiles of queries and heads)` for each leaf of keys.

    Arguments as those of `OverKeys`. A query's place in its tile is that of its position.
    """
    operands, group, held = call.operands, call.group, call.held
    of_rows = call.queries_by_position(QUERIES)
    flat, form = jax.tree.flatten(rows)
    side = in_slots(of_rows, operands.tokens.query_segments)
    live_after = following(call.met(side).swapaxes(1, 2))
    first_heads = jnp.arange(call.key_heads, dtype=jnp.int32)[:, None] * group
    depth = of_rows.depth + group.bit_length()

    def one_leaf(n: Array) -> Any:
        batch, leaf = _digits(n, held.tiles)
        parts = held.read(keys, batch, leaf, call.dtype)
        at, live, tokens = (
            call.keys.at(batch, leaf),
            entry(live_after, batch)[leaf],
            held.tokens(batch, leaf),
        )
        numbers = entry(of_rows.numbers, batch)

        def one_tile(carry: tuple[Array, Array, tree.Fold]) -> tuple[Array, Array, tree.Fold]:
            index, member, fold = carry
            queries = of_rows.tokens(batch, index)
            tile = Tile(batch, first_heads + member, queries, tokens, side.at(batch, index), at)
            # inside the loop, as in those over keys, or XLA makes two of an array that it fuses the form into
            by_member = [x.reshape(*x.shape[:2], call.key_heads, -1) for x in flat]
            row = of_rows.read(by_member, batch, index, call.dtype, (member, group))
            row = [x if y.ndim == 4 else x[..., 0] for x, y in zip(row, flat, strict=True)]
            item = term(jax.tree.unflatten(form, row), tile, *parts)
            fold = tree.insert(fold, numbers[index] * group + member, item, join)
            is_last = member == group - 1
            index = jnp.where(is_last, live[index + 1], index)
            return index, jnp.where(is_last, 0, member + 1), fold

        first = tree.start(identity, depth, numbers[live[0]] * group)
        begin = live[0], jnp.zeros_like(live[0]), first
        _, _, fold = lax.while_loop(lambda carry: carry[0] < of_rows.tiles, one_tile, begin)
        return finish(tree.result(fold, join))

    found = each(one_leaf, call.batch * held.tiles, operands.query)
    return jax.tree.map(lambda x: of_rows.checked(held.checked(_to_keys(x, call))), found)


def _digits(n: Array, size: int) -> tuple[Array, Array]:
    """The indices of the `n`-th entry along two axes, the last of this size."""
    return lax.div(n, jnp.full_like(n, size)), lax.rem(n, jnp.full_like(n, size))


def following(met: Bool[Array, "b x y"]) -> Int[Array, "b x z"]:
    """The first `y` from each on that is met, their number if there is none; one entry more."""
    count = met.shape[-1]
    numbers = jnp.where(met, jnp.arange(count, dtype=jnp.int32)[None, None], count)
    numbers = jnp.pad(numbers, ((0, 0), (0, 0), (0, 1)), constant_values=count)
    return lax.cummin(numbers, axis=2, reverse=True)


def _to_keys(x: Array, call: CanonicalCall) -> Array:
    """`[B * leaves, K, LEAF, W]` as `[B, S, K, W]`."""
    x = x.swapaxes(1, 2).reshape(call.batch, -1, call.key_heads, x.shape[-1])
    return call.held.unlaid(x)
