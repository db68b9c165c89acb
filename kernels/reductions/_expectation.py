"""Sums or maxima over keys of any function of a block of scores, which JAX differentiates."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._varying import vary_together
from ..call._kernel import Candidate
from ..call._operands import Operands, Settings, with_unrounded_out
from ..call._state import AttentionState, exp_from, holds_keys, lse_dtype, precision
from ..dispatch._registry import attend
from ..xla._blocks import BlockedOperands, outer
from ..xla._index import Index
from ..xla._reduce import Arrays, reduce_blocks


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


# From a block, and arrays with a line for each row, to the terms to be summed: [B, rows, outputs].
BlockTerm = Callable[..., Array]
# The same from the scores and values of a block, for any reduction over blocks.
_BlockFunction = Callable[..., Array]


def expectation(
    part: BlockTerm,
    width: int,
    names: Sequence[Candidate],
    settings: Settings,
    operands: Operands,
    *rows: Float[Array, "B T N _"],
) -> AttentionState:
    r"""The mean of a function of keys under the attention weights, and the energies.

    $$\mathrm{out} = \sum_a P_a f_a, \qquad \mathrm{lse} = F$$

    The result is a state. States of disjoint keys merge as those of attention do, if `part` is linear
    in the weights and `rows` are the same for all. The energies are from the implementation that `names`
    choose. Raises as `attend`.

    Args:
        part: $\sum_a P_a f_a$ over one block, `part(block, *rows)`.
        width: the size of $f_a$.
        names: the implementations to try.
        settings: of the call.
        operands: of the call.
        *rows: more arguments of `part`, `[B, T, N, W]` each.
    """
    state = attend(names, settings, operands)
    return AttentionState(
        weighted_sum(part, width, settings, operands, state.lse, *rows), state.lse
    )


def attention_and_expectation(
    part: BlockTerm,
    width: int,
    names: Sequence[Candidate],
    settings: Settings,
    operands: Operands,
) -> AttentionState:
    """The state whose `out`, in the dtype of `lse`, has the expectation behind attention. Raises as `attend`."""
    state = attend(names, with_unrounded_out(settings), operands)
    mean = weighted_sum(part, width, settings, operands, state.lse)
    return AttentionState(jnp.concatenate([state.out, mean], -1), state.lse)


def weighted_sum(
    part: BlockTerm,
    width: int,
    settings: Settings,
    operands: Operands,
    lse: Float[Array, "B T N"],
    *rows: Float[Array, "B T N _"],
) -> Float[Array, "B T N width"]:
    """The sum of `part` over all keys, with weights relative to given energies."""
    # the weights of a fully masked row are zero
    lse = jnp.where(holds_keys(lse), lse, jnp.inf)[..., None]

    def sums(scores: Array, value: Array, lse: Array, *rows: Array) -> Array:
        return part(ScoreBlock(scores, exp_from(scores, lse), value), *rows)

    return _reduce_blocks(sums, jnp.add, 0.0, width, settings, operands, lse, *rows)


def score_sums(
    part: Callable[..., Array],
    width: int,
    settings: Settings,
    operands: Operands,
    *rows: Float[Array, "B T N _"],
) -> Float[Array, "B T N width"]:
    """The sum over all keys of `part(scores, value, *rows)`, of a block, `[B, rows, width]`."""
    return _reduce_blocks(part, jnp.add, 0.0, width, settings, operands, *rows)


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
    along = outer(direction, value, precision(direction.dtype))
    return jnp.where(jnp.isneginf(scores), -jnp.inf, along).max(-1, keepdims=True)


def _reduce_blocks(
    of_block: _BlockFunction,
    join: Callable[[Array, Array], Array],
    start: float,
    width: int,
    settings: Settings,
    operands: Operands,
    *rows: Array,
) -> Array:
    operands, rows = vary_together((operands, rows))
    (batch, query_len, heads), key_len = operands.query.shape[:3], operands.key.shape[1]
    dtype = lse_dtype(operands.query.dtype)
    if 0 in (batch, query_len, key_len):
        shape = (batch, query_len, heads, width)
        return lax.full_like(operands.query, start, dtype=dtype, shape=shape)
    blocks = BlockedOperands(operands, settings)

    def terms(at: Index, query: Array, key: Array, rows: Any, keys: Any) -> Arrays:
        return (of_block(blocks.scores_of(query, key, at), *keys, *rows),)

    values = (blocks.value.astype(dtype),)
    (found,) = reduce_blocks(terms, join, start, (width,), blocks, query_len, rows, values)
    return found
