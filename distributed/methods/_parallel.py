"""`parallel=`: how a user shards a sequence, and the plan of a call, from array types and `parallel=`."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.core
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from energy_attn.kernels.internal import checks, mesh_axes

from ..cost._interconnects import usual_topology
from ..cost._network import Topology
from ..cost._shape import Shape
from ..merge._abstract import Axes
from ..merge._across import check_topology
from ..merge._strategies import MergeOption, check_merge
from ._abstract import AbstractMethod, check_heads
from ._choice import METHOD_OPTIONS, MethodOption, choose_method, method_by_name
from ._halo import runs
from ._tree import Tree

Arrays = TypeVar("Arrays")

# The hint of an error in a call under a `jax.vmap`, which has one row.
_MAPPED = (
    "; rows that jax.vmap maps over are split by a jax.shard_map over all axes around it, as in "
    "jax.shard_map(jax.vmap(model), in_specs=jax.P('data', 'device'), ...), without batch="
)


@dataclasses.dataclass(frozen=True, init=False)
class SequenceParallel:
    r"""How an attention is sharded along its sequence over a mesh.

    Each device holds a shard of keys and values. Queries are sharded in the same way where there are as many as keys
    (training), and replicated otherwise (decoding), unless `queries_sharded` says otherwise. On explicit mesh axes the
    type of the query decides, and so it does inside a `jax.shard_map` over the axes, where arrays are shards.

    Attributes:
        axes: the mesh axes that the sequence is sharded over, slow ones first.
        method: a name, or a method with options, as `methods.Ring(rotate="keys")`.
            [`"tree"`][energy_attn.distributed.methods.Tree]: local states, then one reduction.
            [`"ring"`][energy_attn.distributed.methods.Ring]: keys or queries go around all devices.
            `"ulysses"`: heads are exchanged for sequence.
            `"hybrid"`: heads for sequence along the last axis, and keys around a ring over the others.
            `"gather"`: keys are gathered piece by piece.
            `"auto"`: the tree for replicated queries, else the fastest by
            [`cost`][energy_attn.distributed.cost.choose_method].
        merge: the strategy by which a tree folds, a name of
            the table in [choosing](../choosing.md#what-each-strategy-sends); see
            [`merge_across`][energy_attn.distributed.merge_across]. `"auto"`: the fastest by `cost`.
        layout: the order of the sequence over the devices: `"contiguous"`, `"striped"`
            or `"zigzag"`; see [`shard_sequence`][energy_attn.distributed.shard_sequence]. Queries in
            another order need `query_positions`.
        topology: latency and bandwidth of the axes, for `"auto"`; None: the usual ones of
            the platform in use.
        queries_sharded: whether queries are sharded; None: where there are as many as keys. Set it
            for a chunk of a prompt that continues from a cache. Equally many queries and keys are in the order of
            `layout` even if this is False; for queries in the order of the text, pass `query_positions`. Inside a
            `jax.shard_map`, replicated queries are in the order of the text.
        heads: other mesh axes, over which the heads are sharded, in a cache too: for tensor
            parallelism. Heads are independent, so this adds no communication.
        batch: other mesh axes, over which the rows of the batch are sharded, in a cache too: for data
            parallelism. Name automatic axes, as XLA may gather rows that are sharded over axes without a name here;
            explicit axes are in the types of the arrays. A `jax.shard_map` over all axes, around a `jax.vmap`, shards
            the rows that the `vmap` maps over.

    Raises:
        TypeError: `axes`, `heads` or `batch` are not names, `method` neither a name nor a method, `topology` not a
            topology, or `queries_sharded` not a boolean.
        ValueError: axes that repeat, an unknown method, merge or layout, or `"hierarchical"` or
            `"hybrid"` over one axis.

    Source: Tree Attention (arXiv 2408.04093), section 5.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> from energy_attn.distributed import SequenceParallel, make_mesh
        >>> q, k = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 64, 2, 4))
        >>> with jax.set_mesh(make_mesh((jax.device_count(),), ("device",))):
        ...     ea.attention(q, k, k, parallel=SequenceParallel("device")).shape
        (1, 1, 2, 4)
    """

    axes: tuple[str, ...]
    method: str | AbstractMethod
    merge: str
    layout: str
    topology: Topology | None
    queries_sharded: bool | None
    heads: tuple[str, ...]
    batch: tuple[str, ...]

    def __init__(
        self,
        axes: str | Sequence[str] = ("node", "device"),
        method: MethodOption | AbstractMethod = "auto",
        merge: MergeOption = "auto",
        layout: Literal["contiguous", "striped", "zigzag"] = "contiguous",
        *,
        topology: Topology | None = None,
        queries_sharded: bool | None = None,
        heads: str | Sequence[str] = (),
        batch: str | Sequence[str] = (),
    ) -> None:
        names = checks.check_names("axes", axes, "mesh axes")
        checks.check_choice("layout", layout, ("contiguous", "striped", "zigzag"))
        check_merge(merge, len(names))
        check_topology(topology, len(names))
        if not isinstance(method, AbstractMethod):
            checks.check_choice("method", method, (*METHOD_OPTIONS, "auto"))
        elif isinstance(method, Tree):
            for name, x, usual in (("merge", merge, "auto"), ("topology", topology, None)):
                if x not in (usual, getattr(method, name)):
                    raise ValueError(
                        f"{name}: wanted {usual!r} with a methods.Tree, which has its own, got {x!r}"
                    )
            merge, topology = method.merge, method.topology
        if method != "auto":  # the choice considers only methods that can use the axes
            check_method(method).check_axes(names)
        if queries_sharded is not None:
            checks.check_flag("queries_sharded", queries_sharded)
        fields: dict[str, Any] = {"axes": names, "method": method, "merge": merge}
        fields |= {"layout": layout, "topology": topology, "queries_sharded": queries_sharded}
        taken = set(names)
        for name, option in {"batch": batch, "heads": heads}.items():
            none = isinstance(option, (tuple, list)) and not option
            fields[name] = () if none else checks.check_names(name, option, "mesh axes")
            if taken.intersection(fields[name]):
                raise ValueError(
                    f"{name}: wanted other mesh axes than {sorted(taken)}, got {fields[name]}"
                )
            taken.update(fields[name])
        vars(self).update(fields)


def check_method(method: object) -> AbstractMethod:
    if isinstance(method, AbstractMethod):
        return method
    if not isinstance(method, str):
        raise TypeError(
            f"method: wanted a name or one of distributed.methods, as methods.Ring(), got {checks.received(method)}"
        )
    checks.check_choice("method", method, METHOD_OPTIONS)
    return method_by_name(method)


class ShardingPlan(NamedTuple):
    """The mesh axes over which an attention is sharded, and the method; static."""

    # Devices exchange data along `sequence` only: each attends for its own batch rows and heads.
    mesh: AbstractMesh
    batch: Axes
    sequence: Axes
    heads: Axes
    queries: bool  # whether they are sharded along the sequence, as keys are
    method: AbstractMethod
    merge: str
    topology: Topology | None
    local: bool = False  # whether the call is inside a `jax.shard_map`, where arrays are shards

    @property
    def axes(self) -> Axes:
        return self.batch + self.sequence + self.heads

    @property
    def devices(self) -> int:
        return device_count(self.mesh, self.sequence)


def sharding_plan(
    parallel: SequenceParallel | None, query: Array, key: Array, value: Array
) -> ShardingPlan | None:
    """The plan of a checked call, from `parallel` and from the types of the arrays; None if nothing is sharded.

    Raises as `check_mesh`, and `ValueError` if the rows or heads cannot be divided over their devices.
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
    # a surrounding `jax.vmap` may have sharded the axis that it maps over, over explicit mesh axes
    if not batch + sequence + heads and not other_explicit_axes(mesh, ()):
        return None
    if mesh.empty:
        raise ValueError(
            f"key: wanted the mesh in force that its type is split over, {jax.typeof(key)}, "
            "got none; use jax.set_mesh(mesh)"
        )
    # the type of the query decides, then `queries_sharded`, then the number of queries
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
    """Whether queries inside `jax.shard_map` are sharded, by the types of the arrays."""
    if set(axes) <= mesh_axes.varying_axes(key) | mesh_axes.varying_axes(query):
        return not set(axes).isdisjoint(mesh_axes.varying_axes(query))
    return query.shape[-3] == key.shape[-3]  # with `check_vma=False` types do not vary


