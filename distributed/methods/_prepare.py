"""How a call is sharded: its plan, the positions of its tokens, and what its mask and its bits add to the plan."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from energy_attn.kernels import Operands, Settings
from energy_attn.kernels.internal import (
    CallPolicy,
    arguments,
    checks,
    is_static,
    may_meet,
    split_mask,
)
from energy_attn.kernels.masks import AbstractMask, And, Interval, Segments

from ..cost._interconnects import usual_topology
from ._cost import choose_method, near_method
from ._halo import Meets, run_length
from ._layout import check_order, warn_of_idle_devices
from ._parallel import SequenceParallel, named_method
from ._plan import (
    ShardingPlan,
    by_method,
    device_count,
    kind_of,
    queries_are_parts,
    shape_of,
    sharding_plan,
)
from ._tree import Tree

# Pairs of tokens and devices whose segments are compared before a program is made; of more only the window counts.
_MOST_COMPARED = 1 << 24
_MOST_ASKED = 64  # devices, for each pair of which a mask is asked once


def plan_call(
    parallel: SequenceParallel | None,
    arrays: arguments.CheckedArrays,
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
    mesh: Any = jax.sharding.get_abstract_mesh()
    if not isinstance(parallel, SequenceParallel) or any(
        x not in mesh.axis_names or kind_of(mesh, x) != AxisType.Manual for x in parallel.axes
    ):
        return sharding_plan(parallel, query, key, value)
    given = {"bias": bias, "mask": split_mask(mask)[1], **options}
    for name in ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths"):
        if given.get(name) is not None:
            other = "sharded_attention" if name in ("bias", "mask") else "positions"
            raise ValueError(
                f"{name}: wanted None where parallel's axes are those of a surrounding "
                f"jax.shard_map, got {checks.received(given[name])}; {other} will do"
            )
    # queries that types do not tell of are a device's part if there are as many as keys
    queries = parallel.queries_sharded
    if queries is None:
        queries = queries_are_parts(parallel.axes, query, key)
    merge, topology = parallel.merge, parallel.topology
    plan = ShardingPlan(mesh, (), parallel.axes, (), queries, Tree(), merge, topology, local=True)
    return by_method(parallel.method, plan, query, key, value)


def fit_plan(
    plan: ShardingPlan,
    parallel: SequenceParallel | None,
    policy: CallPolicy,
    call: arguments.CheckedCall,
    mask: object,
    options: Mapping[str, Any],
) -> tuple[ShardingPlan, CallPolicy]:
    """The plan and the policy that fit a checked call: its mask's window, its layout, and its bits.

    Raises as `check_order`; warns as `warn_of_idle_devices`.
    """
    operands, settings = call.operands, call.settings
    sizes = operands.query.shape[1], operands.key.shape[1]
    if options.get("query_positions") is None and options.get("key_positions") is None:
        plan = near_plan(plan, parallel, settings, operands, split_mask(mask)[0])
    if plan.sequence and options.get("key_positions") is None:
        layout = "contiguous" if parallel is None else parallel.layout
        share = sizes[1] if plan.local else -(-sizes[1] // plan.devices)
        policy = policy.laid_out(run_length(layout, share))
    if parallel is not None:
        check_order(parallel, plan, options, *sizes)
        warn_of_idle_devices(parallel, plan, settings.mask.window, options, *sizes)
    return plan, policy


def near_plan(
    plan: ShardingPlan,
    parallel: SequenceParallel | None,
    settings: Settings,
    operands: Operands,
    rule: AbstractMask | None,
) -> ShardingPlan:
    """The plan, by `Neighbours` where positions and the mask tell that queries see some of the keys.

    Positions are those of the layout. `rule` is the mask as it was given, whose segments may be known.
    """
    sizes = *operands.query.shape, *operands.key.shape
    if not plan.sequence or not plan.queries or not is_static(*sizes):
        return plan
    layout = "contiguous" if parallel is None else parallel.layout
    arrays = operands.query, operands.key, operands.value
    shape = shape_of(plan, *arrays, settings.mask.window, layout)
    meets = _meets(settings, operands, rule, plan.devices)
    is_bounded = max(settings.mask.window) < shape.keys
    if not is_bounded and meets is None:
        return plan
    if layout != "contiguous" and shape.queries != shape.keys:
        return plan  # queries in an order of their own
    method = plan.method
    if is_bounded and (parallel is None or parallel.method == "auto"):
        name = choose_method(shape, plan.topology or usual_topology(plan.mesh, plan.sequence))
        method = named_method(name) if name in ("ring", "gather") else method
    shared = device_count(plan.mesh, method.exchanged(plan.sequence))
    near = near_method(method, shape, plan.devices, shared, meets)
    return plan if near is method else plan._replace(method=near)


def _meets(
    settings: Settings, operands: Operands, rule: AbstractMask | None, devices: int
) -> Meets | None:
    """Extra sparsity of a constant mask beyond its window, or None."""
    joined = [] if rule is None else _conjuncts(rule)
    tables = [_ids(x) for x in joined if isinstance(x, Segments) and _is_known(x)]
    tables = [x for x in tables if x[1].shape[1] * devices <= _MOST_COMPARED]
    mask = settings.mask.bind(operands.mask_arrays)
    asked = not settings.mask.is_window and devices <= _MOST_ASKED and _is_known(mask)
    if not asked and not tables:
        return None

    def meets(
        low: np.ndarray, high: np.ndarray, first: np.ndarray, last: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if asked:
            with jax.ensure_compile_time_eval():
                bounds = [jnp.asarray(x, jnp.int32)[None] for x in (low, high, first, last)]
                met = may_meet(mask, Interval(*bounds[:2]), Interval(*bounds[2:]))
                last = np.where(np.asarray(met).any(0), last, first - 1)
        for queries, keys in tables:
            bounds = zip(*(x.tolist() for x in (low, high, first, last)), strict=True)
            pairs = [_shared(queries, keys, *x) for x in bounds]
            first, last = np.array(pairs).T
        return first, last

    return meets


def _is_known(mask: AbstractMask) -> bool:
    return all(map(checks.is_concrete, jax.tree.leaves(mask)))


def _conjuncts(mask: AbstractMask) -> list[AbstractMask]:
    if isinstance(mask, And):
        return [*_conjuncts(mask.first), *_conjuncts(mask.second)]
    return [mask]


def _ids(mask: Segments) -> tuple[np.ndarray, np.ndarray]:
    """The segments of queries and of keys, `[rows, tokens]`."""
    queries = np.atleast_2d(np.asarray(mask.query_ids))
    return queries, queries if mask.key_ids is None else np.atleast_2d(np.asarray(mask.key_ids))


def _shared(
    queries: np.ndarray, keys: np.ndarray, low: int, high: int, first: int, last: int
) -> tuple[int, int]:
    """The first and the last of some keys that are in the segments of some queries."""
    of_both = np.zeros(max(0, last - first + 1), bool)
    for row in range(max(len(queries), len(keys))):
        there = keys[row % len(keys), first : last + 1]
        seen = np.isin(there, queries[row % len(queries), low : high + 1])
        of_both[: len(seen)] |= seen
    (places,) = np.nonzero(of_both)
    if not len(places):
        return first, first - 1
    return first + int(places[0]), first + int(places[-1])
