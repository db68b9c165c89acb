"""Packing of drafts in plain Python, slot by slot: the reference for `pack`."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from energy_attn.prefix_tree import PrefixTree


def pack_by_tries(beam: ArrayLike, lengths: ArrayLike | None = None) -> PrefixTree:
    """The tree of a beam in `M C` slots, by a trie of dictionaries (de la Briandais, 1959)."""
    beam = np.asarray(beam)
    lengths = np.full(beam.shape[:2], beam.shape[2]) if lengths is None else lengths
    batch, rows, levels = beam.shape
    slots = rows * levels
    tokens = np.zeros((batch, slots), beam.dtype)
    mask = np.tile(np.eye(slots, dtype=bool), (batch, 1, 1))
    depth, parent = np.zeros((batch, slots), np.int32), np.full((batch, slots), -1, np.int32)
    unpacker, size = np.full(beam.shape, -1, np.int32), np.zeros(batch, np.int32)
    for b, (candidates, counts) in enumerate(
        zip(np.asarray(beam).tolist(), np.asarray(lengths).tolist(), strict=True)
    ):
        roots: dict[int, Any] = {}  # by token: the slot, and its children
        for m, (candidate, count) in enumerate(zip(candidates, counts, strict=True)):
            above, children = -1, roots
            for c, token in enumerate(candidate[:count]):
                if token not in children:
                    slot = int(size[b])
                    children[token] = slot, {}
                    tokens[b, slot], depth[b, slot], parent[b, slot] = token, c, above
                    mask[b, slot, unpacker[b, m, :c]] = True
                    size[b] += 1
                above, children = children[token]
                unpacker[b, m, c] = above
    return PrefixTree(*map(jnp.asarray, (tokens, mask, depth, parent, unpacker, size)))
