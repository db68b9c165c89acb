"""The collectives that each method and merge strategy sends, predicted.

Volumes, memory and times of the cost model all follow from these lists.
"""

from collections.abc import Iterator

from energy_attn.kernels.internal import check_choice, received

from ..merge._abstract import AbstractMerge
from ..merge._strategies import MERGES, STRATEGIES, check_levels
from ..network._shape import Shape
from ..network._topology import Topology, all_axes
from ..network._transfer import Transfer

# What goes around a ring takes the place that a merge strategy has for the tree.
ROTATED = ("keys", "queries")
METHODS = {"tree": MERGES, "ring": ROTATED, "ulysses": (None,)}


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

    `"ring"` sends $p - 1$ permutes of $R (H_v + 1) w$, and `"remote"` what `"butterfly"` does (the
    kernel's copies are no collectives of the program). With sharded queries, the tree gathers them
    and folds with a reduce-scatter (`"allreduce"`) or an all-to-all (the others). A ring sends keys
    and values $p - 1$ times, or states (`"queries"`); Ulysses exchanges heads for sequence. States
    are sent in `lse`'s dtype and rounded to that of the arrays once, after the fold; the state of all
    keys (Ulysses) is rounded before it is sent, but on CPUs a state is always one array of `lse`'s
    dtype. A gather on TPUs pads the last row of energies, and over 64 chips and more of one slice XLA
    makes it an all-reduce of $p$ times the size.

    Args:
        method: `"tree"`, `"ring"` or `"ulysses"`.
        merge: for a tree the merge strategy; for a ring what rotates, `"keys"` or `"queries"`; None
            for Ulysses.
        shape: the sizes.
        topology: the mesh.

    Returns:
        A [`Transfer`][energy_attn.distributed.cost.Transfer] for each; none over one device.

    Raises:
        TypeError: `shape` is not a `Shape`, or `topology` not a `Topology`.
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
    if topology.devices == 1:
        return ()
    if method == "ulysses":
        return tuple(_ulysses(shape, topology))
    if method == "ring":
        return tuple((_keys if merge == "keys" else _queries)(shape, topology))
    assert merge is not None
    if shape.queries_sharded:
        return tuple(_scattered(STRATEGIES[merge], shape, topology))
    return tuple(STRATEGIES[merge].transfers(shape, topology))


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


def _scattered(strategy: AbstractMerge, shape: Shape, topology: Topology) -> Iterator[Transfer]:
    mine = local_rows(shape, topology)
    yield Transfer("all-gather", mine * shape.width * shape.bytes, all_axes(topology))
    yield from strategy.scatter.transfers(mine * topology.devices, shape, topology)


def _keys(shape: Shape, topology: Topology) -> Iterator[Transfer]:
    hops, axes = topology.devices - 1, all_axes(topology)
    for size in kv_shard(shape, topology):
        yield Transfer("collective-permute", size, axes, hops)
    if shape.causal:
        yield Transfer("collective-permute", 4 * -(-shape.keys // topology.devices), axes, hops)


def _queries(shape: Shape, topology: Topology) -> Iterator[Transfer]:
    devices, rows, axes = topology.devices, local_rows(shape, topology), all_axes(topology)
    if not shape.queries_sharded:  # all have the queries: what goes around is each device's state
        yield from STRATEGIES["ring"].transfers(shape, topology)
        return
    # queries with the states of the keys that they have seen; the last hop brings them home
    yield Transfer("collective-permute", rows * shape.width * shape.bytes, axes, devices)
    yield Transfer("collective-permute", rows * shape.state, axes, devices)
    if shape.causal:
        yield Transfer("collective-permute", 4 * -(-shape.queries // devices), axes, devices)


def _ulysses(shape: Shape, topology: Topology) -> Iterator[Transfer]:
    axes, rows = all_axes(topology), local_rows(shape, topology)
    for size in (rows * shape.width * shape.bytes, *kv_shard(shape, topology)):
        yield Transfer("all-to-all", size, axes)
    yield Transfer("all-to-all", rows * _whole_state(shape, topology), axes)
