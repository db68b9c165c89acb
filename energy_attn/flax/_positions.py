"""Positions of the queries of a call, which Flax's layers do not pass to their attention."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from energy_attn.kernels.internal import BoundScore, reads_first, split_score
from energy_attn.kernels.masks import AbstractMask
from energy_attn.kernels.scores import AbstractScore, At

from ..core._module import FreeEnergy


def query_positions(
    energy: FreeEnergy,
    is_causal: bool,
    mask: Bool[Array, "..."] | None,
    shape: tuple[int, int, int],
) -> Int[Array, "B T"] | None:
    """The positions of the queries of a call of shape `(B, T, S)`; None counts from 0.

    A layer that decodes calls with one query, all slots of its cache as keys, and a mask whose last visible slot
    is the query's own.

    Raises `ValueError` if the energy, or `is_causal` for one query, reads positions that are not known.
    """
    batch, query_len, key_len = shape
    if query_len == key_len or not ((is_causal and query_len == 1) or _reads_queries(energy)):
        return None
    if query_len != 1 or mask is None or mask.shape[-1] != key_len:
        raise ValueError(
            "query: wanted as many queries as keys, or one and the mask of a cache, as the energy compares "
            f"positions (FreeEnergy.attention takes query_positions=); got {query_len} and {key_len}"
        )
    visible = mask.any(tuple(range(mask.ndim - 1)))
    slots = jnp.arange(key_len, dtype=jnp.int32)
    last = jnp.max(jnp.where(visible, slots, 0), initial=0)
    return jnp.broadcast_to(last, (batch, 1))


def _reads_queries(energy: FreeEnergy) -> bool:
    """Whether an energy depends on the positions of its queries."""
    if energy.is_causal or energy.local_window_size is not None:
        return True
    return _mask_reads(energy.mask) or _score_reads(energy.score)


def _mask_reads(mask: AbstractMask | None) -> bool:
    if mask is None:
        return False
    leaves, tree = jax.tree.flatten(mask)
    arrays = zip(map(jnp.asarray, leaves), mask.ranks, strict=True)
    entry = [x[0] if x.ndim > rank else x for x, rank in arrays]
    number = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return reads_first(jax.tree.unflatten(tree, entry).visible, number, number)


def _score_reads(score: AbstractScore | None) -> bool:
    structure, arrays = split_score(score)
    if structure is None or not structure.compares:
        return False
    bound = BoundScore(structure, tuple(map(jnp.asarray, arrays)))
    index = jnp.zeros((1,) * 4, jnp.int32)

    def scores(query: Array, raw: Array) -> Any:
        return bound(raw, At(index, index, query, index))

    return reads_first(scores, index, jnp.zeros(index.shape, jnp.float32))
