"""Attention over arrays that are sharded over a mesh, by their types or by `parallel=`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, auto_axes
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    CallPolicy,
    Operands,
    PartIndices,
    Scales,
    Settings,
    Tokens,
    attend,
    check_taylor,
    dequantized,
    differentiated_by_jax,
    with_sink,
)

from ._abstract import AbstractMethod, LocalCall
from ._arguments import Axes, rounded
from ._methods import METHODS
from ._plan import (
    ShardingPlan,
    is_explicit,
    mesh_axes_of,
    other_explicit_axes,
    reshard_explicit,
)
from ._tree import Tree


def attend_sharded(
    plan: ShardingPlan | None,
    policy: CallPolicy,
    settings: Settings,
    operands: Operands,
) -> AttentionState:
    """The state of a call, sharded over a mesh by `plan`; None: over none.

    A length that is no multiple of the number of devices is padded with absent keys and queries.
    The result is sharded as the queries are. Raises as the kernels do.
    """
    if plan is not None or not differentiated_by_jax(policy.kernels):
        check_taylor(operands)
    if plan is None:
        run = functools.partial(attend, policy.kernels)
    else:
        run = functools.partial(_sharded, plan, policy)
    return beside_sink(run, policy, settings, operands)


def beside_sink(
    run: Callable[[Settings, Operands], AttentionState],
    policy: CallPolicy,
    settings: Settings,
    operands: Operands,
) -> AttentionState:
    """`run(settings, operands)`, merged with the sink of the call, unless kernels fold it, and then rounded."""
    if operands.sink is None or policy.folds_sinks:
        return run(settings, operands)
    state = run(settings.needing(unrounded=True), operands._replace(sink=None))
    rows = operands.positioned(read=False).tokens.query_positions
    return rounded(with_sink(state, operands.sink, rows), operands, settings)


def method_of(policy: CallPolicy, method: AbstractMethod) -> AbstractMethod:
    """The method of a policy, or `method`."""
    return method if policy.method is None else METHODS[policy.method]()


# Compiled here, so that a call outside of jit is traced and compiled once for its shapes.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _sharded(
    plan: ShardingPlan, policy: CallPolicy, settings: Settings, operands: Operands
) -> AttentionState:
    plan = unsharded_if_empty(plan, operands)
    plan = plan._replace(method=method_of(policy, plan.method))
    if plan.method.reads_positions and plan.sequence:
        operands = operands.positioned()
    if not isinstance(plan.method, Tree):  # other methods take keys apart
        operands = dequantized(operands)
    operands = with_indices(plan, settings, operands)
    return run_sharded(plan, functools.partial(_attend, plan, policy, settings), operands)


def with_indices(plan: ShardingPlan, settings: Settings, operands: Operands) -> Operands:
    """Operands with what mask and score read, since a device's part does not count from 0."""
    if plan.sequence:
        operands = operands.positioned(settings.compares)
    counts = settings.score is not None or operands.sink is not None
    return _with_indices(plan, operands) if counts else operands


def as_parts(plan: ShardingPlan, operands: Operands) -> Operands:
    """`with_indices` for any mask and score."""
    return _with_indices(plan, operands.positioned() if plan.sequence else operands)


def _with_indices(plan: ShardingPlan, operands: Operands) -> Operands:
    batch, _, heads, _ = operands.query.shape
    indices = PartIndices(
        batch=jnp.arange(batch, dtype=jnp.int32) if plan.batch else None,
        heads=jnp.arange(heads, dtype=jnp.int32) if plan.heads else None,
    )
    return operands._replace(indices=indices)


def unsharded_if_empty(plan: ShardingPlan, operands: Operands) -> ShardingPlan:
    """`plan`, or one that shards nothing where there are no queries or keys: XLA shards no empty program."""
    sizes = *operands.query.shape[:2], operands.key.shape[1]
    if plan.local or 0 not in sizes:
        return plan
    return plan._replace(batch=(), sequence=(), heads=(), queries=False)


def run_sharded(
    plan: ShardingPlan, run: Callable[..., Any], operands: Operands, *rows: Array | Operands
) -> Any:
    """`run(operands, *rows)` on each device, on its part of the operands and of `rows`.

    `rows`, and the arrays of the tree that `run` returns, are `[B, T, N, ...]` and are sharded as the
    queries are; among `rows`, operands of as many rows and keys are sharded as the first. Raises as `run` does.
    """
    rest = other_explicit_axes(plan.mesh, plan.axes)
    if rest:

        def within(operands: Operands, *rows: Array | Operands) -> Any:
            mesh = jax.sharding.get_abstract_mesh()
            return _run_sharded(plan._replace(mesh=mesh), run, operands, *rows)

        out_spec = NamedSharding(plan.mesh, _out_spec(plan, operands.query))
        return auto_axes(within, axes=rest, out_sharding=out_spec)(operands, *rows)
    return _run_sharded(plan, run, operands, *rows)


def _out_spec(plan: ShardingPlan, query: Array) -> PartitionSpec:
    """The sharding of results `[B, T, N, ...]` for `query`, by its type."""
    if not plan.axes:
        return PartitionSpec(*(mesh_axes_of(query, axis) or None for axis in range(3)))
    kept = plan.sequence if plan.queries and mesh_axes_of(query, 1) else ()
    parts = (
        tuple(axis for axis in axes if is_explicit(plan.mesh, (axis,)))
        for axes in (plan.batch, kept, plan.heads)
    )
    return PartitionSpec(*(part or None for part in parts))


