"""The two passes over the tiles of a call: folds over keys for tiles of rows, over queries for leaves of keys."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from . import _canonical_tree as tree
from ._canonical_call import QUERIES, CanonicalCall, Side, Tile, in_slots
from ._canonical_slots import AbstractSlots, InOrder, Scattered, entry
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
        held, row_of = self.call.held, tile_of(self.rows, self.call)
        fold = self._folds()

        def one(n: Array) -> Any:
            return self.finish(row_of(n), fold(n, jnp.zeros_like(n), jnp.full_like(n, held.tiles)))

        return self._results(one)

    def nodes(self, leaves: int) -> tuple[list[Array], Int[Array, "b nodes"]]:
        """The folds over so many leaves at a time, `[nodes, B, T, N, ...]`, and the number of a leaf of each, or -1.

        There must be a power of two of them, of which the first has a number that is a multiple of it.
        """
        call, held, fold = self.call, self.call.held, self._folds()
        count = -(-held.tiles // leaves)

        def one(n: Array) -> Any:
            tile, node = _digits(n, count)
            first = node * leaves
            return fold(tile, first, jnp.minimum(first + leaves, held.tiles))

        found = each(one, tile_count(self.call) * count, call.operands.query)

        def of_each(x: Array) -> Array:
            x = x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)
            return jax.vmap(lambda x: from_tiles(x, call))(x)

        numbers = jnp.broadcast_to(node_numbers(held, leaves), (call.batch, count))
        return [of_each(x) for x in jax.tree.leaves(found)], numbers

    def of_nodes(self, nodes: Sequence[Array], numbers: Int[Array, "b nodes"]) -> Any:
        """The results, over nodes of all devices."""
        call, row_of = self.call, tile_of(self.rows, self.call)
        in_each = jax.vmap(lambda x: in_tiles(x, call))
        items = jax.tree.unflatten(jax.tree.structure(self.identity), map(in_each, nodes))

        def one(n: Array) -> Any:
            batch, index = _digits(n, tile_count(self.call) // call.batch)
            some = jax.tree.map(lambda x: x[:, batch, index], items)
            whole = tree.folded(numbers[batch], some, self.identity, self.join)
            return self.finish(row_of(n), whole)

        return self._results(one)

    def _folds(self) -> Callable[[Array, Array, Array], Any]:
        """The fold of the `n`-th tile over leaves from one number to another."""
        call, held, row_of = self.call, self.call.held, tile_of(self.rows, self.call)
        of_rows = (
            rows_of(x, call) for x in (call.operands.query_positions, call.operands.query_segments)
        )
        side = Side(*of_rows)  # pyright: ignore[reportArgumentType]
        live_after = following(call.met(side))
        first_heads = jnp.arange(call.key_heads, dtype=jnp.int32)[:, None] * call.group
        count = tile_count(self.call) // call.batch

        def fold(n: Array, first: Array, stop: Array) -> Any:
            batch, index = _digits(n, count)
            row = row_of(n)
            at, live, numbers = (
                side.at(batch, index),
                entry(live_after, batch)[index],
                entry(held.numbers, batch),
            )
            numbered = index * call.rows + jnp.arange(call.rows, dtype=jnp.int32)
            queries, members = _digits(numbered, call.group)
            queries = jnp.minimum(queries, call.queries - 1)

            def one_leaf(carry: tuple[Array, tree.Fold]) -> tuple[Array, tree.Fold]:
                leaf, fold = carry
                tokens = held.tokens(batch, leaf)
                of_keys = call.keys.at(batch, leaf)
                tile = Tile(batch, first_heads + members[None], queries, tokens, at, of_keys)
                item = self.term(row, tile, *held.read(self.keys, batch, batch, leaf, call.dtype))
                return live[leaf + 1], tree.insert(fold, numbers[leaf], item, self.join)

            begin = live[first], tree.start(self.identity, held.depth, numbers[live[first]])
            _, fold = lax.while_loop(lambda carry: carry[0] < stop, one_leaf, begin)
            return tree.result(fold, self.join)

        return fold

    def _results(self, one: Callable[[Array], Any]) -> Any:
        call = self.call
        found = each(one, tile_count(self.call), call.operands.query)
        return jax.tree.map(lambda x: call.held.checked(from_tiles(x, call)), found)


def of_rows(call: CanonicalCall, rows: Any, f: Callable[[Any], Any]) -> Any:
    """`f` of each tile of rows, as `OverKeys` has them, which returns the like."""
    row_of = tile_of(rows, call)
    found = each(lambda n: f(row_of(n)), tile_count(call), call.operands.query)
    return jax.tree.map(lambda x: from_tiles(x, call), found)


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
    positions: Any = operands.query_positions
    of_rows = InOrder(positions, QUERIES, True) if call.counted else Scattered(positions, QUERIES)
    flat, form = jax.tree.flatten(rows)
    by_member = [_by_member(x if x.ndim == 4 else x[..., None], call) for x in flat]
    side = in_slots(of_rows, operands.query_segments)
    live_after = following(call.met(side).swapaxes(1, 2))
    first_heads = jnp.arange(call.key_heads, dtype=jnp.int32)[:, None] * group
    depth = of_rows.depth + group.bit_length()

    def one_leaf(n: Array) -> Any:
        batch, leaf = _digits(n, held.tiles)
        parts = held.read(keys, batch, batch, leaf, call.dtype)
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
            row = of_rows.read(by_member, batch * group + member, batch, index, call.dtype)
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


def tile_count(call: CanonicalCall) -> int:
    """The tiles of rows of a call."""
    return call.batch * -(-call.queries * call.group // call.rows)


def tile_of(rows: Any, call: CanonicalCall) -> Callable[[Array], Any]:
    """The function that returns the `n`-th tile of arrays of rows."""
    tiles = jax.tree.map(lambda x: in_tiles(x, call), rows)
    count = tile_count(call) // call.batch

    def row_of(n: Array) -> Any:
        batch, index = _digits(n, count)
        return jax.tree.map(lambda x: x[batch, index].astype(call.dtype), tiles)

    return row_of


def rows_of(x: Array | None, call: CanonicalCall) -> Array | None:
    """Positions or segments `[#B, T]` of rows in tiles, as `in_tiles` of `[B, T, N]` does it."""
    if x is None:
        return None
    x = jnp.repeat(x, call.group, axis=1)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % call.rows)), constant_values=-1)
    return x.reshape(len(x), -1, call.rows)


def in_tiles(x: Array, call: CanonicalCall) -> Array:
    """`[B, T, N, ...]` as `[B, tiles, K, rows, ...]`."""
    rest = x.shape[3:]
    x = x.reshape(call.batch, call.queries, call.key_heads, call.group, *rest)
    x = jnp.moveaxis(x, 2, 3).reshape(call.batch, -1, call.key_heads, *rest)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % call.rows), *[(0, 0)] * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(call.batch, -1, call.rows, call.key_heads, *rest), 2, 3)


def from_tiles(x: Array, call: CanonicalCall) -> Array:
    """`[B * tiles, K, rows, ...]` as `[B, T, N, ...]`."""
    rest = x.shape[3:]
    x = jnp.moveaxis(x, 1, 2).reshape(call.batch, -1, call.key_heads, *rest)
    x = x[:, : call.queries * call.group]
    x = x.reshape(call.batch, call.queries, call.group, call.key_heads, *rest)
    return jnp.moveaxis(x, 2, 3).reshape(call.batch, call.queries, -1, *rest)


def _by_member(x: Array, call: CanonicalCall) -> Array:
    """`[B, T, N, W]` as `[B * G, T, K, W]`."""
    x = x.reshape(call.batch, call.queries, call.key_heads, call.group, x.shape[-1])
    return jnp.moveaxis(x, 3, 1).reshape(-1, call.queries, call.key_heads, x.shape[-1])


def _to_keys(x: Array, call: CanonicalCall) -> Array:
    """`[B * leaves, K, LEAF, W]` as `[B, S, K, W]`."""
    x = x.swapaxes(1, 2).reshape(call.batch, -1, call.key_heads, x.shape[-1])
    return call.held.unlaid(x)
