"""What each way to spread and to fold sends: the collectives of the compiled program, predicted.

The one source of the cost model: volumes, memory and times follow from these lists.
"""

from collections.abc import Callable, Iterator

from energy_attn.kernels.internal import check_choice, received

from ..network._shape import Shape
from ..network._topology import Topology
from ..network._transfer import Transfer

MERGES = ("allreduce", "gather", "butterfly", "hierarchical")
# What moves around a ring takes the place that a way to fold has for the tree.
TRAVELS = ("keys", "queries")
# Over this many chips of one slice, XLA:TPU makes of a small gather a sum of what each puts among zeros.
_MANY_CHIPS = 64
METHODS = {"tree": MERGES, "ring": TRAVELS, "ulysses": (None,)}


def transfers(
    method: str, merge: str | None, shape: Shape, topology: Topology
) -> tuple[Transfer, ...]:
    r"""The collectives of one attention, in the order in which they run.

    Per device, for $R = B T N$ rows, $p$ devices, dtypes of $b$ bytes (arrays) and $w$ (`lse`):

    | tree, queries on all devices | sent |
    |---|---|
    | `"allreduce"` | all-reduce of $R w$, then of $R (H_v + 1) w$ |
    | `"gather"` | all-gather of $R (H_v + 1) w$ |
    | `"butterfly"` | $\lceil\log_2 p\rceil$ permutes of $R (H_v + 1) w$; odd factors send several states in some |
    | `"hierarchical"` | all-to-all and all-gather over the last axis, a butterfly of $R/f$ rows over the others |

    With sharded queries, the tree gathers them and folds with a reduce-scatter (`"allreduce"`) or
    an all-to-all (the others). A ring sends keys and values $p - 1$ times, or a state around
    (`"queries"`); Ulysses exchanges heads for sequence. States that are to be folded travel in
    `lse`'s dtype, and are rounded to that of the arrays once, when they have been; that of all keys
    (Ulysses) is rounded before it is sent, but on CPUs a state is one array of `lse`'s dtype
    everywhere. A gather on TPUs fills up the last row of energies, and XLA makes of it an all-reduce
    of $p$ times the size over 64 chips and more of one slice.

    Args:
        method: `"tree"`, `"ring"` or `"ulysses"`.
        merge: for a tree the way to fold; for a ring what travels, `"keys"` or `"queries"`; None
            for Ulysses.
        shape: the sizes.
        topology: the mesh.

    Returns:
        A [`Transfer`][energy_attn.distributed.cost.Transfer] for each; none over one device.

    Raises:
        TypeError: a shape or topology that is none.
        ValueError: an unknown method or merge, `"hierarchical"` over one axis, or Ulysses where
            queries are not sharded or the devices do not divide the heads.

    Source: Tree Attention (arXiv 2408.04093), section 6.3; Ulysses (arXiv 2309.14509).

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape = cost.Shape(1, 1, 640_000, 16, 16, 128)
        >>> for t in cost.transfers("tree", "allreduce", shape, cost.dgx_h100(16)):
        ...     print(t.kind, t.bytes)
        all-reduce 64
        all-reduce 8256
    """
    check_sizes(shape, topology)
    check_choice("method", method, tuple(METHODS))
    check_choice("merge", merge, METHODS[method])
    check_levels(merge, len(topology.links))
    if method == "ulysses":
        check_ulysses(shape, topology)
    if topology.devices == 1:
        return ()
    ways: dict[str, Callable[[Shape, Topology], Iterator[Transfer]]] = {
        "allreduce": _allreduce,
        "gather": _gather,
        "butterfly": _butterfly,
        "hierarchical": _hierarchical,
        "keys": _keys,
        "queries": _queries,
    }
    if method == "ulysses":
        return tuple(_ulysses(shape, topology))
    assert merge is not None
    if method == "tree" and shape.queries_sharded:
        return tuple(_scattered(merge, shape, topology))
    return tuple(ways[merge](shape, topology))


def check_sizes(shape: object, topology: object) -> None:
    """Raises `TypeError` for a shape or topology that is none."""
    if not isinstance(shape, Shape):
        raise TypeError(f"shape: wanted a Shape, got {received(shape)}")
    if not isinstance(topology, Topology):
        raise TypeError(f"topology: wanted a Topology, got {received(topology)}")


def check_levels(merge: str | None, axes: int) -> None:
    """Raises `ValueError` for `"hierarchical"` over a single axis."""
    if merge == "hierarchical" and axes < 2:
        raise ValueError(
            "merge: wanted two or more mesh axes for 'hierarchical', slow ones first, got one"
        )


def check_ulysses(shape: Shape, topology: Topology) -> None:
    """Raises `ValueError` where heads cannot be exchanged for sequence."""
    if not shape.queries_sharded:
        raise ValueError("method: wanted sharded queries for 'ulysses', got queries_sharded=False")
    if shape.kv_heads % topology.devices:
        raise ValueError(
            f"method: wanted a number of devices that divides the {shape.kv_heads} heads of keys "
            f"for 'ulysses', got {topology.devices}"
        )


