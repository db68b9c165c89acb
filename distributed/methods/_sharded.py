"""Attention and reductions over arrays that are sharded over a mesh, by their types or by `parallel=`."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib.version
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, auto_axes
from jaxtyping import Array

from energy_attn.kernels import AttentionState, Operands, Settings
from energy_attn.kernels.internal import (
    CallPolicy,
    PartIndices,
    Scales,
    State,
    Tokens,
    attend,
    autodiff,
    checks,
    dequantized,
    differentiated_by_jax,
)

from ..merge._abstract import Axes, joined
from ..merge._across import fold_across, resolve_merge
from ._abstract import LocalCall, attend_with_sink, with_all_queries
from ._choice import method_of_call
from ._parallel import (
    ShardingPlan,
    is_explicit,
    mesh_axes_of,
    other_explicit_axes,
    reshard_explicit,
)
from ._tree import Tree


def attend_sharded(
    plan: ShardingPlan | None, policy: CallPolicy, settings: Settings, operands: Operands
) -> AttentionState:
    """The state of a call on one device, or by `plan` over a mesh, sharded as the queries. Raises as the kernels do."""
    # `jax.experimental.jet` would need rules for kernels and collectives
    if plan is not None or not differentiated_by_jax(policy.kernels):
        checks.check_taylor(operands)
    if plan is None:
        run = functools.partial(attend, policy.kernels)
    else:
        run = functools.partial(_attend_sharded, plan, policy)
    return attend_with_sink(run, policy, settings, operands)


# Compiled here, so that a call outside of jit is traced and compiled once for its shapes.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _attend_sharded(
    plan: ShardingPlan, policy: CallPolicy, settings: Settings, operands: Operands
) -> AttentionState:
    plan = _unsharded_if_empty(plan, operands)
    plan = plan._replace(method=method_of_call(policy, plan.method))
    if plan.method.reads_positions and plan.sequence:
        operands = operands.positioned()
    if not isinstance(plan.method, Tree):  # other methods send keys, and no scales with them
        operands = dequantized(operands)
    operands = _with_indices(plan, operands, settings)
    return _run_sharded(plan, functools.partial(_attend, plan, policy, settings), operands)


def _with_indices(
    plan: ShardingPlan, operands: Operands, settings: Settings | None = None
) -> Operands:
    """Adds the positions and indices that the settings read, or all: a device's own do not count from 0."""
    if plan.sequence:
        operands = operands.positioned(settings is None or settings.uses_positions)
    if settings is not None and settings.score is None and operands.sink is None:
        return operands
    batch, _, heads, _ = operands.query.shape
    indices = PartIndices(
        batch=jnp.arange(batch, dtype=jnp.int32) if plan.batch else None,
        heads=jnp.arange(heads, dtype=jnp.int32) if plan.heads else None,
    )
    return operands._replace(indices=indices)


def _unsharded_if_empty(plan: ShardingPlan, operands: Operands) -> ShardingPlan:
    # XLA shards no empty program
    sizes = *operands.query.shape[:2], operands.key.shape[1]
    if plan.local or 0 not in sizes:
        return plan
    return plan._replace(batch=(), sequence=(), heads=(), queries=False)


def _run_sharded(
    plan: ShardingPlan, run: Callable[..., Any], operands: Operands, *rows: Array | Operands
) -> Any:
    """`run(operands, *rows)` on the shards of each device. Raises as `run` does.

    `rows` and results, `[B, T, N, ...]`, are sharded as queries. `rows` may include operands of equally many keys.
    """
    warn_of_cache(plan.mesh)
    rest = other_explicit_axes(plan.mesh, plan.axes)
    # JAX cannot compute on types with other explicit axes; inside `auto_axes` the types do not have them
    if rest:

        def within(*args: Any) -> Any:
            return _run_sharded(plan._replace(mesh=jax.sharding.get_abstract_mesh()), run, *args)

        out_spec = NamedSharding(plan.mesh, _out_spec(plan, operands.query))
        return auto_axes(within, axes=rest, out_sharding=out_spec)(operands, *rows)
    if plan.local or not plan.axes:
        return run(operands, *rows)
    number, split = operands.query.shape[1], mesh_axes_of(operands.query, 1)
    batch, heads = plan.batch or None, plan.heads or None
    out_spec = PartitionSpec(batch, plan.sequence if plan.queries else None, heads)

    # A length that is no multiple of the number of devices is padded with absent queries and keys.
    def padded(x: Any) -> Any:
        if isinstance(x, Operands):
            x = _padded(x, "key", plan.devices)
            return _padded(x, "query", plan.devices) if plan.queries else x
        return _pad(x, 1, number, -number % plan.devices) if plan.queries else x

    def put(x: Any, spec: PartitionSpec) -> Any:
        return reshard_explicit(plan.mesh, plan.axes, x, spec)

    args = tuple(map(padded, (operands, *rows)))
    specs = tuple(_specs(x, plan) if isinstance(x, Operands) else out_spec for x in args)
    mapped = jax.shard_map(
        run, mesh=plan.mesh, in_specs=specs, out_specs=out_spec, axis_names=set(plan.axes)
    )
    result = mapped(*jax.tree.map(put, args, specs, is_leaf=lambda x: x is None))
    if split or not plan.queries:
        return result
    # the caller's queries were not sharded, and may have been padded
    result = put(result, PartitionSpec(batch, None, heads))
    return jax.tree.map(lambda x: x[:, :number], result)


