"""Rows of a cache, emptied, copied from another cache, or without their least important tokens.

Each device writes its own slots.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ._layout import CacheArrays, CacheSharding, Slots
from ._write import write_at


@functools.partial(jax.jit, static_argnums=0)
def empty_rows(
    sharding: CacheSharding, emptied: Array, begins: Array, starts: Array, lengths: Array
) -> tuple[Array, Array]:
    """Starts and lengths, those of rows that are `emptied` `[B]` at the position where the row begins."""

    def local(emptied: Array, begins: Array, *starts_and_lengths: Array) -> tuple[Array, ...]:
        return tuple(jnp.where(emptied, begins, x) for x in starts_and_lengths)

    specs = (sharding.rows,) * 4
    return sharding.map(local, specs, specs[:2], emptied, begins, starts, lengths)


@functools.partial(jax.jit, static_argnums=0)
def replace_rows(
    sharding: CacheSharding, mine: CacheArrays, new: CacheArrays, rows: Array
) -> CacheArrays:
    """The rows of a cache with `new` ones at the indices `rows` `[n]`; dropped where these are out of range.

    Of indices that repeat the last counts. Rows of `new` are on all devices that have rows of the cache.
    """

    def local(mine: CacheArrays, new: CacheArrays, rows: Array) -> CacheArrays:
        size, order = len(mine.lengths), jnp.arange(len(rows), dtype=jnp.int32)
        index = rows
        if sharding.batch:
            index -= lax.axis_index(sharding.batch) * size
        later = order[:, None] < order[None]
        repeats = ((rows[:, None] == rows[None]) & later).any(1)
        # dropped rows go after the last one, each to its own index
        row = jnp.where((index >= 0) & (index < size) & ~repeats, index, size + order)[None]

        def put(old: Array, new: Array) -> Any:
            return write_at(old[None], new[None], row)[0]

        return jax.tree.map(put, mine, new)

    whole, every = PartitionSpec(), PartitionSpec(None, *sharding.slots[1:])
    in_specs = sharding.arrays, CacheArrays(*[every] * 4, starts=whole, lengths=whole), whole
    return sharding.map(local, in_specs, sharding.arrays, mine, new, rows)


@functools.partial(jax.jit, static_argnums=(0, 2))
def repeat_rows(sharding: CacheSharding, x: Array, count: int) -> Array:
    """`[R]` to `[R * count]`: each entry `count` times."""

    def local(x: Array) -> Array:
        return jnp.repeat(x, count, total_repeat_length=len(x) * count)

    return sharding.map(local, (sharding.rows,), sharding.rows, x)


# Jitted so that a call outside of `jax.jit` runs as one program.
@functools.partial(jax.jit, static_argnums=(0, 1))
def keep_important(
    sharding: CacheSharding, slots: Slots, arrays: CacheArrays, first: Array, importance: Array
) -> CacheArrays:
    """The tokens of largest `importance`, in order, in the slots of the tokens from `first` on.

    `importance` is `[B, S, K]`, or `[B, S, 1]` for all heads at once. Of equals the newer one stays. Each device
    gathers the slots of all, one array after the other.
    """
    axes = sharding.sequence

    def gathered(x: Array) -> Array:
        return lax.all_gather(x, axes, axis=1, tiled=True) if axes else x

    def local(arrays: CacheArrays, first: Array, importance: Array) -> CacheArrays:
        *stored, starts, lengths = arrays
        every = jnp.arange(slots.capacity, dtype=jnp.int32)[None]
        token = slots.held(every, lengths[:, None])
        present = token >= starts[:, None]
        # sources[b, k, j]: the slot of the j-th token that stays
        pick = jax.vmap(jax.vmap(_sources, (None, None, None, 1)))
        sources = pick(token, present, lengths - first, gathered(importance))
        number = slots.held(sharding.own(slots)[1], lengths[:, None]) - first[:, None]
        index = jnp.broadcast_to(
            jnp.maximum(number, 0)[:, None], (*sources.shape[:2], number.shape[1])
        )
        source = jnp.take_along_axis(sources, index, 2).swapaxes(1, 2)

        def moved(x: Array | None) -> Any:
            if x is None:
                return None
            index = jnp.broadcast_to(source, (*source.shape[:2], x.shape[2]))
            index = index.reshape(*index.shape, *[1] * (x.ndim - 3))
            return jnp.take_along_axis(gathered(x), index, 1)

        return CacheArrays(*map(moved, stored), starts=first, lengths=lengths)

    heads = sharding.slots if importance.shape[2] > 1 else PartitionSpec(*sharding.slots[:2])
    in_specs = sharding.arrays, sharding.rows, heads
    return sharding.map(local, in_specs, sharding.arrays, arrays, first, importance)


def _sources(token: Array, present: Array, count: Array, importance: Array) -> Array:
    """The slots of the `count` most important tokens of one row, in the order of the tokens; behind them the others."""
    ranked = jnp.lexsort((-token, -importance, ~present))
    rank = jnp.zeros_like(token).at[ranked].set(jnp.arange(len(token), dtype=token.dtype))
    return jnp.lexsort((token, rank >= count)).astype(jnp.int32)