def kv_shard(shape: Shape, topology: Topology) -> tuple[int, int]:
    """Bytes of one device's keys and of its values."""
    rows = shape.batch * -(-shape.keys // topology.devices) * shape.kv_heads
    return rows * shape.width * shape.bytes, rows * shape.out_width * shape.bytes


def local_rows(shape: Shape, topology: Topology) -> int:
    """Rows of the queries that one device holds."""
    shards = topology.devices if shape.queries_sharded else 1
    return shape.batch * -(-shape.queries // shards) * shape.heads


def _all(topology: Topology) -> tuple[int, ...]:
    return tuple(range(len(topology.links)))


def _whole_state(shape: Shape, topology: Topology) -> int:
    """Bytes of one row's state over all keys: `out` in its own dtype, unless packed."""
    if topology.platform == "cpu":
        return shape.state
    return shape.out_width * shape.bytes + shape.wide_bytes


def _allreduce(shape: Shape, topology: Topology) -> Iterator[Transfer]:
    axes = _all(topology)
    yield Transfer("all-reduce", shape.rows * shape.wide_bytes, axes)
    yield Transfer("all-reduce", shape.rows * shape.state, axes)


def _gather(shape: Shape, topology: Topology) -> Iterator[Transfer]:
    size = shape.rows * shape.state
    if topology.platform == "tpu" and shape.out_width > 0:  # energies fill rows of outputs
        row = shape.out_width * shape.wide_bytes
        size = row * (shape.rows + -(-shape.rows * shape.wide_bytes // row))
    one_slice = all(link.torus for link in topology.links)
    if topology.platform == "tpu" and one_slice and topology.devices >= _MANY_CHIPS:
        yield Transfer("all-reduce", topology.devices * size, _all(topology))
    else:
        yield Transfer("all-gather", size, _all(topology))


def _butterfly(shape: Shape, topology: Topology) -> Iterator[Transfer]:
    yield from _exchanges(shape.rows * shape.state, topology, _all(topology))


def _exchanges(state: int, topology: Topology, axes: tuple[int, ...]) -> Iterator[Transfer]:
    for axis in reversed(axes):
        size = topology.links[axis].devices
        odd, have = size // (size & -size), 1
        while have < odd:  # Bruck's all-gather among neighbours
            sent = min(have, odd - have)
            yield Transfer("collective-permute", sent * state, (axis,), 1, have)
            have += sent
        while have < size:
            yield Transfer("collective-permute", state, (axis,), 1, have)
            have *= 2


def _hierarchical(shape: Shape, topology: Topology) -> Iterator[Transfer]:
    *slow, fast = _all(topology)
    devices = topology.links[fast].devices
    share = -(-shape.rows // devices)
    if devices > 1:
        yield Transfer("all-to-all", share * devices * shape.state, (fast,))
    yield from _exchanges(share * shape.state, topology, tuple(slow))
    if devices > 1:
        yield Transfer("all-gather", share * shape.state, (fast,))


def _scattered(merge: str, shape: Shape, topology: Topology) -> Iterator[Transfer]:
    axes, mine = _all(topology), local_rows(shape, topology)
    rows = mine * topology.devices
    yield Transfer("all-gather", mine * shape.width * shape.bytes, axes)
    if merge == "allreduce":
        yield Transfer("all-reduce", rows * shape.wide_bytes, axes)
        yield Transfer("reduce-scatter", rows * shape.state, axes)
    else:
        yield Transfer("all-to-all", rows * shape.state, axes)


def _keys(shape: Shape, topology: Topology) -> Iterator[Transfer]:
    hops, axes = topology.devices - 1, _all(topology)
    for size in kv_shard(shape, topology):
        yield Transfer("collective-permute", size, axes, hops)
    if shape.causal:
        yield Transfer("collective-permute", 4 * -(-shape.keys // topology.devices), axes, hops)


def _queries(shape: Shape, topology: Topology) -> Iterator[Transfer]:
    devices, rows, axes = topology.devices, local_rows(shape, topology), _all(topology)
    if not shape.queries_sharded:  # all have the queries: what goes around is each device's state
        yield Transfer("collective-permute", rows * shape.state, axes, devices - 1)
        return
    # queries with the states of the keys that they have seen; the last hop brings them home
    yield Transfer("collective-permute", rows * shape.width * shape.bytes, axes, devices)
    yield Transfer("collective-permute", rows * shape.state, axes, devices)
    if shape.causal:
        yield Transfer("collective-permute", 4 * -(-shape.queries // devices), axes, devices)


def _ulysses(shape: Shape, topology: Topology) -> Iterator[Transfer]:
    axes, rows = _all(topology), local_rows(shape, topology)
    for size in (rows * shape.width * shape.bytes, *kv_shard(shape, topology)):
        yield Transfer("all-to-all", size, axes)
    yield Transfer("all-to-all", rows * _whole_state(shape, topology), axes)