def warn_of_cache(mesh: AbstractMesh) -> None:
    """Warns where XLA would read a program back from JAX's cache without the order of its collectives."""
    # Collectives in a loop then meet those outside of it. jaxlib 0.11.0 does so on CPUs, and 0.11.1 does not.
    config: Any = jax.config
    cached = config.jax_compilation_cache_dir and config.jax_enable_compilation_cache
    if jaxlib.version.__version_info__ >= (0, 11, 1) or not cached:
        return
    if getattr(mesh.abstract_device, "device_kind", None) == "cpu" and mesh.size > 1:
        warnings.warn(
            "jax_compilation_cache_dir: this jaxlib reads programs for several CPU devices back with wrong values, "
            "or waits for ever; wanted jax_enable_compilation_cache=False, or jaxlib 0.11.1",
            RuntimeWarning,
            stacklevel=2,
        )


def _out_spec(plan: ShardingPlan, query: Array) -> PartitionSpec:
    if not plan.axes:
        return PartitionSpec(*(mesh_axes_of(query, axis) or None for axis in range(3)))
    kept = plan.sequence if plan.queries and mesh_axes_of(query, 1) else ()
    parts = (
        tuple(axis for axis in axes if is_explicit(plan.mesh, (axis,)))
        for axes in (plan.batch, kept, plan.heads)
    )
    return PartitionSpec(*(part or None for part in parts))


def _attend(
    plan: ShardingPlan, policy: CallPolicy, settings: Settings, operands: Operands
) -> AttentionState:
    others = plan.batch + plan.heads
    if not plan.sequence and not plan.method.replaces_kernels(operands):
        return attend(policy.kernels, settings, operands)
    call = LocalCall(policy, settings, operands, plan.sequence, plan.queries, others)
    return plan.method.attend(call)


def _pad(x: Array, axis: int, size: int, missing: int, fill: int = 0) -> Array:
    if x.shape[axis] != size:  # broadcast
        return x
    widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill)


def _padded(operands: Operands, side: str, devices: int) -> Operands:
    """Pads the queries or the keys with absent ones to a multiple of the devices."""
    size, name = getattr(operands, side).shape[1], f"{side}_positions"
    missing = -size % devices
    if missing == 0:
        return operands
    queries, keys = operands.tokens.query_positions, operands.tokens.key_positions
    # absent keys are marked by positions of -1, and so all tokens need positions
    if side == "key" and (queries is None or keys is None):
        queries, keys = (jnp.zeros((1, x.shape[1]), jnp.int32) for x in operands[:2])
        tokens = operands.tokens._replace(query_positions=queries, key_positions=keys)
        operands = operands._replace(tokens=tokens)
    mapped = operands.map_keys if side == "key" else operands.map_queries
    padded = mapped(lambda x, axis: _pad(x, axis, size, missing))
    positions = getattr(operands.tokens, name)
    if positions is None:
        return padded
    positions = _pad(positions, 1, size, missing, fill=-1)
    return padded._replace(tokens=padded.tokens._replace(**{name: positions}))


