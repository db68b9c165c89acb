"""The importance of keys: sums over rows of a function of the weights, by one backward pass."""

# The number of a key and a head is the derivative of a sum over rows and keys, in which each key has a factor, in that
# factor. So it takes memory linear in the keys, and is folded over devices and unions as the sum is.

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from energy_attn.distributed.internal import whole_along
from energy_attn.kernels.internal import (
    batches,
    checks,
    holds_keys,
    lse_dtype,
    outer,
    precision,
)

from ..functional._free_energy import Calls, Parts, energy_at, row_shape, state_at
from ._at_source import HashablePartial, sinks_as_keys, squared_distances, sum_over_keys

# From log weights and squared distances of values from a row's attention, `[B, rows, keys]`, to numbers of the pairs.
PairRule = Callable[[Array, Array], Array]

_EPSILON = 1e-6  # the least share of the other keys, as in kvpress


class Rule(NamedTuple):
    """How a named rule counts: all `None` and 1 for the weights of all rows."""

    of_pairs: PairRule | None = None  # None: the weight, by the derivative of the energies
    window: int | None = None  # the last queries that count, whose keys stay
    pool: int = 1  # the successive keys that are averaged


def _entropy(log_weights: Array, distances: Array) -> Array:
    del distances
    return -jnp.exp(log_weights) * log_weights


def _residual(log_weights: Array, distances: Array) -> Array:
    others = jnp.maximum(-jnp.expm1(log_weights), _EPSILON)
    return (jnp.exp(log_weights) / others) ** 2 * distances


RULES = {
    "attention": Rule(),
    "snapkv": Rule(window=64, pool=5),
    "dropkv": Rule(_residual, window=64),
    "entropy": Rule(_entropy),
}


def importance_of_keys(
    calls: Calls,
    parts: Parts,
    rows: object,
    grouped: bool,
    rule: object,
    window: int | None,
    pool: int | None,
) -> Array:
    """The result of `Gibbs.importance`, with its errors, for prepared keys."""
    checks.check_flag("grouped", grouped)
    named = _rule(rule)
    size = named.pool if pool is None else checks.check_integer("pool", pool, least=1)
    if size % 2 == 0:
        raise ValueError(f"pool: wanted an odd number of keys, got {size}")
    last = named.window if window is None else checks.check_integer("window", window, least=1)
    if (size > 1 or last is not None) and any(x.plan is not None and x.plan.local for x in calls):
        raise NotImplementedError(
            "rule: wanted one of all rows and without pool= inside a jax.shard_map, whose devices have parts of the "
            f"rows and keys; got window={last}, pool={size}"
        )
    factor = _row_factors(calls, parts, rows, last)
    result = _summed(calls, parts, factor, named.of_pairs)
    result = result.sum(-1) if grouped else result.reshape(*result.shape[:2], -1)
    newest = named.window and last  # the rules that have a window keep its keys
    if size > 1 or newest:
        result = _pooled(whole_along(result, 1), _positions(parts), size, newest or 0)
    return batches.restored(result, calls[0].axes)


def _rule(rule: object) -> Rule:
    if isinstance(rule, str):
        checks.check_choice("rule", rule, tuple(RULES))
        return RULES[rule]
    checks.check_function("rule", rule, "log_weights", "distances")
    function: Any = rule
    return Rule(function)


def _row_factors(calls: Calls, parts: Parts, rows: object, last: int | None) -> Array:
    first, shape = parts[0], row_shape(calls[0], parts[0])
    dtype = lse_dtype(first.query.dtype)
    factor = jnp.ones(shape, dtype)
    if rows is not None:
        checks.check_shape("rows", checks.check_floating("rows", rows), shape)
        factor = jnp.asarray(rows, dtype)
    if last is None:
        return factor
    positions: Any = first.positioned().tokens.query_positions
    present = positions >= 0
    # from each row to the end
    counted = lax.cumsum(present.astype(jnp.int32), axis=1, reverse=True)
    counts = jnp.broadcast_to(present & (counted <= last), first.query.shape[:2])
    return jnp.where(batches.restored(counts, calls[0].axes)[..., None], factor, 0.0)