def by_method(
    method: str | AbstractMethod, plan: ShardingPlan, query: Array, key: Array, value: Array
) -> ShardingPlan:
    # replicated queries decode: a tree sends least
    if method == "auto" and plan.queries:
        shape = shape_of(plan, query, key, value)
        method = choose_method(shape, plan.topology or usual_topology(plan.mesh, plan.sequence))
    elif method == "auto":
        method = "tree"
    if isinstance(method, str):
        method = method_by_name(method, plan.merge, plan.topology)
    if exchanged := method.exchanged(plan.sequence):
        shared = device_count(plan.mesh, plan.heads)
        heads, kv_heads = (x.shape[-2] // shared for x in (query, key))
        check_heads(method, heads, kv_heads, device_count(plan.mesh, exchanged))
    # the other methods bring heads or keys to a device's own queries
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
    parts = plan.devices if plan.local else 1  # inside a `jax.shard_map` arrays are shards
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
    """The number of devices of `parallel` along the sequence; raises unless the mesh in force has its axes."""
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
    """The explicit axes of a mesh, other than `axes`, that can be made automatic and so no part of types."""
    # JAX allows few reshapes and sums of arrays whose types are sharded, also by a surrounding `jax.vmap`.
    if AxisType.Manual in mesh.axis_types:
        # The gradient of `auto_axes` fails inside a shard_map in JAX 0.8 to 0.12, as it does around a scan:
        # https://github.com/jax-ml/jax/issues/33029.
        return ()
    return tuple(x for x in mesh.axis_names if is_explicit(mesh, (x,)) and x not in axes)


def reshard_explicit(
    mesh: AbstractMesh, axes: Iterable[str], tree: Arrays, spec: PartitionSpec
) -> Arrays:
    # a `shard_map` takes arrays whose types name its explicit axes as its specs do
    if not is_explicit(mesh, axes):
        return tree
    return jax.tree.map(lambda x: jax.reshard(x, NamedSharding(mesh, spec)), tree)


def whole_along(x: Array, axis: int) -> Array:
    """Gathers an axis of an array whose type is sharded along it."""
    if not mesh_axes_of(x, axis):
        return x
    sharding = jax.typeof(x).sharding
    spec = (None if i == axis else part for i, part in enumerate(sharding.spec))
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def split_along(x: Array, axis: int, parallel: SequenceParallel) -> Array:
    """Shards an axis over the devices of `parallel`, which divide it; inside `jax.jit`."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    if is_explicit(mesh, parallel.axes):
        spec: list[Any] = [mesh_axes_of(x, other) or None for other in range(x.ndim)]
        spec[axis] = parallel.axes
        return jax.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))
    spec = [parallel.axes if i == axis else PartitionSpec.UNCONSTRAINED for i in range(x.ndim)]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def sequence_order(length: int, parallel: SequenceParallel, name: str) -> np.ndarray:
    """The token at each place of a layout, int32 `[length]`; raises as `check_mesh`, or if the length does not fit."""
    devices = check_mesh(parallel)
    pieces = 2 * devices if parallel.layout == "zigzag" else devices
    if length % pieces:
        raise ValueError(
            f"{name}: wanted a multiple of {pieces} for the layout {parallel.layout!r} over "
            f"{devices} devices, got {length}"
        )
    parts = runs(parallel.layout, length, devices) or ()
    tokens = [x.position[:, None] + x.stride * np.arange(x.length[0]) for x in parts]
    return np.concatenate(tokens, 1).reshape(-1).astype(np.int32)
