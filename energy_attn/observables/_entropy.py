"""The scores under the attention weights: entropies, mean, variance, and covariance with the values."""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from energy_attn.distributed.internal import Reduction
from energy_attn.kernels import AttentionState, Operands, merge
from energy_attn.kernels.internal import (
    batches,
    checks,
    dot_rows,
    holds_keys,
    precision,
    product,
    reductions,
)

from ..functional._free_energy import Calls, Parts, StaticCall, both_computed, state_at
from ._at_source import (
    HashablePartial,
    covariance_product,
    largest_scores,
    mean_over_keys,
    run_reduction,
    score_maximum_at,
    squared_distances,
    state_and_maximum_at,
    sum_over_keys,
)


class ScoreMoments(NamedTuple):
    """The result of `Gibbs.score_moments`."""

    mean: Float[Array, "*B T N"]
    variance: Float[Array, "*B T N"]


class AttentionStatistics(NamedTuple):
    """The result of `Gibbs.statistics`."""

    out: Float[Array, "*B T N Hv"]
    energy: Float[Array, "*B T N"]
    entropy: Float[Array, "*B T N"]
    mean_score: Float[Array, "*B T N"]
    score_max: Float[Array, "*B T N"]


class RowObservables(NamedTuple):
    energy: Float[Array, "*B T N"]
    entropy: Float[Array, "*B T N"]
    heat_capacity: Float[Array, "*B T N"]
    variance: Float[Array, "*B T N"]  # tr Σ
    out: Float[Array, "*B T N Hv"]


def row_observables(calls: Calls, parts: Parts) -> RowObservables:
    result = score_statistics(calls, parts)
    trace = mean_over_keys(calls, None, parts, _squared_distance_term, 1, result.out).out[..., 0]
    (mean, variance), trace = result.scores, jnp.maximum(trace, 0.0)
    return RowObservables(result.lse, entropy_of(mean, result.lse), variance, trace, result.out)


def entropy_of(mean: Array, lse: Array) -> Array:
    """The entropy from the mean of the scores and the energy; 0 for a fully masked row."""
    seen = holds_keys(lse)
    # a difference of two large numbers, which only rounding makes negative
    return jnp.where(seen, jnp.maximum(jnp.where(seen, lse, 0.0) - mean, 0.0), 0.0)


def mean_score(calls: Calls, parts: Parts) -> tuple[Array, Array]:
    mean, lse = _merged([_mean_score(*x, False)[0] for x in zip(calls, parts, strict=True)])
    return mean[..., 0], lse


def _merged(parts: list[AttentionState]) -> AttentionState:
    """Merges states whose last column is a mean of scores."""
    if len(parts) == 1:
        return parts[0]
    # About the mean of all, so that derivatives are of differences of scores, as an entropy's are. With a sink of 1e17
    # the scores themselves would cancel.
    mean = lax.stop_gradient(functools.reduce(merge, parts).out[..., -1:])
    pads = [(0, 0)] * (mean.ndim - 1) + [(parts[0].out.shape[-1] - 1, 0)]
    mean = jnp.pad(jnp.where(jnp.isfinite(mean), mean, 0.0), pads)
    state = functools.reduce(merge, (x._replace(out=x.out - mean) for x in parts))
    return state._replace(out=state.out + mean)


def attention_statistics(calls: Calls, parts: Parts, keys: int) -> AttentionStatistics:
    """The statistics of parts: the first `keys` parts hold keys, and the others sinks."""
    found = [_mean_score(*x, True) for x in zip(calls, parts, strict=True)]
    out, lse = both_computed(*_merged([state for state, _ in found]))
    mean, largest = out[..., -1], functools.reduce(reductions.larger, (x for _, x in found[:keys]))
    return AttentionStatistics(out[..., :-1], lse, entropy_of(mean, lse), mean, largest)


def _mean_score(
    call: StaticCall, operands: Operands, with_values: bool
) -> tuple[AttentionState, Any]:
    """The state of a part with the score as its last value, after its own `with_values`, and the largest scores."""
    one = (call,), (operands,)
    if not is_linear(call, operands):
        if not with_values:
            return mean_over_keys(one[0], None, one[1], _score_term, 1), None
        # two walks over the keys
        find = HashablePartial(
            reductions.attention_and_expectation, (_score_term, 1, call.policy.kernels)
        )
        state = run_reduction(call, Reduction(find, "states"), None, operands)
        return state, largest_scores(*one)
    # E[s] = scale q · E[k]: attention with the keys as values yields their mean
    width, largest = 0, None
    if with_values:
        width, value = operands.value.shape[-1], [operands.value, operands.key]
        wide = operands._replace(value=jnp.concatenate(value, -1))
        (out, lse), largest = state_and_maximum_at(call, wide)
    else:
        out, lse = state_at((call,), None, (operands._replace(value=operands.key),))
    mean = call.settings.scale * dot_rows(queries_of(call, operands, lse), out[..., width:])
    return AttentionState(jnp.concatenate([out[..., :width], mean[..., None]], -1), lse), largest


