"""The weights of given rows and keys, their sums over rows, and draws of keys."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from energy_attn.distributed.internal import (
    Axes,
    Reduction,
    ShardingPlan,
    as_invariant,
    fold_sums,
    whole_along,
)
from energy_attn.kernels.internal import (
    Draw,
    Operands,
    Settings,
    check_flag,
    check_floating,
    check_shape,
    exp_from,
    holds_keys,
    is_static,
    lse_dtype,
    merge_draws,
    received,
    sample,
    take_rows,
    weights_of_keys,
)

from ..functional._free_energy import Calls, Parts, StaticCall, energy_at, row_shape, state_at
from ._at_source import HashablePartial, run_reduction, sinks_as_keys, sum_over_keys

MOST_WEIGHTS = 64_000_000

# One index, some of them, or a slice; of arrays, one axis.
Selection = int | slice | Sequence[int] | Array | np.ndarray


def weights(
    calls: Calls, parts: Parts, rows: Selection | None, keys: Selection | None
) -> Float[Array, "*B R N J"]:
    batch, time, heads = parts[0].query.shape[:3]
    total = sum(map(_key_count, calls, parts))
    chosen, index = _indices("rows", rows, time), _indices("keys", keys, total)
    shape = batch, time if chosen is None else len(chosen), heads, len(index)
    if is_static(*shape) and np.prod(shape, dtype=object) > MOST_WEIGHTS:
        raise ValueError(
            f"rows: wanted at most {MOST_WEIGHTS} weights, which are all in memory, got {shape} of "
            "[batch, rows, heads, keys]; choose rows= and keys=, or ask importance(), sample() or "
            "entropy(), which need no matrix"
        )
    calls, parts = sinks_as_keys(calls, parts)
    # [*B, T, N]: of all rows, as a device may have some of them
    lse = lax.stop_gradient(state_at(calls, None, parts).lse)
    if chosen is not None:
        lse = jnp.take(whole_along(lse, lse.ndim - 2), chosen, lse.ndim - 2, mode="fill")
        calls, parts = zip(*map(functools.partial(_with_rows, chosen), calls, parts), strict=True)
    sizes = list(map(_key_count, calls, parts))
    if keys is None:
        index = jnp.arange(sum(sizes), dtype=jnp.int32)
    found, first = jnp.zeros((), lse.dtype), 0
    for call, operands, size in zip(calls, parts, sizes, strict=True):
        found = found + _of_part(call, operands, lse, index - first)
        first += size
    # Energies are rounded, and so are the scores of another kernel: the weights are divided by their own sum.
    if keys is None:
        whole = found.sum(-1, keepdims=True)
        found, index = found[..., :total], index[:total]
    else:
        whole = sum_over_keys(calls, None, parts, _weight_sum, 1, lse[..., None])
    found = found / jnp.where(whole == 0, 1.0, whole)
    return jnp.where((index >= 0) & (index < total), found, jnp.nan)


def _weight_sum(scores: Array, value: Array, lse: Array) -> Array:
    del value
    return exp_from(scores, jnp.where(holds_keys(lse), lse, jnp.inf)).sum(-1, keepdims=True)


def _key_count(call: StaticCall, operands: Operands) -> int:
    """Counts the keys of a part on all devices, also inside a `jax.shard_map`."""
    devices = 1 if call.plan is None or not call.plan.local else call.plan.devices
    return operands.key.shape[1] * devices


def _with_rows(chosen: Array, call: StaticCall, operands: Operands) -> tuple[StaticCall, Operands]:
    whole = {
        name: None if x is None else whole_along(x, axis)
        for name, axis in (("query", 1), ("bias", 2), ("mask", 2))
        for x in (getattr(operands, name),)
    }
    plan = call.plan
    if plan is not None and not plan.local:
        plan = plan._replace(queries=False)
    operands = take_rows(call.settings, operands._replace(**whole), chosen)
    return call._replace(plan=plan), operands


def _of_part(call: StaticCall, operands: Operands, lse: Array, index: Array) -> Array:
    """The weights of the keys of one part, and zeros for the others."""
    axes = () if call.plan is None else call.plan.sequence
    reduction = Reduction(HashablePartial(weights_of_keys, (axes,)), fold_sums)
    index = jnp.broadcast_to(index, (*lse.shape, len(index)))
    return run_reduction(call, reduction, None, operands, lse, index)


def _indices(name: str, given: object, size: int) -> Any:
    """int32 indices from 0 on; None: rows that are all of them. Those that are traced are not checked."""
    if given is None:
        return None if name == "rows" else jnp.arange(size, dtype=jnp.int32)
    if isinstance(given, slice):
        return jnp.arange(size, dtype=jnp.int32)[given]
    array: Any = given if isinstance(given, jax.core.Tracer) else np.asarray(given)
    if array.size == 0:
        array = array.astype(np.int32)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim > 1:
        raise TypeError(
            f"{name}: wanted an integer, a slice or integers of one axis, got {received(given)}"
        )
    array = array.reshape(-1)
    if not isinstance(array, jax.core.Tracer) and not np.all((-size <= array) & (array < size)):
        raise ValueError(f"{name}: wanted indices below {size}, got {received(given)}")
    array = jnp.asarray(array, jnp.int32)
    return jnp.where(array < 0, array + size, array)


def importance(
    calls: Calls, parts: Parts, rows: object, grouped: bool
) -> Float[Array, "*B S heads"]:
    check_flag("grouped", grouped)
    first, shape = parts[0], row_shape(calls[0], parts[0])
    dtype = lse_dtype(first.query.dtype)
    factor = jnp.ones(shape, dtype)
    if rows is not None:
        check_shape("rows", check_floating("rows", rows), shape)
        factor = jnp.asarray(rows, dtype)
    heads = first.query.shape[2]
    # A source along values of the keys: a column for each head of a group, whose derivative is of its scores alone.
    group = heads // first.key.shape[2]
    columns = np.broadcast_to(np.tile(np.eye(group), (heads // group, 1)), (*shape, group))
    columns = jnp.asarray(columns, dtype)
    # they vary inside a `jax.shard_map` as the keys do, where the derivative would else be a sum over devices
    zeros = [lax.full_like(x.key, 0.0, dtype, (*x.key.shape[:3], group)) for x in parts]

    def total(added: list[Array]) -> Array:
        scored = tuple(x._replace(value=y) for x, y in zip(parts, added, strict=True))
        energies = energy_at(calls, columns, scored)
        return (factor * jnp.where(holds_keys(energies), energies, 0.0)).sum()

    found = jnp.concatenate(jax.grad(total)(zeros), 1)
    found = found.sum(-1) if grouped else found.reshape(*found.shape[:2], heads)
    return found if calls[0].batched else found[0]


def sample_keys(
    calls: Calls, parts: Parts, key: PRNGKeyArray, count: int
) -> Int[Array, "*B T N count"]:
    parts = lax.stop_gradient(parts)
    seeds = jax.random.bits(key, row_shape(calls[0], parts[0], 2), jnp.uint32)
    drawn, first = [], 0
    for call, operands in zip(calls, parts, strict=True):
        drawn.append(_sample_part(call, operands, seeds, count, first))
        first += operands.key.shape[1]
    return functools.reduce(merge_draws, drawn).indices


def _sample_part(
    call: StaticCall, operands: Operands, seeds: Array, count: int, first: int
) -> Draw:
    axes = () if call.plan is None else call.plan.sequence
    reduction = Reduction(HashablePartial(_drawn, (count, first, axes)), _fold_draws)
    return run_reduction(call, reduction, None, operands, seeds)


def _drawn(
    count: int, first: int, axes: Axes, settings: Settings, operands: Operands, seeds: Array
) -> Draw:
    start = jnp.asarray(first, jnp.int32)
    if axes:  # devices hold equal numbers of keys, in order
        start = start + lax.axis_index(axes).astype(jnp.int32) * operands.key.shape[1]
    return sample(count, settings, operands, seeds, start)


def _fold_draws(mine: Draw, axes: Axes, plan: ShardingPlan) -> Draw:
    del plan
    parts: Draw = jax.tree.map(lambda x: lax.all_gather(x, axes), mine)
    each = (Draw(*(x[i] for x in parts)) for i in range(lax.axis_size(axes)))
    return as_invariant(functools.reduce(merge_draws, each), axes)
