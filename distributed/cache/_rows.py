"""Whole rows of a cache: emptied, or copied from another cache; each device for its own slots."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ._write import CacheSharding, Stored, write_at

# The stored arrays of a cache, its starts and its lengths.
Rows = tuple[Stored, Array, Array]


@functools.partial(jax.jit, static_argnums=0)
def empty_rows(
    sharding: CacheSharding | None, emptied: Array, starts: Array, lengths: Array
) -> tuple[Array, Array]:
    """Starts and lengths, zero in the rows that are `emptied` `[B]`; sharded as they were."""

    def local(emptied: Array, starts: Array, lengths: Array) -> tuple[Array, Array]:
        return jnp.where(emptied, 0, starts), jnp.where(emptied, 0, lengths)

    if sharding is None:
        return local(emptied, starts, lengths)
    out_specs = (sharding.rows,) * 2
    return sharding.map(local, (sharding.rows,) * 3, out_specs, emptied, starts, lengths)


@functools.partial(jax.jit, static_argnums=0)
def replace_rows(sharding: CacheSharding | None, mine: Rows, new: Rows, rows: Array) -> Rows:
    """The rows of a cache with `new` ones at the indices `rows` `[n]`; dropped where these are out of range.

    Of indices that repeat the last counts. Rows of `new` are on all devices that have rows of the cache.
    """

    def local(mine: Rows, new: Rows, rows: Array) -> Rows:
        size, order = len(mine[2]), jnp.arange(len(rows), dtype=jnp.int32)
        index = rows
        if sharding and sharding.batch:
            index -= lax.axis_index(sharding.batch) * size
        later = order[:, None] < order[None]
        repeats = ((rows[:, None] == rows[None]) & later).any(1)
        # dropped rows go after the last one, each to its own index
        row = jnp.where((index >= 0) & (index < size) & ~repeats, index, size + order)[None]

        def put(old: Array, new: Array) -> Any:
            return write_at(old[None], new[None], row)[0]

        return jax.tree.map(put, mine, new)

    if sharding is None:
        return local(mine, new, rows)
    every = PartitionSpec(None, *sharding.slots[1:])
    specs = (
        (sharding.slots, sharding.rows, sharding.rows),
        (every, PartitionSpec(), PartitionSpec()),
    )
    return sharding.map(local, (*specs, PartitionSpec()), specs[0], mine, new, rows)
