"""The collectives that each method and merge strategy sends, predicted.

Volumes, memory and times of the cost model all follow from these lists.
"""

from collections.abc import Iterator

from energy_attn.kernels.internal import check_choice, check_flag, received

from ..merge._abstract import AbstractMerge
from ..merge._strategies import MERGES, STRATEGIES, check_levels
from ..network._shape import Shape
from ..network._topology import Topology, all_axes
from ..network._transfer import Transfer

# What goes around a ring takes the place that a merge strategy has for the tree.
ROTATED = ("keys", "queries")
METHODS = {"tree": MERGES, "ring": ROTATED, "ulysses": (None,)}


def transfers(
    method: str,
    merge: str | None,
    shape: Shape,
    topology: Topology,
    *,
    tangent: bool = False,
) -> tuple[Transfer, ...]:
    r"""The collectives of one attention, in the order in which they run.

    Per device, for $R = B T N$ rows, $p$ devices, dtypes of $b$ bytes (arrays) and $w$ (`lse`):

    | tree, queries on all devices | sent |
    |---|---|
    | `"allreduce"` | all-reduce of $R w$, then of $R (H_v + 1) w$ |
    | `"gather"` | all-gather of $R (H_v + 1) w$ |
    | `"butterfly"` | $\lceil\log_2 p\rceil$ permutes of $R (H_v + 1) w$; odd factors send several states in some |
    | `"hierarchical"` | all-to-all and all-gather over the last axis, a butterfly of $R/f$ rows over the others |

    `"ring"` sends $p - 1$ permutes of $R (H_v + 1) w$, and `"remote"` what `"butterfly"` does (the
    kernel's copies are no collectives of the program). With sharded queries, the tree gathers them
    and folds with a reduce-scatter (`"allreduce"`) or an all-to-all (the others). A ring sends keys
    and values $p - 1$ times, or states (`"queries"`); Ulysses exchanges heads for sequence. States
    are sent in `lse`'s dtype and rounded to that of the arrays once, after the fold; the state of all
    keys (Ulysses) is rounded before it is sent, but on CPUs a state is always one array of `lse`'s
    dtype. A gather on TPUs pads the last row of energies, and over 64 chips and more of one slice XLA
    makes it an all-reduce of $p$ times the size.

    Forward mode (`jax.jvp` in query, key and value) adds, for queries on all devices, one all-reduce of
    $R (H_v + 1) w$, whatever the merge. A ring of keys goes around once more, with the directions of
    keys and values beside them. The other methods send a tangent of everything that they send, in
    numbers of $w$ bytes; a maximum has none.

    Args:
        method: `"tree"`, `"ring"` or `"ulysses"`.
        merge: for a tree the merge strategy; for a ring what rotates, `"keys"` or `"queries"`; None
            for Ulysses.
        shape: the sizes.
        topology: the mesh.
        tangent: whether to add what the tangent of the state sends, in directions of query, key and
            value.

    Returns:
        A [`Transfer`][energy_attn.distributed.cost.Transfer] for each; none over one device.

    Raises:
        TypeError: `shape` is not a `Shape`, `topology` not a `Topology`, or `tangent` not a bool.
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
    if method == "tree":
        assert merge is not None
        check_levels(merge, len(topology.links))
    if method == "ulysses":
        check_ulysses(shape, topology)
    along = check_flag("tangent", tangent)
    if topology.devices == 1:
        return ()
    if method == "ulysses":
        return tuple(_ulysses(shape, topology, along))
    if method == "ring" and merge == "keys":
        return tuple(_keys(shape, topology, along))
    # where all devices have the queries, a ring passes each device's state around, too
    strategy = STRATEGIES[merge if method == "tree" and merge else "ring"]
    if not shape.queries_sharded:
        return tuple(_folded(strategy, shape, topology, along))
    if method == "ring":
        return tuple(_queries(shape, topology, along))
    return tuple(_scattered(strategy, shape, topology, along))


def check_sizes(shape: object, topology: object) -> None:
    """Raises `TypeError` unless `shape` is a `Shape` and `topology` a `Topology`."""
    if not isinstance(shape, Shape):
        raise TypeError(f"shape: wanted a Shape, got {received(shape)}")
    if not isinstance(topology, Topology):
        raise TypeError(f"topology: wanted a Topology, got {received(topology)}")


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
    """The rows of queries on one device."""
    shards = topology.devices if shape.queries_sharded else 1
    return shape.batch * -(-shape.queries // shards) * shape.heads


def _whole_state(shape: Shape, topology: Topology) -> int:
    """Bytes of one row's state over all keys: `out` in its own dtype, unless packed."""
    if topology.platform == "cpu":
        return shape.state
    return shape.out_width * shape.bytes + shape.wide_bytes


def _widened(size: int, shape: Shape) -> int:
    """Bytes of the tangents of arrays of `size` bytes: what is only moved has them in `lse`'s dtype."""
    return size // shape.bytes * shape.wide_bytes


def _folded(
    strategy: AbstractMerge, shape: Shape, topology: Topology, tangent: bool
) -> Iterator[Transfer]:
    yield from strategy.transfers(shape, topology)
    if tangent:
        yield Transfer("all-reduce", shape.rows * shape.state, all_axes(topology))


def _scattered(
    strategy: AbstractMerge, shape: Shape, topology: Topology, tangent: bool
) -> Iterator[Transfer]:
    mine, axes = local_rows(shape, topology), all_axes(topology)
    query = mine * shape.width * shape.bytes
    yield Transfer("all-gather", query, axes)
    folds = tuple(strategy.scatter.transfers(mine * topology.devices, shape, topology))
    yield from folds
    if tangent:
        yield Transfer("all-gather", _widened(query, shape), axes)
        yield from (fold for fold in folds if fold.kind != "all-reduce")  # but for the maximum


def _keys(shape: Shape, topology: Topology, tangent: bool) -> Iterator[Transfer]:
    hops, axes = topology.devices - 1, all_axes(topology)
    for times in (1, 2) if tangent else (1,):  # with their directions the second time
        for size in kv_shard(shape, topology):
            yield from [Transfer("collective-permute", size, axes, hops)] * times
        if shape.causal:
            size = 4 * -(-shape.keys // topology.devices)
            yield Transfer("collective-permute", size, axes, hops)


def _queries(shape: Shape, topology: Topology, tangent: bool) -> Iterator[Transfer]:
    devices, rows, axes = topology.devices, local_rows(shape, topology), all_axes(topology)
    # queries with the states of the keys that they have seen; the last hop brings them home
    query, state = rows * shape.width * shape.bytes, rows * shape.state
    yield Transfer("collective-permute", query, axes, devices)
    yield Transfer("collective-permute", state, axes, devices)
    if shape.causal:
        yield Transfer("collective-permute", 4 * -(-shape.queries // devices), axes, devices)
    if tangent:
        yield Transfer("collective-permute", _widened(query, shape), axes, devices)
        yield Transfer("collective-permute", state, axes, devices)


def _ulysses(shape: Shape, topology: Topology, tangent: bool) -> Iterator[Transfer]:
    axes, rows = all_axes(topology), local_rows(shape, topology)
    sizes = rows * shape.width * shape.bytes, *kv_shard(shape, topology)
    state = Transfer("all-to-all", rows * _whole_state(shape, topology), axes)
    for size in sizes:
        yield Transfer("all-to-all", size, axes)
    yield state
    if tangent:
        for size in sizes:
            yield Transfer("all-to-all", _widened(size, shape), axes)
        yield state
