"""Two calls over the same keys, under the weights of the first: the scores of both, and what both see."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._varying import vary_together
from ..call._operands import Operands, Settings
from ..call._state import exp_from
from ..xla._blocks import BlockedOperands
from ..xla._grid import Index
from ..xla._reduce import Arrays, reduce_blocks, reduced_of_nothing
from ._expectation import weight_shift


def cross_sums(
    other_settings: Settings,
    settings: Settings,
    operands: Operands,
    other: Operands,
    lse: Float[Array, "B T N"],
) -> Float[Array, "B T N 4"]:
    r"""Sums over the keys of a call: of what the other does not see, of its scores, of another's, and of the weights.

    $$\#\{a : s'_a = -\infty < s_a\}, \qquad \sum_a w_a s_a, \qquad \sum_{a \text{ seen by both}} w_a s'_a,
      \qquad \sum_a w_a, \qquad w_a = e^{s_a - \mathrm{lse}}$$

    Block by block, with as many heads of keys in both. The first counts a key whose weight rounds to zero, too.
    `mean_of_sums` divides by the last, which is 1 but for the rounding of `lse`.
    """
    operands, other, lse = vary_together((operands, other, lse))
    query_len, key_len = operands.query.shape[1], operands.key.shape[1]
    empty = reduced_of_nothing(operands, 0.0, (4,))
    if empty is not None:
        return empty[0]
    blocks = BlockedOperands(operands, settings)
    others = BlockedOperands(other, other_settings, on=blocks.grid)
    shift = weight_shift(lse)[..., None]

    def terms(index: Index, query: Array, key: Array, rows: Any, keys: Any) -> Arrays:
        (shift, other_query), (other_key,) = rows, keys
        own = blocks.scores_of(query, key, index)
        apart = others.scores_of(other_query, other_key, index)
        weights, missing = exp_from(own, shift), jnp.isneginf(apart)
        hidden = jnp.isneginf(own)
        found = (
            (missing & ~hidden).astype(weights.dtype),
            weights * jnp.where(hidden, 0.0, own),
            weights * jnp.where(missing | hidden, 0.0, apart),
            weights,
        )
        return (jnp.stack([x.sum(-1) for x in found], -1),)

    # without the padding of blocks, with zeros where they are absent
    rows, keys = (shift, others.query[:, :query_len]), (others.key[:, :key_len],)
    (result,) = reduce_blocks(terms, jnp.add, 0.0, (4,), blocks, query_len, rows, keys)
    return result


def sums_over_seen(
    other_settings: Settings,
    settings: Settings,
    operands: Operands,
    other: Operands,
    lse: Float[Array, "B T N"],
) -> Float[Array, "B T N 2"]:
    r"""Sums of the weights $e^{s_a - \mathrm{lse}}$ over the keys that another call sees, and over all keys."""
    operands, other, lse = vary_together((operands, other._replace(bias=None), lse))
    empty = reduced_of_nothing(operands, 0.0, (2,))
    if empty is not None:
        return empty[0]
    blocks = BlockedOperands(operands, settings)
    others = BlockedOperands(other, other_settings, on=blocks.grid)

    def terms(index: Index, query: Array, key: Array, rows: Any, keys: Any) -> Arrays:
        del keys
        weights = exp_from(blocks.scores_of(query, key, index), rows)
        seen = ~jnp.isneginf(others.masked(jnp.zeros_like(weights), None, index))
        return (jnp.stack([jnp.where(seen, weights, 0.0).sum(-1), weights.sum(-1)], -1),)

    shift = weight_shift(lse)[..., None]
    query_len = operands.query.shape[1]
    (result,) = reduce_blocks(terms, jnp.add, 0.0, (2,), blocks, query_len, shift, ())
    return result
