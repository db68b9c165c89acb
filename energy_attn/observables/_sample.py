"""Keys drawn from the attention weights."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray

from energy_attn.distributed.internal import Axes, Reduction, ShardingPlan, as_invariant
from energy_attn.kernels.internal import Draw, Operands, Settings, merge_draws, sample

from ..functional._free_energy import Calls, Parts, StaticCall, row_shape
from ._at_source import HashablePartial, run_reduction


def sample_keys(
    calls: Calls, parts: Parts, key: PRNGKeyArray, count: int
) -> Int[Array, "*B T N count"]:
    """Draws keys of each row; see `AbstractMeasure.sample`."""
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
