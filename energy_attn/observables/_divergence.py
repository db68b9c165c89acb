"""The divergence of two measures over the same keys."""

import functools
import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.distributed.internal import Reduction
from energy_attn.kernels import AttentionState, Operands, merge
from energy_attn.kernels.internal import (
    batches,
    dot_rows,
    holds_keys,
    lse_dtype,
    reductions,
    share,
)

from ..functional._free_energy import Calls, Parts, StaticCall, row_shape, state_at
from ._at_source import HashablePartial, sinks_as_keys
from ._entropy import is_linear, queries_of


class CrossScores(NamedTuple):
    """The scores and energies of two measures under the weights of the first, for each row; all `[*B, T, N]`."""

    first_mean: Array  # the mean of the first measure's scores
    second_mean: Array  # the mean of the second measure's scores, over the keys that both see
    hidden: Array  # whether the second does not see a key that the first sees
    lse: Array  # the first measure's energies
    second_lse: Array  # the second measure's energies


def kl_divergence(result: CrossScores) -> Array:
    difference = _cross_entropy(result) - (_finite(result.lse) - result.first_mean)
    # only rounding makes it negative; the derivative is the derivative of the difference
    least = lax.stop_gradient(jnp.maximum(difference, 0.0) - difference)
    return _of_seen(result, difference + least)


def cross_entropy(result: CrossScores) -> Array:
    return _of_seen(result, _cross_entropy(result))


def _cross_entropy(result: CrossScores) -> Array:
    return _finite(result.second_lse) - result.second_mean


def _of_seen(result: CrossScores, x: Array) -> Array:
    """Infinite where a key is hidden, zero in a fully masked row."""
    return jnp.where(result.hidden, jnp.inf, jnp.where(holds_keys(result.lse), x, 0.0))


def _finite(lse: Array) -> Array:
    return jnp.where(holds_keys(lse), lse, 0.0)


def cross_scores(first: tuple[Calls, Parts], second: tuple[Calls, Parts]) -> CrossScores:
    """The scores of both measures under the weights of the first, from their prepared keys."""
    _check(first, second)
    calls, parts = sinks_as_keys(*first)
    other_calls, others = sinks_as_keys(*second)
    # sinks follow the keys of all parts
    count = len(first[1])
    with_sink, other_with_sink = (
        [i for i, x in enumerate(of[1]) if x.sink is not None] for of in (first, second)
    )
    pairs = [
        *range(count),
        *(count + other_with_sink.index(i) if i in other_with_sink else None for i in with_sink),
    ]
    states, hidden = [], []
    for call, operands, pair in zip(calls, parts, pairs, strict=True):
        if pair is None:  # a sink of the first measure alone
            state = state_at((call,), None, (operands,))
            nothing = jnp.zeros((*state.lse.shape, 2), state.lse.dtype)
            states.append(AttentionState(nothing, state.lse))
            hidden.append(holds_keys(state.lse))
            continue
        state, missing = _of_part((call, operands), (other_calls[pair], others[pair]))
        states.append(state)
        hidden += [] if missing is None else [missing]
    means, lse = functools.reduce(merge, states)
    other_lse = state_at(other_calls, None, others).lse
    any_hidden = functools.reduce(jnp.logical_or, hidden, jnp.zeros(lse.shape, bool))
    return CrossScores(means[..., 0], means[..., 1], any_hidden, lse, other_lse)


def _check(first: tuple[Calls, Parts], second: tuple[Calls, Parts]) -> None:
    sizes, got = (
        (row_shape(calls[0], parts[0]), tuple(x.key.shape[1] for x in parts))
        for calls, parts in (first, second)
    )
    if sizes != got:
        raise ValueError(
            f"other: wanted a measure of the rows {sizes[0]} over parts of {sizes[1]} keys, "
            f"got {got[0]} over {got[1]}"
        )
    dtypes = [lse_dtype(x[1][0].query.dtype) for x in (first, second)]
    if dtypes[0] != dtypes[1]:
        raise TypeError(f"other: wanted energies of {dtypes[0]}, got {dtypes[1]}")


Part = tuple[StaticCall, Operands]


def seen_share(first: Part, second: Part, lse: Array) -> Array:
    """The weight, in a measure with the energies `lse`, of the keys that another measure sees, `[*B, T, N]`."""
    # one walk over the keys, as the difference of two energies would lose accuracy
    lse = lax.stop_gradient(jnp.minimum(lse, jnp.finfo(lse.dtype).max))
    sums = _sums_of_both(reductions.sums_over_seen, first, second, lse)
    calls, sinks = sinks_as_keys((first[0],), (first[1],))
    if sinks[1:]:
        sink = share(state_at(calls[1:], None, sinks[1:]).lse, lse)
        sums += jnp.stack([jnp.zeros_like(sink), sink], -1)
    return reductions.mean_of_sums(sums)[..., 0]


def _sums_of_both(find: Callable[..., Array], first: Part, second: Part, lse: Array) -> Array:
    (call, operands), (other_call, other) = first, second
    rows = other, batches.joined(lse, len(call.axes))
    reduction = Reduction(HashablePartial(find, (other_call.settings,)), "sums")
    result = reduction.over(call.plan, call.settings, operands, *rows)
    return batches.restored(result, call.axes)


def _of_part(first: Part, second: Part) -> tuple[AttentionState, Array | None]:
    """The means of both scores and the energies; and whether a row sees a key that the other measure hides, or None."""
    heads = math.lcm(*(x.key.shape[2] for _, x in (first, second)))
    first, second = _with_heads(heads, *first), _with_heads(heads, *second)
    if all(is_linear(*x) for x in (first, second)) and _same_mask(first, second):
        return _linear(first, second), None
    lse = state_at((first[0],), None, (first[1],)).lse
    result = _sums_of_both(reductions.cross_sums, first, second, lse)
    return AttentionState(reductions.mean_of_sums(result[..., 1:]), lse), result[..., 0] > 0


def _with_heads(number: int, call: StaticCall, operands: Operands) -> Part:
    """Repeats the heads of a part's keys up to a number, and drops wide values."""
    operands = operands._replace(value=operands.value[..., :1])
    times = number // operands.key.shape[2]
    if times == 1:
        return call, operands
    key, value = (jnp.repeat(x, times, 2) for x in (operands.key, operands.value))
    return call, operands._replace(key=key, value=value)


def _same_mask(first: Part, second: Part) -> bool:
    """Whether masks and tokens are known to be the same, by structure and as the same arrays."""
    if first[0].settings.mask != second[0].settings.mask:
        return False
    first_fields, second_fields = (x[1]._asdict() for x in (first, second))
    names = set(first_fields) - {"query", "key", "value", "bias"}
    pairs = ((first_fields[x], second_fields[x]) for x in names)
    return all(
        x is y or (isinstance(x, tuple) and len(x) == len(y) and all(map(operator.is_, x, y)))
        for x, y in pairs
    )


def _linear(first: Part, second: Part) -> AttentionState:
    """Computes means of linear scores by attention with the keys of both as values."""
    (call, operands), (other_call, other) = first, second
    joined = operands._replace(value=jnp.concatenate([operands.key, other.key], -1))
    out, lse = state_at((call,), None, (joined,))
    width = operands.key.shape[-1]
    query, second_query = queries_of(call, operands, lse), queries_of(other_call, other, lse)
    first_mean = call.settings.scale * dot_rows(query, out[..., :width])
    second_mean = other_call.settings.scale * dot_rows(second_query, out[..., width:])
    return AttentionState(jnp.stack([first_mean, second_mean], -1), lse)
