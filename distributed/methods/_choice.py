"""The list of sharding methods, and the choice among them by the cost model."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from energy_attn.kernels.internal import CallPolicy

from ..cost._network import Derivatives, Topology, Transfers, total_seconds
from ..cost._shape import Shape, check_sizes, key_copies, kv_shard, local_rows
from ._abstract import AbstractMethod, exchanging
from ._halo import Meets, halo, halo_of_window, has_groups
from ._reproducible import Reproducible
from ._ring import Gather, HaloExchange, Ring
from ._tree import Tree
from ._ulysses import GroupHaloExchange, Hybrid, Ulysses

# Type checkers need a literal; a test compares it with the list below.
MethodName = Literal["tree", "ring", "ulysses", "hybrid", "gather"]
MethodOption = MethodName | Literal["auto"]

METHODS: dict[str, type[AbstractMethod]] = {
    kind.name: kind for kind in (Tree, Ring, Ulysses, Hybrid, Gather, Reproducible)
}
METHOD_OPTIONS = tuple(name for name, kind in METHODS.items() if kind.is_option)
# The methods of the cost model, by its `method` and its `merge`.
VARIANTS: Mapping[str, Mapping[str | None, AbstractMethod]] = {
    name: kind.variants() for name, kind in METHODS.items()
}


def method_by_name(
    name: str, merge: Any = "auto", topology: Topology | None = None
) -> AbstractMethod:
    kind = METHODS[name]
    return kind(merge, topology) if kind is Tree else kind()


def method_of_call(policy: CallPolicy, method: AbstractMethod) -> AbstractMethod:
    return method if policy.method is None else METHODS[policy.method]()


def choose_merge(shape: Shape, topology: Topology) -> str:
    """The merge strategy with the least time by the model: the one of `merge="auto"`.

    Args:
        shape: the sizes.
        topology: the mesh.

    Returns:
        Its name, of equally fast ones the first in `MERGES`; never `"ring"`, which a gather beats.

    Raises:
        TypeError: `shape` is not a `Shape`, or `topology` not a `Topology`.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape = cost.Shape(1, 1, 32_768, 16, 16, 64, dtype="float32")
        >>> cost.choose_merge(shape, cost.topology("ethernet", nodes=8))
        'butterfly'
    """
    check_sizes(shape, topology)
    return str(_by_time("tree", shape, topology)[0][0])


def choose_method(shape: Shape, topology: Topology) -> str:
    """The method for an attention: the one of `method="auto"`.

    For replicated queries (decode) it is the tree, which sends nothing that grows with the keys.
    For sharded queries it is the method with the least time by the model, each with its best merge,
    among the methods that need at most twice the memory of the smallest. (A tree holds the states of all
    queries on every device, a gather two pieces of all keys.) Ulysses and the hybrid are considered if the
    devices can divide the heads.

    Args:
        shape: the sizes.
        topology: the mesh.

    Returns:
        Its name, of equally fast ones the first in the list of `SequenceParallel`.

    Raises:
        TypeError: `shape` is not a `Shape`, or `topology` not a `Topology`.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape = cost.Shape(1, 1, 640_000, 32, 8, 128)
        >>> cost.choose_method(shape, cost.topology("dgx_h100", (8,), nodes=16))
        'tree'
    """
    check_sizes(shape, topology)
    if not shape.queries_sharded:
        return "tree"
    ranked = {name: _by_time(name, shape, topology) for name in VARIANTS}
    fastest = {name: methods[0][1] for name, methods in ranked.items() if methods}
    # time alone would choose a gather of all keys where memory is short
    held = {name: memory_of(x, shape, topology) for name, x in fastest.items()}
    lean = [name for name in fastest if held[name] <= 2 * min(held.values())]
    return min(lean, key=lambda name: _seconds(fastest[name], shape, topology))


def halo_method(
    method: AbstractMethod, shape: Shape, devices: int, shared: int, meets: Meets | None = None
) -> AbstractMethod:
    """The exchange of a halo if the window leaves few keys of other devices; else `method`.

    The sequence is sharded over `devices`, and groups of `shared` devices exchange heads.
    """
    sizes = shape.queries, shape.keys
    if shape.window is None or not shape.queries_sharded:
        return method
    # a group acts as one device only if its devices hold consecutive tokens
    if shared > 1 and not has_groups(shape.layout, *sizes, devices):
        return method
    find = halo if meets is not None else halo_of_window
    keys = find(shape.layout, devices // shared, *sizes, shape.window, meets)
    if keys is None or not method.takes_halo:
        return method
    return GroupHaloExchange(keys) if isinstance(method, Hybrid) else HaloExchange(keys)


def check_sharded(method: AbstractMethod, shape: Shape, topology: Topology) -> None:
    if not shape.queries_sharded:
        raise ValueError(
            f"method: wanted sharded queries for {method.name!r}, got queries_sharded=False"
        )
    devices = exchanging(method, topology)
    if devices > 1 and key_copies(shape.heads, shape.kv_heads, devices) is None:
        raise ValueError(
            f"method: wanted a number of devices that can share {shape.heads} heads of queries and "
            f"{shape.kv_heads} of keys for {method.name!r}, got {devices}"
        )


def _by_time(
    name: str, shape: Shape, topology: Topology
) -> list[tuple[str | None, AbstractMethod]]:
    """The variants of a method that `"auto"` considers, the fastest first."""
    variants = [x for x in VARIANTS[name].items() if _is_choice(x[1], shape, topology)]
    return sorted(variants, key=lambda x: _seconds(x[1], shape, topology))


def _is_choice(method: AbstractMethod, shape: Shape, topology: Topology) -> bool:
    try:
        method.check_axes(topology.axes)
        if not method.replicated_queries:
            check_sharded(method, shape, topology)
    except ValueError:
        return False
    return method.is_automatic


def sent_transfers(
    method: AbstractMethod,
    shape: Shape,
    topology: Topology,
    derivatives: Derivatives = Derivatives(),  # noqa: B008
) -> Transfers:
    """The transfers of a method, or of its exchange of a halo; none over one device."""
    if topology.devices == 1:
        return iter(())
    method = halo_method(method, shape, topology.devices, exchanging(method, topology))
    return method.transfers(shape, topology, derivatives)


def _seconds(method: AbstractMethod, shape: Shape, topology: Topology) -> float:
    return total_seconds(sent_transfers(method, shape, topology), topology)


def memory_of(method: AbstractMethod, shape: Shape, topology: Topology) -> int:
    states = method.state_rows(shape, topology) * (shape.state + shape.lse_bytes)
    query = local_rows(shape, topology) * shape.width * shape.bytes
    arriving = 0
    for transfer in sent_transfers(method, shape, topology):
        devices = math.prod(topology.links[axis].devices for axis in transfer.axes)
        buffers = min(transfer.count, method.receive_buffers)
        part = {"all-gather": devices * buffers, "all-to-all": 1, "collective-permute": buffers}
        arriving += part.get(transfer.kind, 0) * transfer.bytes  # reductions work in place
    return sum(kv_shard(shape, topology)) + query + states + arriving
