"""Evaluates masks for pairs of tokens and pairs of blocks; absent tokens see nothing."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from .._varying import vary_together
from ._abstract import AbstractMask, Not
from ._interval import Interval, interval
from ._window import WINDOWS, All, Causal

_MOST_BLOCKS = 1024  # blocks of queries that are compared with every key
_ROWS, _KEYS = (
    256,
    1024,
)  # the pairs that are compared at a time, where intervals do not determine it


def visible(
    mask: AbstractMask, query: Int[Array, "..."], key: Int[Array, "..."]
) -> Bool[Array, "..."]:
    """Which queries see which keys, by position; the arguments broadcast.

    A query or key with a negative position is absent. The arrays of the mask have an axis of the batch
    in front, as positions have.
    """
    return _where_present((query >= 0) & (key >= 0), mask, lambda mask: mask.visible, query, key)


def may_meet(mask: AbstractMask, query: Interval, key: Interval) -> Bool[Array, "..."]:
    """Whether any query of one block might see any key of another; the intervals broadcast.

    Never false where a pair is visible; may be true where none is.
    """
    present = (query.low <= query.high) & (key.low <= key.high)
    return _where_present(present, mask, lambda mask: mask.any_visible, query, key)


def must_meet(mask: AbstractMask, query: Interval, key: Interval) -> Bool[Array, "..."]:
    """Whether every present query of one block sees every key of another; the intervals broadcast.

    `key.low` is over all keys of the block, and so negative if any is absent. Never true where a
    pair is hidden; may be false where none is.
    """
    return _where_present(key.low >= 0, mask, lambda mask: mask.all_visible, query, key)


def _where_present(
    present: Array,
    mask: AbstractMask,
    method: Callable[[Any], Any],
    query: Array | Interval,
    key: Array | Interval,
) -> Array:
    if isinstance(mask, All):
        return present
    arrays = jax.tree.leaves(mask)
    if all(x.shape[0] == 1 for x in arrays):
        return present & method(jax.tree.map(lambda x: x[0], mask))(query, key)

    # arrays and positions may have a batch axis of 1
    def entry(x: Array) -> Array:
        return x[0] if x.shape[0] == 1 else x

    batched = mask, query, key
    axes = jax.tree.map(lambda x: None if x.shape[0] == 1 else 0, batched)
    return present & jax.vmap(lambda mask, query, key: method(mask)(query, key), in_axes=axes)(
        *jax.tree.map(entry, batched)
    )


def may_share(query: Interval, key: Interval) -> Bool[Array, "..."]:
    """Whether two blocks of segment ids, given as intervals, might share an id."""
    return (query.low <= key.high) & (key.low <= query.high)


def reachable(
    mask: AbstractMask, query: Int[Array, "#B T"], key: Int[Array, "#B S"]
) -> Bool[Array, "_ S"]:
    """Which keys any query may see.

    Never false where a query does. May be true where none does only under a window, in gaps between
    the positions of successive queries.
    """
    query_len, key_len = query.shape[1], key.shape[1]
    static = isinstance(query_len, int) and isinstance(key_len, int)  # not symbols
    if not isinstance(mask, WINDOWS):
        rows, keys = (
            (min(_ROWS, query_len), min(_KEYS, key_len)) if static else (query_len, key_len)
        )
        visible_keys = _compare_pairs(mask, in_blocks(query, rows), in_blocks(key, keys), "keys")
        return visible_keys.reshape(visible_keys.shape[0], -1)[:, :key_len] if key_len else key >= 0
    blocks = 1 if isinstance(mask, (All, Causal)) or not static else min(query_len, _MOST_BLOCKS)
    low, high = interval(in_blocks(query, -(-query_len // blocks)))
    single_keys = Interval(key[:, :, None], key[:, :, None])
    queries = Interval(low[:, None, :], high[:, None, :])
    return (key >= 0) & may_meet(mask, queries, single_keys).any(-1)


def in_blocks(x: Array, size: int) -> Array:
    """Tokens `[B, L]` as `[B, blocks, size]`, with absent ones in the last block."""
    blocks = -(-x.shape[1] // size)
    x = jnp.pad(x, ((0, 0), (0, blocks * size - x.shape[1])), constant_values=-1)
    return x.reshape(x.shape[0], blocks, size)


# positions or segments of queries and of keys, in blocks
Pair = tuple[Int[Array, "#B query_blocks rows"], Int[Array, "#B key_blocks keys"]]


def meeting(
    mask: AbstractMask, positions: Pair | None, segments: Pair | None
) -> Bool[Array, "_ query_blocks key_blocks"] | None:
    """Which blocks of queries might see any key of which blocks of keys; None for all."""
    meet = None
    if positions is not None:
        if mask._told_by_intervals():
            meet = may_meet(mask, *facing(*map(interval, positions)))
        else:
            meet = _compare_pairs(mask, *positions, "blocks")
    if segments is not None:
        share = may_share(*facing(*(Interval(x.min(-1), x.max(-1)) for x in segments)))
        meet = share if meet is None else meet & share
    return meet


def facing(queries: Interval, keys: Interval) -> tuple[Interval, Interval]:
    return Interval(*(x[:, :, None] for x in queries)), Interval(*(x[:, None, :] for x in keys))


def _compare_pairs(
    mask: AbstractMask,
    queries: Int[Array, "#B x rows"],
    keys: Int[Array, "#B y keys"],
    result: Literal["blocks", "keys"],
) -> Bool[Array, "b _ _"]:
    """Which pairs of blocks have a visible pair, `[b, x, y]`, or which keys any query sees, `[b, y, keys]`.

    One block of pairs is in memory at a time, and is evaluated only if intervals do not determine it.
    """
    mask, queries, keys = vary_together((mask, queries, keys))
    rows, columns = interval(queries), interval(keys)
    may = may_meet(mask, *facing(rows, columns))
    key_range = Interval(keys.min(-1), keys.max(-1))
    all_visible = may & must_meet(mask, *facing(rows, key_range))

    def key_block(block: tuple[Array, Array, Array]) -> Array:
        key, may, all_visible = block

        def query_block(block: tuple[Array, Array, Array]) -> Array:
            query, may, all_visible = block

            def compared() -> Array:
                return visible(mask, query[:, :, None], key[:, None, :]).any(1)

            def known() -> Array:
                return jnp.broadcast_to(all_visible[:, None], (len(all_visible), key.shape[1]))

            return lax.cond((may & ~all_visible).any(), compared, known)

        visible_pairs = lax.map(
            query_block, (queries.swapaxes(0, 1), may.T, all_visible.T)
        )  # [x, b, keys]
        return visible_pairs.any(0) if result == "keys" else visible_pairs.any(-1).swapaxes(0, 1)

    blocks = keys.swapaxes(0, 1), jnp.moveaxis(may, 2, 0), jnp.moveaxis(all_visible, 2, 0)
    return jnp.moveaxis(lax.map(key_block, blocks), 0, 1 if result == "keys" else 2)


def tabulated(
    mask: AbstractMask, queries: Int[Array, "#B x rows"], keys: Int[Array, "#B y keys"]
) -> tuple[Bool[Array, "b x y"], Bool[Array, "b x y"]]:
    """Which pairs of blocks have a visible pair, and which have no hidden pair of present tokens."""
    any_visible, any_hidden = (
        _compare_pairs(x, queries, keys, "blocks") for x in (mask, Not(mask))
    )
    return any_visible, ~any_hidden