def queries_of(call: StaticCall, operands: Operands, lse: Array) -> Array:
    """The queries, with zeros in fully masked rows, whose queries may be NaN."""
    query = batches.restored(operands.query, call.axes)
    return jnp.where(holds_keys(lse)[..., None], query, 0.0)


def is_linear(call: StaticCall, operands: Operands) -> bool:
    return operands.bias is None and call.settings.score is None


class ScoreStatistics(NamedTuple):
    """Moments of the scores and values of each row under its attention weights."""

    scores: ScoreMoments
    out: Array  # E[v]
    cross_covariance: Array  # Cov(s, v)
    lse: Array


def score_statistics(calls: Calls, parts: Parts, *, width: int | None = None) -> ScoreStatistics:
    """The statistics with the first `width` numbers of the values; None: all."""
    parts = tuple(x._replace(value=x.value[..., :width]) for x in parts)
    if parts[1:] or not is_linear(calls[0], parts[0]):
        return _in_two_passes(calls, parts)
    # With values v' = [k, v] the score is u·v' for u = [scale q, 0], and Cov(v') u contains both
    # Cov(k) scale q and Cov(v, s).
    call, operands = calls[0], parts[0]
    query = batches.restored(operands.query, call.axes)
    along, size = query * call.settings.scale, query.shape[-1]
    both = operands._replace(value=jnp.concatenate([operands.key, operands.value], -1))
    tangent = jnp.pad(along, [(0, 0)] * (along.ndim - 1) + [(0, operands.value.shape[-1])])
    state, result = covariance_product(calls, None, (both,), tangent)
    along = queries_of(call, operands, state.lse) * call.settings.scale
    mean = (along * state.out[..., :size]).sum(-1)
    variance = jnp.maximum((along * result[..., :size]).sum(-1), 0.0)
    scores = ScoreMoments(mean, variance)
    return ScoreStatistics(scores, state.out[..., size:], result[..., size:], state.lse)


def _in_two_passes(calls: Calls, parts: Parts) -> ScoreStatistics:
    mean, lse = mean_score(calls, parts)
    width = 1 + parts[0].value.shape[-1]
    result = mean_over_keys(calls, None, parts, _deviation_terms, width, mean[..., None]).out
    out = state_at(calls, None, parts).out
    scores = ScoreMoments(mean, result[..., 0])
    return ScoreStatistics(scores, out, result[..., 1:], lse)


# Block terms of expectations. A hidden key has the weight 0 and the score minus infinity.
def _finite(block: reductions.ScoreBlock) -> Array:
    return jnp.where(jnp.isneginf(block.scores), 0.0, block.scores)


def _score_term(block: reductions.ScoreBlock) -> Array:
    return (block.weights * _finite(block)).sum(-1, keepdims=True)


def _deviation_terms(block: reductions.ScoreBlock, mean: Array) -> Array:
    # keeps the square of a key without weight finite: with a sink of 1e30, no key has any weight
    most = float(jnp.finfo(mean.dtype).max) ** 0.5 / 2
    deviation = jnp.clip(_finite(block) - mean, -most, most)
    weighted = block.weights * deviation
    square = (weighted * deviation).sum(-1, keepdims=True)
    return jnp.concatenate([square, product(weighted, block.value, precision(mean.dtype))], -1)


def _squared_distance_term(block: reductions.ScoreBlock, mean: Array) -> Array:
    return (block.weights * squared_distances(block.value, mean)).sum(-1, keepdims=True)


def renyi(calls: Calls, parts: Parts, order: float) -> Array:
    infinite = isinstance(order, float) and order == math.inf
    if not infinite and checks.check_finite_number("order", order) < 0:
        raise ValueError(f"order: wanted at least 0, got {checks.received(order)}")
    if order == 1:
        return entropy_of(*mean_score(calls, parts))
    largest = score_maximum_at(calls, parts)
    seen = holds_keys(largest)
    largest = jnp.where(seen, largest, 0.0)
    # the scores of both sums are rounded equally, and no result depends on the shift
    shift = largest if infinite else lax.stop_gradient(largest)
    power = HashablePartial(_powers, (1.0 if infinite else order,))
    sums = sum_over_keys(calls, None, parts, power, 2, shift[..., None])
    other, total = jnp.moveaxis(jnp.log(jnp.where(seen[..., None], sums, 1.0)), -1, 0)
    result = total if infinite else (other - order * total) / (1 - order)
    # a difference of two numbers, which only rounding makes negative
    return jnp.where(seen, jnp.maximum(result, 0.0), 0.0)


def _powers(order: float, scores: Array, value: Array, largest: Array) -> Array:
    """Sums of powers of the weights, and of the weights, relative to the largest weight."""
    del value
    hidden = jnp.isneginf(scores)
    deviation = jnp.where(hidden, 0.0, scores) - largest
    terms = (jnp.where(hidden, 0.0, jnp.exp(x * deviation)) for x in (order, 1.0))
    return jnp.stack([x.sum(-1) for x in terms], -1)
