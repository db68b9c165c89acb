"""Attention of a tree's nodes, path by path, each as the text that it is: a node has the bits of a token."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.distributed import KVCache
from energy_attn.distributed.internal import check_reach

from ...prefix_tree import PrefixTree
from ...prefix_tree._tree import gather_slots
from ._see import How


def attend_paths(
    how: How, tree: PrefixTree, stored: KVCache, nodes: tuple[Array, Array, Array], **options: Any
) -> Array:
    """Attention of the nodes over a cache and their ancestors; `nodes` are their queries, keys and values.

    Siblings have one position, so that no call has the keys of two. Zero in slots that are on no path. Over a mesh a
    path is written to the cache, so that its keys are in leaves on one device, and so it is to one of eight bits, whose
    keys are rounded: nodes that there is no room for are NaN. Raises `ValueError` for paths that would be written over
    the window of a cache.
    """
    reach = check_reach(options.pop("local_window_size", None), stored.window)
    levels = tree.unpacker.shape[2]
    level = jnp.arange(levels, dtype=jnp.int32)[None]
    options |= {"is_causal": True, "local_window_size": reach}
    is_written = stored.parallel is not None or stored.key_scale is not None
    if is_written and stored.window is not None:
        room = stored.capacity - stored.window
        if levels > room:
            raise ValueError(f"cache: wanted room for paths of {levels} nodes, got {room}")

    def one(slots: Array) -> Array:
        query, key, value = (gather_slots(x, slots) for x in nodes)
        positions = jnp.where(slots >= 0, stored.lengths[:, None] + level, -1)
        if not is_written:
            return how.attend(
                query,
                jnp.concatenate([stored.keys(), key], 1),
                jnp.concatenate([stored.values(), value], 1),
                **options,
                query_positions=positions,
                key_positions=jnp.concatenate([stored.positions, positions], 1),
            )
        counts = (slots >= 0).sum(1, dtype=jnp.int32)
        if stored.window is None:
            room = stored.capacity - (stored.lengths - stored.starts)
            positions = jnp.where(level < room[:, None], positions, -1)
            counts = jnp.minimum(counts, room)
        longer = stored._written(key, value, counts)
        out = how.attend_to(longer)(
            query,
            longer.keys(),
            longer.values(),
            **options,
            query_positions=positions,
            key_positions=longer.positions,
            parallel=stored.parallel,
        )
        missing = (slots >= 0) & (positions < 0)
        return jnp.where(missing[:, :, None, None], jnp.nan, out)

    slots = tree.unpacker.swapaxes(0, 1)
    found = lax.map(one, slots)
    none = jnp.zeros((*nodes[0].shape[:3], found.shape[-1]), found.dtype)
    rows = jnp.arange(len(none), dtype=jnp.int32)[None, :, None]
    return none.at[rows, jnp.where(slots < 0, none.shape[1], slots)].set(found, mode="drop")
