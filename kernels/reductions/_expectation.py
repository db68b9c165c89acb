"""Sums or maxima over keys of any function of a block of scores, which JAX differentiates."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._varying import vary_together
from ..call._kernel import Candidate
from ..call._operands import Operands, Settings
from ..call._state import AttentionState, exp_from, holds_keys, lse_dtype, precision
from ..dispatch._registry import attend
from ..xla._blocks import BlockedOperands, outer
from ..xla._grid import Index
from ..xla._reduce import Arrays, reduce_blocks, reduced_of_nothing


class ScoreBlock(NamedTuple):
    """Scores and values of some rows (queries of some heads) and some keys.

    Attributes:
        scores: $s_a$, minus infinity where a row does not see a key.
        weights: $P_a = e^{s_a - F}$, zero where a row does not see a key.
        value: the values of these keys, in the dtype of the scores.
    """

    scores: Float[Array, "B rows keys"]
    weights: Float[Array, "B rows keys"]
    value: Float[Array, "B keys width"]


# From a block, and arrays with an entry for each row, to the terms to be summed: [B, rows, outputs].
BlockTerm = Callable[..., Array]


def expectation(
    block_sums: BlockTerm,
    width: int,
    names: Sequence[Candidate],
    settings: Settings,
    operands: Operands,
    *rows: Float[Array, "B T N _"],
) -> AttentionState:
    r"""The mean of a function of keys under the attention weights, and the energies.

    $$\mathrm{out} = \sum_a P_a f_a, \qquad \mathrm{lse} = F$$

    The weights are divided by their own sum: `lse` and the scores of another kernel are rounded otherwise.

    States of disjoint keys merge as those of attention do, if `block_sums` is linear in the weights and `rows`
    are the same for all. Raises as `attend`.

    Args:
        block_sums: $\sum_a P_a f_a$ over one block, `block_sums(block, *rows)`.
        width: the size of $f_a$.
        names: the implementations of attention to try, for the energies.
        settings: of the call.
        operands: of the call.
        *rows: more arguments of `block_sums`, `[B, T, N, W]` each.
    """
    state = attend(names, settings, operands)
    return AttentionState(
        weighted_mean(block_sums, width, settings, operands, state.lse, *rows), state.lse
    )


def attention_and_expectation(
    block_sums: BlockTerm,
    width: int,
    names: Sequence[Candidate],
    settings: Settings,
    operands: Operands,
) -> AttentionState:
    """The state whose `out`, in the dtype of `lse`, is attention followed by the expectation."""
    state = attend(names, settings.needing(unrounded=True), operands)
    mean = weighted_mean(block_sums, width, settings, operands, state.lse)
    return AttentionState(jnp.concatenate([state.out, mean], -1), state.lse)


def weighted_mean(
    block_sums: BlockTerm,
    width: int,
    settings: Settings,
    operands: Operands,
    lse: Float[Array, "B T N"],
    *rows: Float[Array, "B T N _"],
) -> Float[Array, "B T N width"]:
    """The sum of `block_sums` over all keys, divided by the sum of their weights `exp(s - lse)`.

    It does not depend on `lse`, whose rounding would multiply every mean by `1 + eps * lse`.
    """
    shift = weight_shift(lse)[..., None]

    def sums(scores: Array, value: Array, shift: Array, *rows: Array) -> Array:
        weights = exp_from(scores, shift)
        found = block_sums(ScoreBlock(scores, weights, value), *rows)
        return jnp.concatenate([found, weights.sum(-1, keepdims=True)], -1)

    return mean_of_sums(
        _reduce_blocks(sums, jnp.add, 0.0, width + 1, settings, operands, shift, *rows)
    )


def weight_shift(lse: Array) -> Array:
    """The shift of the scores for weights that are divided by their sum; all are zero in a fully masked row."""
    return lax.stop_gradient(jnp.where(holds_keys(lse), lse, jnp.inf))


def mean_of_sums(sums: Array) -> Array:
    """Weighted sums divided by the sum of the weights, which is the last of them; 0 where it is 0."""
    total = sums[..., -1:]
    return sums[..., :-1] / jnp.where(total == 0, 1.0, total)


def score_sums(
    block_sums: Callable[..., Array],
    width: int,
    settings: Settings,
    operands: Operands,
    *rows: Float[Array, "B T N _"],
) -> Float[Array, "B T N width"]:
    """The sum over all keys of `block_sums(scores, value, *rows)`, `[B, rows, width]` for each block."""
    return _reduce_blocks(block_sums, jnp.add, 0.0, width, settings, operands, *rows)


def support_function(
    settings: Settings, operands: Operands, direction: Float[Array, "B T N Hv"]
) -> Float[Array, "B T N"]:
    r"""The support function of the hull of the values that a row sees, $\max_a u \cdot v_a$.

    Minus infinity for a fully masked row. Held constant in derivatives.
    """
    operands, direction = lax.stop_gradient((operands, direction))
    return _reduce_blocks(_largest, jnp.maximum, -jnp.inf, 1, settings, operands, direction)[..., 0]


def score_maximum(settings: Settings, operands: Operands) -> Float[Array, "B T N"]:
    r"""The largest score of each row, $\max_a s_a$; minus infinity for a fully masked row.

    Differentiable: where several scores are largest, it moves as their mean or another convex combination.
    """
    return _reduce_blocks(_largest_score, jnp.maximum, -jnp.inf, 1, settings, operands)[..., 0]


def _largest_score(scores: Array, value: Array) -> Array:
    del value
    return scores.max(-1, keepdims=True)


def _largest(scores: Array, value: Array, direction: Array) -> Array:
    products = outer(direction, value, precision(direction.dtype))
    return jnp.where(jnp.isneginf(scores), -jnp.inf, products).max(-1, keepdims=True)


def _reduce_blocks(
    block_terms: Callable[..., Array],
    join: Callable[[Array, Array], Array],
    start: float,
    width: int,
    settings: Settings,
    operands: Operands,
    *rows: Array,
) -> Array:
    operands, rows = vary_together((operands, rows))
    empty = reduced_of_nothing(operands, start, (width,))
    if empty is not None:
        return empty[0]
    blocks = BlockedOperands(operands, settings)

    def terms(index: Index, query: Array, key: Array, rows: Any, keys: Any) -> Arrays:
        return (block_terms(blocks.scores_of(query, key, index), *keys, *rows),)

    query_len, dtype = operands.query.shape[1], lse_dtype(operands.query.dtype)
    values = (blocks.value.astype(dtype),)
    (result,) = reduce_blocks(terms, join, start, (width,), blocks, query_len, rows, values)
    return result
