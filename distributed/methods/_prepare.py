"""How a call is sharded: its plan, and what its mask, its layout and its bits add to the plan."""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.core
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
from ._choice import choose_method, halo_method, method_by_name
from ._halo import Meets, run_length
from ._parallel import (
    SequenceParallel,
    ShardingPlan,
    by_method,
    device_count,
    kind_of,
    queries_are_parts,
    sequence_order,
    shape_of,
    sharding_plan,
)
from ._tree import Tree

# Pairs of tokens and devices whose segments are compared before a program is made; of more only the window counts.
_MOST_COMPARED = 1 << 24


_MOST_ASKED = 64  # devices, for each pair of which a mask is asked once


# Below this many tokens a device's work is short beside everything else.
_LONG = 8192


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
        plan = halo_plan(plan, parallel, settings, operands, split_mask(mask)[0])
    if plan.sequence and options.get("key_positions") is None:
        layout = "contiguous" if parallel is None else parallel.layout
        share = sizes[1] if plan.local else -(-sizes[1] // plan.devices)
        policy = policy.laid_out(run_length(layout, share))
    if parallel is not None:
        check_order(parallel, plan, options, *sizes)
        warn_of_idle_devices(parallel, plan, settings.mask.window, options, *sizes)
    return plan, policy


def halo_plan(
    plan: ShardingPlan,
    parallel: SequenceParallel | None,
    settings: Settings,
    operands: Operands,
    rule: AbstractMask | None,
) -> ShardingPlan:
    """The plan, by `HaloExchange` where positions and the mask tell that queries see some of the keys.

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
        method = method_by_name(name) if name in ("ring", "gather") else method
    shared = device_count(plan.mesh, method.exchanged(plan.sequence))
    near = halo_method(method, shape, plan.devices, shared, meets)
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


def check_order(
    parallel: SequenceParallel,
    plan: ShardingPlan,
    options: Mapping[str, Any],
    query_len: int,
    key_len: int,
) -> None:
    """Checks that positions given for one side only are in the layout's order, which is assumed for the other side.

    Raises `ValueError` where their values are known. Replicated queries may be in any order.
    """
    given = {x: options.get(x) for x in ("query_positions", "key_positions")}
    assumed = parallel.layout != "contiguous" and query_len == key_len and not plan.local
    if not assumed or None not in given.values():
        return
    if parallel.queries_sharded is False:
        del given["query_positions"]
    order = np.argsort(sequence_order(key_len, parallel, "key.shape[1]"))
    for name, x in given.items():
        if x is None or not checks.is_concrete(x):
            continue
        in_turn = np.asarray(x)[..., order]
        if ((in_turn >= 0) & (in_turn < np.maximum.accumulate(in_turn, -1))).any():
            other = "key_positions" if name == "query_positions" else "query_positions"
            raise ValueError(
                f"{name}: wanted {other}, too, for positions that are not in the order of "
                f"layout={parallel.layout!r} (see shard_sequence), got {checks.received(x)} alone"
            )


def warn_of_idle_devices(
    parallel: SequenceParallel,
    plan: ShardingPlan,
    window: tuple[int, int],
    options: Mapping[str, Any],
    query_len: int,
    key_len: int,
) -> None:
    """Warns where a causal call over contiguous shards leaves devices idle that another layout would not.

    Of $p$ devices the last sees $p - 1/2$ of the shards, all of them $p/2$ on average. Ulysses gives each
    the whole sequence; windows, and positions of the user's own, may be balanced.
    """
    whole = key_len * (plan.devices if plan.local else 1)
    if (
        parallel.layout == "contiguous"
        and plan.queries
        and plan.devices > 1
        and not plan.method.whole_sequences
        and window[0] >= whole
        and window[1] == 0
        and query_len == key_len
        and whole >= _LONG
        and options.get("query_positions") is None
        and options.get("key_positions") is None
    ):
        warnings.warn(
            f"parallel: under a causal mask the last of {plan.devices} contiguous shards has "
            f"{2 - 1 / plan.devices:.2f} times the mean work, and the other devices wait for it; with "
            "SequenceParallel(layout='zigzag') and shard_sequence all have the same",
            UserWarning,
            stacklevel=2,
        )
