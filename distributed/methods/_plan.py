"""Sharding plans: the mesh axes of each axis of an attention, from array types and `parallel=`."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.core
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from energy_attn.kernels.internal import checks, mesh_axes

from ..cost._interconnects import usual_topology
from ..cost._network import Topology
from ..cost._shape import Shape
from ..merge._abstract import Axes
from ._abstract import AbstractMethod, check_heads
from ._cost import choose_method
from ._parallel import SequenceParallel, named_method
from ._tree import Tree

Arrays = TypeVar("Arrays")

# To a call under a `jax.vmap`, which has one row.
_MAPPED = (
    "; rows that jax.vmap maps over are split by a jax.shard_map over all axes around it, as in "
    "jax.shard_map(jax.vmap(model), in_specs=jax.P('data', 'device'), ...), without batch="
)


class ShardingPlan(NamedTuple):
    """The mesh axes over which the axes of an attention are sharded, and the method; static.

    Devices exchange data along the sequence only: each attends for its own batch rows and heads.
    """

    mesh: AbstractMesh
    batch: Axes
    sequence: Axes
    heads: Axes
    queries: bool  # sharded along the sequence, as keys are
    method: AbstractMethod
    merge: str
    topology: Topology | None
    local: bool = False  # of a `jax.shard_map` over the sequence's axes: arrays are a device's part

    @property
    def axes(self) -> Axes:
        return self.batch + self.sequence + self.heads

    @property
    def devices(self) -> int:
        return device_count(self.mesh, self.sequence)


def sharding_plan(
    parallel: SequenceParallel | None, query: Array, key: Array, value: Array
) -> ShardingPlan | None:
    """The plan of a checked call, from `parallel` and from the types of the arrays.

    None if nothing is sharded and the mesh has no explicit axes, over which a surrounding `jax.vmap` may have sharded
    the axis it maps over. Only these are part of a type (`jax.typeof`).

    Raises `TypeError` if `parallel` is no `SequenceParallel`, and `ValueError` if no mesh is in force, an axis is not
    in it, an axis is taken by a surrounding `shard_map`, or its devices cannot share the rows or heads out.
    """
    if parallel is not None:
        check_mesh(parallel)
    first = key.ndim - 4  # -1 where there is no batch axis
    sequence = mesh_axes_of(key, first + 1) if parallel is None else parallel.axes
    batch = (mesh_axes_of(query, first) or mesh_axes_of(key, first)) if first == 0 else ()
    heads = mesh_axes_of(key, first + 2)
    if parallel is not None:
        batch, heads = parallel.batch or batch, parallel.heads or heads
    batch = tuple(axis for axis in batch if axis not in sequence)
    heads = tuple(axis for axis in heads if axis not in sequence + batch)
    mesh: Any = jax.sharding.get_abstract_mesh()
    mesh = (
        jax.typeof(key).sharding.mesh if mesh.empty and isinstance(key, jax.core.Tracer) else mesh
    )
    if not batch + sequence + heads and not other_explicit_axes(mesh, ()):
        return None
    if mesh.empty:
        raise ValueError(
            f"key: wanted the mesh in force that its type is split over, {jax.typeof(key)}, "
            "got none; use jax.set_mesh(mesh)"
        )
    if is_explicit(mesh, sequence):
        queries = not set(mesh_axes_of(query, first + 1)).isdisjoint(sequence)
    elif parallel is not None and parallel.queries_sharded is not None:
        queries = parallel.queries_sharded
    else:
        queries = query.shape[first + 1] == key.shape[first + 1]
    check_share("key", "heads", key.shape[-2], device_count(mesh, heads))
    rows = math.prod(query.shape[:-3])
    check_share("query", "rows", rows, device_count(mesh, batch), _MAPPED if rows == 1 else "")
    plan = ShardingPlan(mesh, batch, sequence, heads, queries, Tree(), "auto", None)
    if parallel is not None:
        plan = plan._replace(merge=parallel.merge, topology=parallel.topology)
    if not sequence:
        return plan
    return by_method("auto" if parallel is None else parallel.method, plan, query, key, value)


def queries_are_parts(axes: Axes, query: Array, key: Array) -> bool:
    """Whether queries inside `jax.shard_map` are a device's part, by the types of the arrays.

    Where types do not tell (`check_vma=False`), they are if there are as many as keys.
    """
    if set(axes) <= mesh_axes.varying_axes(key) | mesh_axes.varying_axes(query):
        return not set(axes).isdisjoint(mesh_axes.varying_axes(query))
    return query.shape[-3] == key.shape[-3]


def by_method(
    method: str | AbstractMethod, plan: ShardingPlan, query: Array, key: Array, value: Array
) -> ShardingPlan:
    """The plan with a method. Raises `ValueError` as `check_heads`."""
    if method == "auto" and plan.queries:
        shape = shape_of(plan, query, key, value)
        method = choose_method(shape, plan.topology or usual_topology(plan.mesh, plan.sequence))
    elif method == "auto":
        method = "tree"
    if isinstance(method, str):
        method = named_method(method, plan.merge, plan.topology)
    if exchanged := method.exchanged(plan.sequence):
        shared = device_count(plan.mesh, plan.heads)
        heads, kv_heads = (x.shape[-2] // shared for x in (query, key))
        check_heads(method, heads, kv_heads, device_count(plan.mesh, exchanged))
    # others move heads or keys to a device's own queries
    queries = plan.queries or not method.replicated_queries
    return plan._replace(method=method, queries=queries)


def shape_of(
    plan: ShardingPlan,
    query: Array,
    key: Array,
    value: Array,
    window: tuple[int, int] | None = None,
    layout: str = "contiguous",
) -> Shape:
    batch, heads = device_count(plan.mesh, plan.batch), device_count(plan.mesh, plan.heads)
    parts = plan.devices if plan.local else 1
    return Shape(
        math.prod(query.shape[:-3]) // batch,
        query.shape[-3] * parts,
        key.shape[-3] * parts,
        query.shape[-2] // heads,
        key.shape[-2] // heads,
        key.shape[-1],
        value.shape[-1],
        dtype=query.dtype.name,
        queries_sharded=True,
        window=window,
        layout=layout,
    )


def device_count(mesh: AbstractMesh, axes: Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def check_share(name: str, what: str, number: int, devices: int, hint: str = "") -> None:
    if number % devices:
        raise ValueError(
            f"{name}: wanted a number of {what} that is a multiple of the {devices} devices that "
            f"they are split over, got {number}{hint}"
        )


def mesh_axes_of(x: Array, axis: int) -> Axes:
    spec = jax.typeof(x).sharding.spec
    part = spec[axis] if axis < len(spec) else None
    return (part,) if isinstance(part, str) else tuple(part or ())


def check_mesh(parallel: object) -> int:
    """The number of devices that `parallel` shards over on the mesh in force. Raises as `sharding_plan` does."""
    if not isinstance(parallel, SequenceParallel):
        raise TypeError(
            f"parallel: wanted a SequenceParallel or None, got {checks.received(parallel)}"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            f"parallel: wanted a mesh in force with the axes {parallel.axes}, got none; "
            "use jax.set_mesh(mesh)"
        )
    for axis in parallel.axes + parallel.batch + parallel.heads:
        if axis not in mesh.axis_names:
            raise ValueError(
                f"parallel: wanted axes of the mesh in force, {mesh.axis_names}, got {axis!r}"
            )
        if kind_of(mesh, axis) == AxisType.Manual:
            raise ValueError(
                f"parallel: wanted axes that no surrounding jax.shard_map has taken, got {axis!r}; "
                "inside one that has taken all of them, attention and its observables alone know "
                "what to do"
            )
    return device_count(mesh, parallel.axes)


def kind_of(mesh: AbstractMesh, axis: str) -> AxisType:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis]


def is_explicit(mesh: AbstractMesh, axes: Iterable[str]) -> bool:
    return any(kind_of(mesh, axis) == AxisType.Explicit for axis in axes)


def other_explicit_axes(mesh: AbstractMesh, axes: Axes) -> Axes:
    """The explicit axes of a mesh, but `axes`, where JAX can make them automatic, and so no part of types.

    JAX allows few reshapes and sums on arrays whose types are sharded, or are by a `jax.vmap` around them.
    """
    if AxisType.Manual in mesh.axis_types:
        # the gradient of such a change fails inside a shard_map (JAX 0.8 to 0.12)
        return ()
    return tuple(x for x in mesh.axis_names if is_explicit(mesh, (x,)) and x not in axes)


def reshard_explicit(
    mesh: AbstractMesh, axes: Iterable[str], tree: Arrays, spec: PartitionSpec
) -> Arrays:
    """Arrays as a `shard_map` over `axes` takes them: resharded where their types have the axes."""
    if not is_explicit(mesh, axes):
        return tree
    return jax.tree.map(lambda x: jax.reshard(x, NamedSharding(mesh, spec)), tree)


def whole_along(x: Array, axis: int) -> Array:
    """`x` with one of its axes on every device, if its type says that it is sharded."""
    if not mesh_axes_of(x, axis):
        return x
    sharding = jax.typeof(x).sharding
    spec = (None if i == axis else part for i, part in enumerate(sharding.spec))
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def split_along(x: Array, axis: int, parallel: SequenceParallel) -> Array:
    """`x`, inside `jax.jit`, with one of its axes sharded over the devices of `parallel`, which divide it."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    if is_explicit(mesh, parallel.axes):
        spec: list[Any] = [mesh_axes_of(x, other) or None for other in range(x.ndim)]
        spec[axis] = parallel.axes
        return jax.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))
    spec = [parallel.axes if i == axis else PartitionSpec.UNCONSTRAINED for i in range(x.ndim)]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
