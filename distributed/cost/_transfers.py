"""The collectives that each method and merge strategy sends, predicted.

Volumes, memory and times of the cost model all follow from these lists.
"""

import math
from collections.abc import Iterator, Sequence

from energy_attn.kernels.internal import check_choice, check_flag, received

from ..merge._abstract import AbstractMerge
from ..merge._strategies import MERGES, STRATEGIES, check_levels
from ..network._shape import Shape
from ..network._shares import key_copies, pieces
from ..network._topology import Topology, all_axes
from ..network._transfer import Transfer

# What goes around a ring takes the place that a merge strategy has for the tree.
ROTATED = ("keys", "queries")
METHODS = {
    "tree": MERGES,
    "ring": ROTATED,
    **{method: (None,) for method in ("ulysses", "hybrid", "gather")},
}


def transfers(
    method: str,
    merge: str | None,
    shape: Shape,
    topology: Topology,
    *,
    tangent: bool = False,
    gradient: bool = False,
    narrow_gradients: bool = False,
) -> tuple[Transfer, ...]:
    r"""The collectives of one attention, in the order in which they run.

    Per device, for $R = B T N$ rows, $p$ devices, dtypes of $b$ bytes (arrays) and $w$ (`lse`):

    | tree, queries on all devices | sent |
    |---|---|
    | `"allreduce"` | all-reduce of $R w$, then of $R (H_v + 1) w$ |
    | `"gather"` | all-gather of $R (H_v + 1) w$ |
    | `"butterfly"` | $\lceil\log_2 p\rceil$ permutes of $R (H_v + 1) w$; odd factors send several states in some |
    | `"halving"` | $2 \lceil\log_2 p\rceil + 1$ permutes, of $\frac{2p-1}{p} R (H_v + 1) w$ in all |
    | `"hierarchical"` | all-to-all and all-gather over the last axis, a butterfly of $R/f$ rows over the others |
    | `"ring"` | $p - 1$ permutes of $R (H_v + 1) w$ |

    With sharded queries, the tree gathers them and folds with a reduce-scatter (`"allreduce"`) or
    an all-to-all (the others). A ring sends keys and values $p - 1$ times, or states (`"queries"`);
    for a `shape` that is `causal`, positions of what goes around or is gathered are gathered once.
    Ulysses exchanges heads for sequence, with keys in copies where the devices do not divide their
    heads; `"hybrid"` does so along the last axis, and passes the keys of a device's heads around
    the others; `"gather"` gathers keys and values in up to 8 pieces. States are sent in `lse`'s
    dtype and rounded to that of the arrays once, after the fold; the state of all keys (Ulysses) is
    rounded before it is sent, but on CPUs a state is always one array of `lse`'s dtype. A gather on
    TPUs pads the last row of energies, and over 64 chips and more of one slice XLA makes it an
    all-reduce of $p$ times the size. Beside an automatic mesh axis that is not named to the
    attention (`batch=`, `heads=`), over which XLA may split states, TPUs gather `out` and `lse` one
    by one.

    Forward mode (`jax.jvp` in query, key and value) adds, for queries on all devices, one all-reduce of
    $R (H_v + 1) w$, whatever the merge. A ring of keys goes around once more, with the directions of
    keys and values beside them, and so does a gather. The other methods send a tangent of everything that they send, in
    numbers of $w$ bytes; a maximum has none.

    Reverse mode (`jax.vjp`) of a ring of keys goes around once more, too, with gradients of keys and values
    one hop behind, $p - 1$ times in numbers of $w$ bytes and once, home, of $b$; and Ulysses exchanges back in
    numbers of $w$ bytes.

    Args:
        method: `"tree"`, `"ring"`, `"ulysses"`, `"hybrid"` or `"gather"`.
        merge: for a tree the merge strategy; for a ring what rotates, `"keys"` or `"queries"`; None
            for the others.
        shape: the sizes.
        topology: the mesh.
        tangent: whether to add what the tangent of the state sends, in directions of query, key and
            value.
        gradient: whether to add what the gradient in query, key and value sends.
        narrow_gradients: whether a ring sends gradients of keys and values in numbers of $b$ bytes all
            the way, as with the argument of this name of [`ring_attention`][energy_attn.distributed.ring_attention].

    Returns:
        A [`Transfer`][energy_attn.distributed.cost.Transfer] for each; none over one device.

    Raises:
        TypeError: `shape` is not a `Shape`, `topology` not a `Topology`, or a flag not a bool.
        ValueError: an unknown method or merge, a gradient beside a tangent, or of a tree, a gather or a
            ring of queries, which the model does not have, `"hierarchical"` or `"hybrid"` over one axis, or
            `"ulysses"`, `"hybrid"` or `"gather"` where queries are not sharded or the devices cannot
            share the heads out.

    Source: Tree Attention (arXiv 2408.04093), section 6.3; Ulysses (arXiv 2309.14509); USP (arXiv
        2405.07719).

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
    check_method(method, len(topology.links))
    if method == "tree":
        assert merge is not None
        check_levels(merge, len(topology.links))
    if METHODS[method] == (None,):
        check_sharded(method, shape, topology)
    along = check_flag("tangent", tangent)
    if check_flag("gradient", gradient):
        check_gradient(method, merge, along)
    narrow = check_flag("narrow_gradients", narrow_gradients)
    back = (shape.bytes if narrow else shape.wide_bytes) if gradient else 0
    if topology.devices == 1:
        return ()
    if method in ("ulysses", "hybrid"):
        return tuple(_exchanged(method, shape, topology, along, back))
    if method == "gather":
        return tuple(_gathered(shape, topology, along))
    if method == "ring" and merge == "keys":
        return tuple(_keys(shape, topology, along, back))
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


def check_gradient(method: str, merge: str | None, tangent: bool) -> None:
    """Raises `ValueError` for a gradient that the model does not have."""
    if tangent:
        raise ValueError("gradient: wanted False beside tangent=True, got True")
    if method in ("tree", "gather") or merge == "queries":
        raise ValueError(
            f"gradient: wanted False for {method!r} with merge={merge!r}, got True; the model has that of "
            "the ring of keys, of 'ulysses' and of 'hybrid'"
        )


def least_axes(method: str) -> int:
    """How many mesh axes a method needs."""
    return 2 if method == "hybrid" else 1


def check_method(method: str, axes: int) -> None:
    """Raises `ValueError` where a method needs more mesh axes."""
    if axes < least_axes(method):
        raise ValueError(
            "method: wanted two or more mesh axes for 'hybrid', slow ones first, got one; over one, "
            "there are 'ulysses' and 'ring'"
        )


def check_sharded(method: str, shape: Shape, topology: Topology) -> None:
    """Raises `ValueError` where a method wants queries of its own on each device, or other heads."""
    if not shape.queries_sharded:
        raise ValueError(
            f"method: wanted sharded queries for {method!r}, got queries_sharded=False"
        )
    if not shares_heads(method, shape, topology):
        raise ValueError(
            f"method: wanted a number of devices that can share {shape.heads} heads of queries and "
            f"{shape.kv_heads} of keys for {method!r}, got {_exchanging(method, topology)}"
        )


def shares_heads(method: str, shape: Shape, topology: Topology) -> bool:
    """Whether the heads allow a method over the devices of a mesh."""
    if method not in ("ulysses", "hybrid"):
        return True
    devices = _exchanging(method, topology)
    return key_copies(shape.heads, shape.kv_heads, devices) is not None


def _exchanging(method: str, topology: Topology) -> int:
    """How many devices exchange heads for sequence."""
    return topology.links[-1].devices if method == "hybrid" else topology.devices


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


def _keys(shape: Shape, topology: Topology, tangent: bool, back: int) -> Iterator[Transfer]:
    axes = all_axes(topology)
    yield from _positions(shape.keys, shape, topology, axes)
    yield from _around(kv_shard(shape, topology), shape, topology, axes, tangent, back)


def _around(
    sizes: Sequence[int],
    shape: Shape,
    topology: Topology,
    axes: tuple[int, ...],
    tangent: bool,
    back: int,
) -> Iterator[Transfer]:
    """Keys and values of these sizes on their way around a ring, and gradients in `back` bytes, unless 0."""
    hops = math.prod(topology.links[axis].devices for axis in axes) - 1
    for size in sizes if hops else ():
        yield Transfer("collective-permute", size, axes, hops)
        if (tangent or back) and hops > 1:  # again; XLA merges an only hop with the same one before
            yield Transfer("collective-permute", size, axes, hops)
        if tangent:  # directions
            yield Transfer("collective-permute", size, axes, hops)
        if back:  # gradients behind their keys, and home
            yield Transfer("collective-permute", size // shape.bytes * back, axes, hops)
            yield Transfer("collective-permute", size, axes)


def _positions(
    length: int, shape: Shape, topology: Topology, axes: tuple[int, ...]
) -> Iterator[Transfer]:
    """What is gathered at the start, where each device gives the positions of its own part."""
    if shape.causal:
        yield Transfer("all-gather", 4 * -(-length // topology.devices), axes)


def _queries(shape: Shape, topology: Topology, tangent: bool) -> Iterator[Transfer]:
    devices, rows, axes = topology.devices, local_rows(shape, topology), all_axes(topology)
    # queries with the states of the keys that they have seen; the last hop brings them home
    query, state = rows * shape.width * shape.bytes, rows * shape.state
    yield from _positions(shape.queries, shape, topology, axes)
    yield Transfer("collective-permute", query, axes, devices)
    yield Transfer("collective-permute", state, axes, devices)
    if tangent:
        yield Transfer("collective-permute", _widened(query, shape), axes, devices)
        yield Transfer("collective-permute", state, axes, devices)


def _exchanged(
    method: str, shape: Shape, topology: Topology, tangent: bool, back: int
) -> Iterator[Transfer]:
    """Heads exchanged for sequence along all axes, or along the last, and keys around the others."""
    axes = all_axes(topology)
    around, last = (axes[:-1], axes[-1:]) if method == "hybrid" else ((), axes)
    devices, rows = _exchanging(method, topology), local_rows(shape, topology)
    copies = key_copies(shape.heads, shape.kv_heads, devices) or 1
    query = rows * shape.width * shape.bytes
    keys = [copies * size for size in kv_shard(shape, topology)]
    state = Transfer("all-to-all", rows * _whole_state(shape, topology), last)
    if devices > 1:
        yield from _positions(shape.queries, shape, topology, last)
        for size in (query, *keys):
            yield Transfer("all-to-all", size, last)
    yield from _positions(shape.keys, shape, topology, axes)
    yield from _around(keys, shape, topology, around, tangent, back)
    if devices > 1:
        yield state
    if devices > 1 and (tangent or back):  # an exchange's transpose is the one that undoes it
        for size in (query, *keys):
            yield Transfer("all-to-all", _widened(size, shape), last)
        yield state


def _gathered(shape: Shape, topology: Topology, tangent: bool) -> Iterator[Transfer]:
    axes = all_axes(topology)
    count = pieces(-(-shape.keys // topology.devices))
    yield from _positions(shape.keys, shape, topology, axes)
    for size in kv_shard(shape, topology):
        # for a tangent again, but for the first piece, whose gathers XLA merges; and directions
        counts = (count, count - 1, count) if tangent else (count,)
        yield from (Transfer("all-gather", size // count, axes, n) for n in counts if n)