def _run_sharded(
    plan: ShardingPlan, run: Callable[..., Any], operands: Operands, *rows: Array | Operands
) -> Any:
    if plan.local or not plan.axes:
        return run(operands, *rows)
    number, split = operands.query.shape[1], mesh_axes_of(operands.query, 1)
    sequence = plan.sequence if plan.queries else None
    out_spec = PartitionSpec(_axes(plan.batch), sequence, _axes(plan.heads))

    def padded(x: Any) -> Any:
        if not isinstance(x, Operands):
            return _pad(x, 1, number, -number % plan.devices) if plan.queries else x
        x = _pad_keys(x, plan.devices) if plan.sequence else x
        return _pad_queries(x, plan.devices) if plan.queries else x

    given = tuple(map(padded, (operands, *rows)))
    specs = tuple(_specs(x, plan) if isinstance(x, Operands) else out_spec for x in given)
    mapped = jax.shard_map(
        run, mesh=plan.mesh, in_specs=specs, out_specs=out_spec, axis_names=set(plan.axes)
    )
    found = mapped(*(_reshard(x, spec, plan) for x, spec in zip(given, specs, strict=True)))
    if split or not plan.queries:
        return found
    # queries that only this attention sharded, perhaps after padding
    whole = PartitionSpec(_axes(plan.batch), None, _axes(plan.heads))
    found = reshard_explicit(plan.mesh, plan.axes, found, whole)
    return jax.tree.map(lambda x: x[:, :number], found)


def _attend(
    plan: ShardingPlan, policy: CallPolicy, settings: Settings, operands: Operands
) -> AttentionState:
    others = plan.batch + plan.heads
    if not plan.sequence and not plan.method.attends_alone(operands):
        return attend(policy.kernels, settings, operands)
    call = LocalCall(policy, settings, operands, plan.sequence, plan.queries, others)
    return plan.method.attend(call)


def _axes(axes: Axes) -> Axes | None:
    return axes or None


def _pad(x: Array, axis: int, size: int, missing: int, fill: int = 0) -> Array:
    if x.shape[axis] != size:  # broadcast
        return x
    widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill)


def _pad_keys(operands: Operands, devices: int) -> Operands:
    key_len = operands.key.shape[1]
    missing = -key_len % devices
    if missing == 0:
        return operands
    queries, keys = operands.tokens.query_positions, operands.tokens.key_positions
    if queries is None or keys is None:
        queries = jnp.zeros((1, operands.query.shape[1]), jnp.int32)
        keys = jnp.zeros((1, key_len), jnp.int32)
    padded = operands.map_keys(lambda x, axis: _pad(x, axis, key_len, missing))
    keys = _pad(keys, 1, key_len, missing, fill=-1)
    tokens = padded.tokens._replace(query_positions=queries, key_positions=keys)
    return padded._replace(tokens=tokens)


def _pad_queries(operands: Operands, devices: int) -> Operands:
    query_len = operands.query.shape[1]
    missing = -query_len % devices
    if missing == 0:
        return operands
    padded = operands.map_queries(lambda x, axis: _pad(x, axis, query_len, missing))
    queries = operands.tokens.query_positions
    if queries is None:
        return padded
    queries = _pad(queries, 1, query_len, missing, fill=-1)
    return padded._replace(tokens=padded.tokens._replace(query_positions=queries))


def _specs(operands: Operands, plan: ShardingPlan) -> Operands:
    """The `PartitionSpec` of each operand."""
    batch, keys, heads = (_axes(axes) for axes in (plan.batch, plan.sequence, plan.heads))
    queries = keys if plan.queries else None
    split = plan.method.split(plan.sequence, operands, plan.queries)
    rows, columns = _axes(split.rows), _axes(split.keys)
    scores = batch, _axes(plan.heads + split.heads), _axes(split.queries), columns

    def spec(x: Array | None, *axes: Axes | None) -> Any:
        if x is None:
            return PartitionSpec()
        # an axis of size one is broadcast, not split
        kept = (part if size > 1 else None for size, part in zip(x.shape, axes, strict=True))
        return PartitionSpec(*kept)

    tokens, indices = operands.tokens, operands.indices
    of_sink = (heads,) if operands.sink is None or operands.sink.ndim == 1 else (batch, heads)
    return Operands(
        query=spec(operands.query, batch, queries, heads, None),
        key=spec(operands.key, batch, keys, heads, None),
        value=spec(operands.value, batch, keys, heads, None),
        bias=spec(operands.bias, *scores),
        mask=spec(operands.mask, *scores),
        tokens=Tokens(
            query_positions=spec(tokens.query_positions, batch, rows),
            key_positions=spec(tokens.key_positions, batch, columns),
            query_segments=spec(tokens.query_segments, batch, rows),
            key_segments=spec(tokens.key_segments, batch, columns),
            query_lengths=spec(tokens.query_lengths, batch),
            key_lengths=spec(tokens.key_lengths, batch),
        ),
        mask_arrays=tuple(spec(x, batch, *(None,) * (x.ndim - 1)) for x in operands.mask_arrays),
        score_arrays=tuple(PartitionSpec() for _ in operands.score_arrays),
        indices=PartIndices(spec(indices.batch, batch), spec(indices.heads, heads)),
        scales=Scales(*(spec(x, batch, keys, heads) for x in operands.scales)),
        sink=spec(operands.sink, *of_sink),
    )


def _reshard(arrays: Any, specs: Any, plan: ShardingPlan) -> Any:
    def put(x: Any, spec: Any) -> Any:
        return reshard_explicit(plan.mesh, plan.axes, x, spec)

    return jax.tree.map(put, arrays, specs, is_leaf=lambda x: x is None)
