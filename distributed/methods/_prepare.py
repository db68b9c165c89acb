"""The sharding plan of a call, and its refinement by mask, layout and reproducibility."""

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

_MOST_COMPARED = 1 << 24  # pairs of tokens and devices whose segments are compared at trace time
_MOST_DEVICES = 64  # for each pair of which a mask is evaluated at trace time
_LONG = 8192  # tokens; fewer are no reason to warn of idle devices


def plan_call(
    parallel: SequenceParallel | None,
    arrays: arguments.CheckedArrays,
    bias: object,
    mask: object,
    options: Mapping[str, Any],
) -> ShardingPlan | None:
    """The plan of a call with checked arrays, or None on one device. Raises as `sharding_plan`."""
    query, key, value, _ = arrays
    if parallel is None and jax.sharding.get_abstract_mesh().empty:
        if jax.typeof(query).sharding.mesh.empty and jax.typeof(key).sharding.mesh.empty:
            return None
    # a mesh axis is manual inside a `jax.shard_map` over it
    mesh: Any = jax.sharding.get_abstract_mesh()
    if not isinstance(parallel, SequenceParallel) or any(
        x not in mesh.axis_names or kind_of(mesh, x) != AxisType.Manual for x in parallel.axes
    ):
        return sharding_plan(parallel, query, key, value)
    # inside a `jax.shard_map` over all axes of `parallel`, where a device has no arrays over all keys
    passed = {"bias": bias, "mask": split_mask(mask)[1], **options}
    for name in ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths"):
        if passed.get(name) is not None:
            other = "sharded_attention" if name in ("bias", "mask") else "positions"
            raise ValueError(
                f"{name}: wanted None where parallel's axes are those of a surrounding "
                f"jax.shard_map, got {checks.received(passed[name])}; {other} will do"
            )
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
    """Fits plan and policy to the window, the layout and the positions of a call; raises as `check_order`."""
    operands, settings = call.operands, call.settings
    sizes = operands.query.shape[1], operands.key.shape[1]
    # with the user's positions, the layout does not tell which keys a query sees
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
    """The plan, with `HaloExchange` where the mask hides enough keys, at the positions of the layout."""
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
    # the choice of `sharding_plan` did not know the window
    if is_bounded and (parallel is None or parallel.method == "auto"):
        name = choose_method(shape, plan.topology or usual_topology(plan.mesh, plan.sequence))
        method = method_by_name(name) if name in ("ring", "gather") else method
    shared = device_count(plan.mesh, method.exchanged(plan.sequence))
    exchange = halo_method(method, shape, plan.devices, shared, meets)
    return plan if exchange is method else plan._replace(method=exchange)


def _meets(
    settings: Settings, operands: Operands, rule: AbstractMask | None, devices: int
) -> Meets | None:
    """Extra sparsity of a constant mask beyond its window, or None."""
    # segments are compared token by token, other masks by intervals of positions
    conjuncts = [] if rule is None else _conjuncts(rule)
    tables = [_ids(x) for x in conjuncts if isinstance(x, Segments) and _is_known(x)]
    tables = [x for x in tables if x[1].shape[1] * devices <= _MOST_COMPARED]
    mask = settings.mask.bind(operands.mask_arrays)
    evaluates = not settings.mask.is_window and devices <= _MOST_DEVICES and _is_known(mask)
    if not evaluates and not tables:
        return None

    def meets(
        low: np.ndarray, high: np.ndarray, first: np.ndarray, last: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if evaluates:
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
    queries = np.atleast_2d(np.asarray(mask.query_ids))
    return queries, queries if mask.key_ids is None else np.atleast_2d(np.asarray(mask.key_ids))


def _shared(
    queries: np.ndarray, keys: np.ndarray, low: int, high: int, first: int, last: int
) -> tuple[int, int]:
    """The first and the last of the keys from `first` to `last` in a segment of the queries from `low` to `high`."""
    shared = np.zeros(max(0, last - first + 1), bool)
    for row in range(max(len(queries), len(keys))):
        key_ids = keys[row % len(keys), first : last + 1]
        seen = np.isin(key_ids, queries[row % len(queries), low : high + 1])
        shared[: len(seen)] |= seen
    (places,) = np.nonzero(shared)
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
    """Raises `ValueError` where positions of one side only are known not to be in the layout's order."""
    # the order of the layout is assumed for the other side; replicated queries may be in any order
    positions = {x: options.get(x) for x in ("query_positions", "key_positions")}
    assumed = parallel.layout != "contiguous" and query_len == key_len and not plan.local
    if not assumed or None not in positions.values():
        return
    if parallel.queries_sharded is False:
        del positions["query_positions"]
    order = np.argsort(sequence_order(key_len, parallel, "key.shape[1]"))
    for name, x in positions.items():
        if x is None or not checks.is_concrete(x):
            continue
        tokens = np.asarray(x)[..., order]
        if ((tokens >= 0) & (tokens < np.maximum.accumulate(tokens, -1))).any():
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
    """Warns where a causal call over contiguous shards leaves devices idle that another layout would not."""
    # Of p devices the last sees p - 1/2 of the shards, and a device p/2 on average: 2 - 1/p times the mean work.
    # Ulysses gives each device the whole sequence. Windows and the user's positions may be balanced.
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
