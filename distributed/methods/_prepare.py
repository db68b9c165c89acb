"""How a call is sharded: its plan, the positions of its tokens, and what its mask and its bits add to the plan."""

import functools
from collections.abc import Mapping
from typing import Any

import jax

from energy_attn.kernels.internal import (
    CallPolicy,
    CheckedArrays,
    CheckedCall,
    PlaceFn,
    received,
    split_mask,
)

from ._layout import check_order, place_tokens, warn_of_idle_devices
from ._near_plan import near_plan
from ._parallel import SequenceParallel
from ._plan import ShardingPlan, in_shard_map, local_sharding_plan, sharding_plan


def plan_call(
    parallel: SequenceParallel | None,
    arrays: CheckedArrays,
    bias: object,
    mask: object,
    options: Mapping[str, Any],
) -> ShardingPlan | None:
    """The plan of a call with checked arrays, or None if it is on one device. Raises as `sharding_plan`.

    Inside a `jax.shard_map` over all axes of `parallel`, also `ValueError` for arguments that one device cannot give
    for all keys.
    """
    query, key, value, _ = arrays
    if parallel is None and jax.sharding.get_abstract_mesh().empty:
        if jax.typeof(query).sharding.mesh.empty and jax.typeof(key).sharding.mesh.empty:
            return None
    if not in_shard_map(parallel):
        return sharding_plan(parallel, query, key, value)
    given = {"bias": bias, "mask": split_mask(mask)[1], **options}
    for name in ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths"):
        if given.get(name) is not None:
            other = "sharded_attention" if name in ("bias", "mask") else "positions"
            raise ValueError(
                f"{name}: wanted None where parallel's axes are those of a surrounding "
                f"jax.shard_map, got {received(given[name])}; {other} will do"
            )
    return local_sharding_plan(parallel, query, key, value)


def place_by(
    parallel: SequenceParallel, plan: ShardingPlan | None, arrays: CheckedArrays
) -> PlaceFn:
    """A function that adds to tokens the positions that the layout implies."""
    sizes = arrays.query.shape[1], arrays.key.shape[1]
    return functools.partial(place_tokens, parallel, plan, *sizes)


def fit_plan(
    plan: ShardingPlan,
    parallel: SequenceParallel | None,
    policy: CallPolicy,
    call: CheckedCall,
    mask: object,
    options: Mapping[str, Any],
) -> tuple[ShardingPlan, CallPolicy]:
    """The plan and the policy that fit a checked call: its mask's window, its layout, and its bits.

    Raises `ValueError` for positions that are not in the order of the layout; warns of devices that the layout leaves
    idle.
    """
    operands, settings = call.operands, call.settings
    sizes = operands.query.shape[1], operands.key.shape[1]
    if options.get("query_positions") is None and options.get("key_positions") is None:
        plan = near_plan(plan, parallel, settings, operands, split_mask(mask)[0])
    if plan.sequence and options.get("key_positions") is None:
        layout = "contiguous" if parallel is None else parallel.layout
        policy = policy.laid_out(plan.run(layout, sizes[1]))
    if parallel is not None:
        check_order(parallel, plan, options, *sizes)
        warn_of_idle_devices(parallel, plan, settings.mask.window, options, *sizes)
    return plan, policy