def _specs(operands: Operands, plan: ShardingPlan) -> Operands:
    split = plan.method.split(plan.sequence, operands, plan.queries)
    # for each array, the mesh axes over which each of its axes is sharded
    batch: Any = (plan.batch,)
    heads: Any = (plan.heads,)
    queries: Any = (*batch, plan.sequence if plan.queries else (), *heads)
    keys: Any = (*batch, plan.sequence, *heads)
    scores: Any = (*batch, plan.heads + split.heads, split.queries, split.keys)
    rows: Any = (*batch, split.rows)
    columns: Any = (*batch, split.keys)
    by_batch = operands.sink is not None and operands.sink.ndim == 2
    axes = Operands(
        *(queries, keys, keys),
        bias=scores,
        mask=scores,
        tokens=Tokens(rows, columns, rows, columns, batch, batch),
        mask_arrays=(batch,) * len(operands.mask_arrays),
        score_arrays=((),) * len(operands.score_arrays),
        indices=PartIndices(batch, heads),
        scales=Scales(keys, keys),
        sink=batch + heads if by_batch else heads,
    )

    def spec(x: Array | None, axes: tuple[Axes, ...]) -> PartitionSpec:
        pairs = zip(() if x is None else x.shape, axes, strict=False)
        # an axis of size one is broadcast, not split
        return PartitionSpec(*(part or None if size > 1 else None for size, part in pairs))

    return jax.tree.map(spec, operands, axes, is_leaf=lambda x: x is None)


class Reduction(NamedTuple):
    """A function of some keys, and the fold of its results over all of them; static, hashable.

    Attributes:
        find: `find(settings, operands, *rows)` returns a tree of arrays `[B, T, N, ...]`.
        fold: a name of `_FOLDS`, or a function `fold(results, axes, plan)`, equal on all devices of the axes.
    """

    find: Callable[..., Any]
    fold: Literal["states", "sums", "maxima"] | Callable[[Any, Axes, ShardingPlan], Any]

    def over(
        self,
        plan: ShardingPlan | None,
        settings: Settings,
        operands: Operands,
        *rows: Array | Operands,
    ) -> Any:
        """Returns the result for all keys of a call, without its sink, sharded over a mesh by `plan`.

        Sharded queries are gathered, whatever the method of `plan`, and each device keeps the results of its own.
        `rows` may include the operands of another call with equally many rows and keys. Raises as `find` does.
        """

        def of_keys(x: Any) -> Any:
            return x._replace(sink=None).positioned(read=False) if isinstance(x, Operands) else x

        return _reduce(plan, self, settings, *map(of_keys, (operands, *rows)))


# Compiled here, so that a call outside of jit is traced and compiled once for its shapes.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _reduce(
    plan: ShardingPlan | None,
    reduction: Reduction,
    settings: Settings,
    operands: Operands,
    *rows: Array | Operands,
) -> Any:
    find = functools.partial(reduction.find, settings)
    if plan is None:
        return find(operands, *rows)
    plan = _unsharded_if_empty(plan, operands)._replace(method=Tree())
    axes = plan.sequence

    def run(operands: Operands, *rows: Array | Operands) -> Any:
        count = operands.query.shape[1]

        def gathered(x: Any) -> Any:
            return with_all_queries(x, axes) if isinstance(x, Operands) else joined(x, axes, 1)

        result = find(*map(gathered, (operands, *rows))) if plan.queries else find(operands, *rows)
        if axes:
            fold = reduction.fold if callable(reduction.fold) else _FOLDS[reduction.fold]
            result = fold(result, axes, plan)
        if not plan.queries:
            return result
        first = lax.axis_index(axes) * count
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, count, 1), result)

    rows = tuple(_with_indices(plan, x) if isinstance(x, Operands) else x for x in rows)
    return _run_sharded(plan, run, _with_indices(plan, operands, settings), *rows)


def _fold_states(state: State, axes: Axes, plan: ShardingPlan) -> State:
    return fold_across(resolve_merge(plan.merge, state, axes, plan.topology), axes, state)


_FOLDS: dict[str, Callable[[Any, Axes, ShardingPlan], Any]] = {
    "states": _fold_states,
    "sums": lambda sums, axes, plan: lax.psum(sums, axes),
    "maxima": lambda x, axes, plan: autodiff.function_call(_MaximumOverDevices(axes), x),
}


@dataclasses.dataclass(frozen=True)
class _MaximumOverDevices(autodiff.AbstractFunction):
    # dm = Σ dx_i / n over the n devices with x_i = m
    axes: Axes

    def apply(self, args: Array) -> Array:
        return lax.pmax(args, self.axes)

    def jvp(self, primals: Array, tangents: Array) -> tuple[Array, Array]:
        # a barrier: XLA may round a number that it computes twice in two ways, and no device would hold the largest
        primals = lax.optimization_barrier(primals)
        maximum: Array = autodiff.function_call(self, primals)
        largest = (primals == maximum).astype(primals.dtype)
        change, count = lax.psum((largest * tangents, largest), self.axes)
        return maximum, change / count
