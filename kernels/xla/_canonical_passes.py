"""The two passes over the tiles of a call: folds over keys for tiles of rows, over queries for leaves of keys."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from . import _canonical_tree as tree
from ._canonical_call import QUERIES, CanonicalCall, Side, Tile, in_slots
from ._canonical_slots import AbstractSlots, InOrder, Scattered, entry
from ._each import each


def over_keys(
    call: CanonicalCall,
    rows: Any,
    keys: Sequence[Array],
    identity: Any,
    term: Callable[..., Any],
    join: tree.Join,
    finish: Callable[[Any, Any], Any],
) -> Any:
    """`finish(rows, fold of term(rows, tile, *keys) over the leaves)` for each tile of rows.

    `rows` are arrays `[B, T, N, W]` or `[B, T, N]`, of which a tile is `[K, rows, W]`; `keys` are arrays
    `[B, S, K, W]`, of which a leaf is `[K, LEAF, W]`. Rows of all query heads of a key head fill tiles together,
    wherever they are: a row's sums do not depend on its place.
    """
    count = -(-call.queries * call.group // call.rows)
    rows = jax.tree.map(lambda x: in_tiles(x, call), rows)
    of_rows = (
        rows_of(x, call) for x in (call.operands.query_positions, call.operands.query_segments)
    )
    side = Side(*of_rows)  # pyright: ignore[reportArgumentType]
    following, held = _following(call.met(side)), call.held
    first_heads = jnp.arange(call.key_heads, dtype=jnp.int32)[:, None] * call.group

    def row_of(n: Array) -> Any:
        batch, index = _digits(n, count)
        return jax.tree.map(lambda x: x[batch, index].astype(call.dtype), rows)

    def over_leaves(n: Array, first: Array, stop: Array) -> Any:
        batch, index = _digits(n, count)
        row = row_of(n)
        at, live, numbers = (
            side.at(batch, index),
            entry(following, batch)[index],
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
            item = term(row, tile, *held.read(keys, batch, batch, leaf, call.dtype))
            return live[leaf + 1], tree.insert(fold, numbers[leaf], item, join)

        begin = live[first], tree.start(identity, held.depth, numbers[live[first]])
        _, fold = lax.while_loop(lambda carry: carry[0] < stop, one_leaf, begin)
        return tree.result(fold, join)

    tiles = call.batch * count
    if call.part is None:

        def whole(n: Array) -> Any:
            return over_leaves(n, jnp.zeros_like(n), jnp.full_like(n, held.tiles))
    else:
        size, gather = call.part
        units = -(-held.tiles // size)

        def one_unit(n: Array) -> Any:
            tile, unit = _digits(n, units)
            first = unit * size
            return over_leaves(tile, first, jnp.minimum(first + size, held.tiles))

        nodes = each(one_unit, tiles * units, call.operands.query)
        nodes = jax.tree.map(lambda x: x.reshape(tiles, units, *x.shape[1:]), nodes)
        nodes, numbers = gather((nodes, _unit_numbers(held, size)))

        def whole(n: Array) -> Any:
            batch, _ = _digits(n, count)
            items = jax.tree.map(lambda x: lax.collapse(x[:, n], 0, 2), nodes)
            numbered = lax.collapse(entry(numbers.swapaxes(0, 1), batch), 0, 2)
            return tree.folded(numbered, items, identity, join)

    found = each(lambda n: finish(row_of(n), whole(n)), tiles, call.operands.query)
    return jax.tree.map(lambda x: held.checked(from_tiles(x, call)), found)


def _unit_numbers(held: AbstractSlots, size: int) -> Int[Array, "b units"]:
    """The number of some leaf of each `size` leaves, -1 where there is no key."""
    numbers = jnp.where((held.positions >= 0).any(-1), held.numbers, -1)
    numbers = jnp.pad(numbers, ((0, 0), (0, -numbers.shape[1] % size)), constant_values=-1)
    return numbers.reshape(len(numbers), -1, size).max(-1)


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

    Arguments as in `over_keys`. A query's place in its tile is that of its position.
    """
    operands, group, held = call.operands, call.group, call.held
    positions: Any = operands.query_positions
    of_rows = InOrder(positions, QUERIES, True) if call.counted else Scattered(positions, QUERIES)
    flat, form = jax.tree.flatten(rows)
    by_member = [_by_member(x if x.ndim == 4 else x[..., None], call) for x in flat]
    side = in_slots(of_rows, operands.query_segments)
    following = _following(call.met(side).swapaxes(1, 2))
    first_heads = jnp.arange(call.key_heads, dtype=jnp.int32)[:, None] * group
    depth = of_rows.depth + group.bit_length()

    def one_leaf(n: Array) -> Any:
        batch, leaf = _digits(n, held.tiles)
        parts = held.read(keys, batch, batch, leaf, call.dtype)
        at, live, tokens = (
            call.keys.at(batch, leaf),
            entry(following, batch)[leaf],
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


def _following(met: Bool[Array, "b x y"]) -> Int[Array, "b x z"]:
    """The first `y` from each on that is met, their number if there is none; one entry more."""
    count = met.shape[-1]
    numbers = jnp.where(met, jnp.arange(count, dtype=jnp.int32)[None, None], count)
    numbers = jnp.pad(numbers, ((0, 0), (0, 0), (0, 1)), constant_values=count)
    return lax.cummin(numbers, axis=2, reverse=True)


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