def _summed(calls: Calls, parts: Parts, factor: Array, of_pairs: PairRule | None) -> Array:
    """Sums over rows for each key and head, `[B, S, K, group]`."""
    first, shape = parts[0], factor.shape
    heads, dtype = shape[-1], factor.dtype
    # factors of keys along added values: a column for each head of a group, with the derivative of its scores
    group = heads // first.key.shape[2]
    columns = np.broadcast_to(np.tile(np.eye(group), (heads // group, 1)), (*shape, group))
    columns = jnp.asarray(columns, dtype)
    # of the type of the keys inside a `jax.shard_map`; otherwise the derivative would be a sum over devices
    zeros = [lax.full_like(x.key, 0.0, dtype, (*x.key.shape[:3], group)) for x in parts]
    if of_pairs is None:

        def total(added: list[Array]) -> Array:
            scored = tuple(x._replace(value=y) for x, y in zip(parts, added, strict=True))
            energies = energy_at(calls, columns, scored)
            return (factor * jnp.where(holds_keys(energies), energies, 0.0)).sum()
    else:
        out, lse = state_at(*_with_sinks(calls, parts))
        lse = jnp.where(holds_keys(lse), lse, 0.0)[..., None]
        term = HashablePartial(_pairs, (of_pairs, out.shape[-1]))

        def total(added: list[Array]) -> Array:
            pairs = zip(parts, added, strict=True)
            wide = tuple(x._replace(value=jnp.concatenate([x.value, y], -1)) for x, y in pairs)
            sums = sum_over_keys(calls, None, wide, term, 1, lse, out, columns)
            return (factor * sums[..., 0]).sum()

    return jnp.concatenate(jax.grad(total)(zeros), 1)


def _with_sinks(calls: Calls, parts: Parts) -> tuple[Calls, None, Parts]:
    calls, parts = sinks_as_keys(calls, parts)
    return calls, None, parts


def _pairs(
    of_pairs: PairRule,
    width: int,
    scores: Array,
    value: Array,
    lse: Array,
    out: Array,
    columns: Array,
) -> Array:
    seen = ~jnp.isneginf(scores)
    distances = squared_distances(value[..., :width], out)
    # some log weight in the place of minus infinity, whose derivatives would be NaN
    found = of_pairs(jnp.where(seen, scores - lse, -1.0), distances)
    factors = outer(columns, value[..., width:], precision(scores.dtype))
    return (jnp.where(seen, found, 0.0) * factors).sum(-1, keepdims=True)


def _positions(parts: Parts) -> Array:
    """The positions of all keys, `[1 or B, S]`."""
    found: Any = [x.positioned().tokens.key_positions for x in parts]
    batch = max(x.shape[0] for x in found)
    return jnp.concatenate([jnp.broadcast_to(x, (batch, x.shape[1])) for x in found], 1)


def _pooled(x: Array, positions: Array, size: int, newest: int) -> Array:
    """Means over `size` successive keys by position, with zeros past the ends; infinite for the newest keys."""
    positions = jnp.broadcast_to(positions, x.shape[:2])
    present = positions >= 0
    order = jnp.argsort(jnp.where(present, positions, jnp.iinfo(positions.dtype).max), axis=1)
    place, count = jnp.argsort(order, axis=1), present.sum(1, keepdims=True)
    kept = (present & (place >= count - newest))[..., None]
    x = jnp.take_along_axis(jnp.where(kept, 0.0, x), order[..., None], 1)
    half = size // 2
    window, pads = (1, size, 1), ((0, 0), (half, half), (0, 0))
    # without an initial value that is an array, JAX knows the sum's derivative
    means = lax.reduce_window(x, 0.0, lax.add, window, (1, 1, 1), pads) / size
    return jnp.where(kept, jnp.inf, jnp.take_along_axis(means, place[..., None], 1))
