"""Attention of a tree's nodes, path by path, each as the text that it is: a node has the bits of a token."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.distributed import KVCache
from energy_attn.distributed.internal import check_reach

from ...prefix_tree import PrefixTree
from ...prefix_tree._tree import gather_slots


def attend_paths(
    attend: Callable[..., Array],
    tree: PrefixTree,
    stored: KVCache,
    nodes: tuple[Array, Array, Array],
    **options: Any,
) -> Array:
    """The attention of the nodes, of which `nodes` are queries, keys and values, over a cache and their ancestors.

    Siblings have one position, so that no call has the keys of two. Zero in slots that are on no path.
    """
    if stored.parallel is not None:
        raise NotImplementedError(
            "reproducible: wanted False for trees over a cache that is sharded over a mesh, got True"
        )
    reach = check_reach(options.pop("local_window_size", None), stored.window)
    level = jnp.arange(tree.unpacker.shape[2], dtype=jnp.int32)[None]

    def one(slots: Array) -> Array:
        query, key, value = (gather_slots(x, slots) for x in nodes)
        positions = jnp.where(slots >= 0, stored.lengths[:, None] + level, -1)
        return attend(
            query,
            jnp.concatenate([stored.keys(), key], 1),
            jnp.concatenate([stored.values(), value], 1),
            **options,
            is_causal=True,
            local_window_size=reach,
            query_positions=positions,
            key_positions=jnp.concatenate([stored.positions, positions], 1),
        )

    slots = tree.unpacker.swapaxes(0, 1)
    found = lax.map(one, slots)
    none = jnp.zeros((*nodes[0].shape[:3], found.shape[-1]), found.dtype)
    rows = jnp.arange(len(none), dtype=jnp.int32)[None, :, None]
    return none.at[rows, jnp.where(slots < 0, none.shape[1], slots)].set(found, mode="drop")
