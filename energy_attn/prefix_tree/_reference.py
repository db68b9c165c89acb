"""Packing in plain Python: the reference for `pack`, slot by slot."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer

from ._pack import check_beam
from ._tree import PrefixTree


def pack_reference(
    beam: Integer[Array, "B M C"], lengths: Integer[Array, "B M"] | None = None
) -> PrefixTree:
    """Computes what [`pack`][energy_attn.prefix_tree.pack] does by a trie of dictionaries: slow and plain.

    Args:
        beam: `[B, M, C]` integers.
        lengths: `[B, M]` integers from 0 to `C`: the number of tokens of each candidate. None is
            `C`.

    Returns:
        The tree in `M C` slots; unused slots hold token 0.

    Raises:
        TypeError: an argument is not an array of integers, or is traced.
        ValueError: another rank, no candidates or tokens, or lengths out of range.

    Source: the trie, de la Briandais (Western Joint Computer Conference, 1959).

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.prefix_tree import pack_reference
        >>> tree = pack_reference(jnp.array([[[5, 7, 7], [5, 7, 8]]]))
        >>> tree.tokens.tolist(), tree.parent.tolist()
        ([[5, 7, 7, 8, 0, 0]], [[-1, 0, 1, 1, -1, -1]])
    """
    beam, lengths = check_beam(beam, lengths)
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
