"""Reductions over the keys of one call or of two: means, covariances, sums and maxima of functions of scores."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._varying import vary_together
from ..call._kernel import Candidate
from ..call._operands import Operands, Settings
from ..call._state import (
    AttentionState,
    CovarianceState,
    exp_from,
    holds_keys,
    precision,
)
from ..dispatch._registry import attend
from ..xla._blocks import (
    Arrays,
    BlockedOperands,
    outer,
    product,
    reduce_blocks,
    reduced_of_nothing,
    score_sums,
)
from ..xla._blocks import larger as larger
from ..xla._blocks import score_maximum as score_maximum
from ..xla._grid import Index


class ScoreBlock(NamedTuple):
    """Scores and values of some rows (queries of some heads) and some keys."""

    scores: Float[Array, "B rows keys"]  # $s_a$, minus infinity where a row does not see a key
    weights: Float[Array, "B rows keys"]  # $P_a = e^{s_a - F}$, zero where a row does not see a key
    value: Float[Array, "B keys width"]  # the values of these keys, in the dtype of the scores


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

    `block_sums(block, *rows)` is $\sum_a P_a f_a$ over one block, and `width` the size of $f_a$. The implementations
    in `names` are tried for the energies.
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
        # Σ_a w_a f_a and Σ_a w_a, w_a = e^{s_a - lse}; their quotient is Σ_a P_a f_a
        weights = exp_from(scores, shift)
        result = block_sums(ScoreBlock(scores, weights, value), *rows)
        return jnp.concatenate([result, weights.sum(-1, keepdims=True)], -1)

    return mean_of_sums(score_sums(sums, width + 1, settings, operands, shift, *rows))


def weight_shift(lse: Array) -> Array:
    """The shift of the scores for weights that are divided by their sum; all are zero in a fully masked row."""
    return lax.stop_gradient(jnp.where(holds_keys(lse), lse, jnp.inf))


def mean_of_sums(sums: Array) -> Array:
    """Weighted sums divided by the sum of the weights, which is the last of them; 0 where it is 0."""
    total = sums[..., -1:]
    return sums[..., :-1] / jnp.where(total == 0, 1.0, total)


def support_function(
    settings: Settings, operands: Operands, direction: Float[Array, "B T N Hv"]
) -> Float[Array, "B T N"]:
    r"""The support function of the hull of the values that a row sees, $\max_a u \cdot v_a$.

    Minus infinity for a fully masked row. Held constant in derivatives.
    """
    operands, direction = lax.stop_gradient((operands, direction))

    def largest(scores: Array, value: Array, direction: Array) -> Array:
        products = outer(direction, value, precision(direction.dtype))
        return jnp.where(jnp.isneginf(scores), -jnp.inf, products).max(-1, keepdims=True)

    args = largest, 1, settings, operands, direction
    return score_sums(*args, join=jnp.maximum, start=-jnp.inf)[..., 0]


def covariance(
    names: Sequence[Candidate], settings: Settings, operands: Operands
) -> CovarianceState:
    r"""$\nabla^2 F$, $\nabla F$ and $F$: attention, and a second pass over the keys.

    The matrix, $O(T N H^2)$ numbers, is summed block by block. Raises as `attend`.
    """
    operands, origin = centred(operands)
    out, lse = attend(names, settings, operands)
    width = out.shape[-1]
    matrix = weighted_mean(_scatter, width * width, settings, operands, lse, out)
    matrix = matrix.reshape(*out.shape, width)
    matrix = (matrix + matrix.swapaxes(-1, -2)) / 2  # rounding makes it unsymmetric
    origin = jnp.repeat(origin, out.shape[2] // operands.key.shape[2], axis=2)
    out = jnp.where(holds_keys(lse)[..., None], out + origin, 0.0)
    return CovarianceState(matrix.astype(out.dtype), out, lse)


def centred(arrays: Any) -> tuple[Any, Array]:
    """`arrays` with values relative to the middle of their range, and that origin.

    Covariances and higher cumulants do not depend on the origin; their rounding errors do. It is
    `[..., 1, K, Hv]`, and 0 where values are not finite.
    """
    value = arrays.value
    if value.shape[-3] == 0:
        return arrays, value.sum(-3, keepdims=True)
    # Not jnp.mean, which XLA rounds differently in different fusions.
    middle = 0.5 * (value.max(-3, keepdims=True) + value.min(-3, keepdims=True))
    origin = lax.stop_gradient(jnp.where(jnp.isfinite(middle), middle, 0.0))
    return arrays._replace(value=value - origin), origin


def _scatter(block: ScoreBlock, mean: Array) -> Array:
    # Σ_a P_a (v_a - out) v_a^T = Σ_a P_a (v_a - out)(v_a - out)^T, as Σ_a P_a (v_a - out) = 0
    values = block.value
    exact = precision(values.dtype)

    # One factor is relative to the mean of each row; one column of the matrix at a time.
    @jax.checkpoint
    def column(column_values: tuple[Array, Array]) -> Array:
        value, centre = column_values
        centred_column = value[:, None, :] - centre[:, :, None]
        return product(block.weights * centred_column, values, exact)

    columns = lax.map(column, (jnp.moveaxis(values, -1, 0), jnp.moveaxis(mean, -1, 0)))
    return jnp.moveaxis(columns, 0, 2).reshape(*mean.shape[:2], -1)


def cross_sums(
    other_settings: Settings,
    settings: Settings,
    operands: Operands,
    other: Operands,
    lse: Float[Array, "B T N"],
) -> Float[Array, "B T N 4"]:
    r"""Sums over keys that compare the scores of two calls: count of unseen keys, scores, weights.

    $$\#\{a : s'_a = -\infty < s_a\}, \qquad \sum_a w_a s_a, \qquad \sum_{a \text{ seen by both}} w_a s'_a,
      \qquad \sum_a w_a, \qquad w_a = e^{s_a - \mathrm{lse}}$$

    Block by block, with as many heads of keys in both. The first counts a key whose weight rounds to zero, too.
    `mean_of_sums` divides by the last, which is 1 but for the rounding of `lse`.
    """

    def terms(scores: Array, weights: Array, rescored: Any, seen: Any) -> Sequence[Array]:
        del seen
        others = rescored()
        missing, hidden = jnp.isneginf(others), jnp.isneginf(scores)
        return (
            (missing & ~hidden).astype(weights.dtype),
            weights * jnp.where(hidden, 0.0, scores),
            weights * jnp.where(missing | hidden, 0.0, others),
            weights,
        )

    return _cross(terms, 4, other_settings, settings, operands, other, lse)


def sums_over_seen(
    other_settings: Settings,
    settings: Settings,
    operands: Operands,
    other: Operands,
    lse: Float[Array, "B T N"],
) -> Float[Array, "B T N 2"]:
    r"""Sums of the weights $e^{s_a - \mathrm{lse}}$ over the keys that another call sees, and over all keys."""

    def terms(scores: Array, weights: Array, rescored: Any, seen: Any) -> Sequence[Array]:
        del scores, rescored
        return jnp.where(seen(), weights, 0.0), weights

    args = other_settings, settings, operands, other._replace(bias=None), lse
    return _cross(terms, 2, *args)


def _cross(
    terms: Callable[..., Sequence[Array]],
    width: int,
    other_settings: Settings,
    settings: Settings,
    operands: Operands,
    other: Operands,
    lse: Array,
) -> Array:
    """Sums of `terms(scores, weights, rescored, seen)`, the latter two functions of the other call."""
    operands, other, lse = vary_together((operands, other, lse))
    query_len, key_len = operands.query.shape[1], operands.key.shape[1]
    empty = reduced_of_nothing(operands, 0.0, (width,))
    if empty is not None:
        return empty[0]
    blocks = BlockedOperands(operands, settings)
    others = BlockedOperands(other, other_settings, on=blocks.grid)

    def block_terms(index: Index, query: Array, key: Array, rows: Any, keys: Any) -> Arrays:
        (shift, other_query), (other_key,) = rows, keys
        scores = blocks.scores_of(query, key, index)

        def rescored() -> Array:
            return others.scores_of(other_query, other_key, index)

        def seen() -> Array:
            return ~jnp.isneginf(others.masked(jnp.zeros_like(scores), None, index))

        result = terms(scores, exp_from(scores, shift), rescored, seen)
        return (jnp.stack([x.sum(-1) for x in result], -1),)

    # without the padding of blocks, which `reduce_blocks` adds again
    shift = weight_shift(lse)[..., None]
    rows, keys = (shift, others.query[:, :query_len]), (others.key[:, :key_len],)
    return reduce_blocks(block_terms, jnp.add, 0.0, (width,), blocks, query_len, rows, keys)[0]
