"""Keys drawn from the attention weights."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray

from energy_attn.distributed.internal import Axes, Reduction, ShardingPlan, as_invariant
from energy_attn.kernels.internal import (
    Draw,
    Operands,
    Settings,
    fold_in_seeds,
    merge_draws,
    sample,
    uniform,
)

from ..functional._free_energy import Calls, Parts, StaticCall, row_shape
from ._at_source import HashablePartial, run_reduction

# Numbers that no block of keys folds into the seeds: of the choice among devices, and among parts.
_DEVICES, _PARTS = jnp.iinfo(jnp.int32).max, jnp.iinfo(jnp.int32).max - 1


def sample_keys(
    calls: Calls, parts: Parts, key: PRNGKeyArray, count: int
) -> Int[Array, "*B T N count"]:
    """Draws keys of each row; see `AbstractMeasure.sample`."""
    parts = lax.stop_gradient(parts)
    seeds = jax.random.bits(key, row_shape(calls[0], parts[0], 2), jnp.uint32)
    drawn = _sample_part(calls[0], parts[0], seeds, count)
    first = parts[0].key.shape[1]
    for number, (call, operands) in enumerate(zip(calls[1:], parts[1:], strict=True)):
        own = fold_in_seeds(seeds, _PARTS - number)
        other = _sample_part(call, operands, own, count)
        indices = jnp.where(other.indices < 0, -1, other.indices + first)
        chance = uniform(fold_in_seeds(own, _PARTS), (count,), drawn.lse.dtype)
        drawn = merge_draws(drawn, other._replace(indices=indices), chance)
        first += operands.key.shape[1]
    return drawn.indices


def _sample_part(call: StaticCall, operands: Operands, seeds: Array, count: int) -> Draw:
    axes = () if call.plan is None else call.plan.sequence
    reduction = Reduction(HashablePartial(_drawn, (count, axes)), _fold_draws)
    return run_reduction(call, reduction, None, operands, seeds)[0]


def _drawn(
    number: int, axes: Axes, settings: Settings, operands: Operands, seeds: Array
) -> tuple[Draw, Array]:
    index, lse = sample(number, settings, operands, seeds)
    if axes:  # devices hold equal numbers of keys, in order
        first = lax.axis_index(axes).astype(jnp.int32) * operands.key.shape[1]
        index = jnp.where(index < 0, -1, index + first)
    return Draw(index, lse), seeds


def _fold_draws(found: tuple[Draw, Array], axes: Axes, plan: ShardingPlan) -> tuple[Draw, Array]:
    del plan
    mine, seeds = found
    parts: Draw = jax.tree.map(lambda x: lax.all_gather(x, axes), mine)
    devices = lax.axis_size(axes)
    # All devices draw with the same random numbers, which does no harm, since one device's draw is
    # chosen. It is chosen with numbers that no block uses.
    shape = devices, mine.indices.shape[-1]
    chances = uniform(fold_in_seeds(seeds, _DEVICES), shape, mine.lse.dtype)

    def fold(drawn: Draw, i: Array) -> tuple[Draw, None]:
        return merge_draws(drawn, Draw(parts.indices[i], parts.lse[i]), chances[..., i, :]), None

    first = Draw(parts.indices[0], parts.lse[0])
    drawn, _ = lax.scan(fold, first, jnp.arange(1, devices))
    return as_invariant(drawn, axes), as_invariant(seeds, axes)
