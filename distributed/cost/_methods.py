"""The predicted collectives of each method, from which volumes, memory and times follow."""

import math
from collections.abc import Iterator, Sequence
from typing import TypedDict, Unpack

from energy_attn.kernels.internal import (
    check_choice,
    check_flag,
    check_options,
    received,
)

from ..merge._strategies import MERGES, check_levels
from ._halo import Halo, halo, has_groups
from ._merges import FOLDED, exchanged, summed
from ._reproducible import reproduced
from ._shape import Shape, key_copies, pieces
from ._topology import Topology
from ._transfer import Transfer

# For a ring, `merge` names the arrays that go around; for the tree, the merge strategy.
ROTATED = ("keys", "queries")
METHODS = {
    "tree": MERGES,
    "ring": ROTATED,
    **{method: (None,) for method in ("ulysses", "hybrid", "gather", "reproducible")},
}


class Derivatives(TypedDict, total=False):
    """The derivatives of an attention that are counted, too; none by default."""

    tangent: bool
    """Whether to add what the tangent of the state sends, in directions of query, key and value."""

    gradient: bool
    """Whether to add what the gradient in query, key and value sends."""


def transfers(
    method: str,
    merge: str | None,
    shape: Shape,
    topology: Topology,
    **derivatives: Unpack[Derivatives],
) -> tuple[Transfer, ...]:
    r"""The collectives of one attention, in the order in which they run.

    With $p$ devices, $R = B T N$ rows on each, and states of $R (H_v + 1)$ numbers in `lse`'s dtype:

    $$\text{allreduce, gather: } 1 \text{ collective of a state}, \qquad
      \text{butterfly: } \lceil\log_2 p\rceil \text{ permutes of one}, \qquad
      \text{halving: } \tfrac{2p-1}{p} \text{ of one in } 2 \lceil\log_2 p\rceil + 1$$

    and $\frac{p-1}{p} B S K (H + H_v)$ numbers of keys and values around a ring, or gathered.
    [Choosing](../choosing.md#what-each-strategy-sends) has a table of all of them and of their derivatives. A gather
    on TPUs pads the last row of energies, and over 64 chips and more of one slice XLA makes it an all-reduce of $p$
    times the size.

    Args:
        method: `"tree"`, `"ring"`, `"ulysses"`, `"hybrid"` or `"gather"`; `"reproducible"` for calls with
            `reproducible=True`, which send the same by all of them.
        merge: for a tree the merge strategy; for a ring what rotates, `"keys"` or `"queries"`; None
            for the others.
        shape: the sizes.
        topology: the mesh.
        **derivatives: those that are counted, too.

    Returns:
        A [`Transfer`][energy_attn.distributed.cost.Transfer] for each; none over one device.

    Raises:
        TypeError: `shape` is not a `Shape`, `topology` not a `Topology`, or a flag not a bool.
        ValueError: an unknown method or merge, or one that these axes, heads or queries do not allow; a gradient
            beside a tangent, or of a tree or a ring of queries, which the model does not have.

    Source: Tree Attention (arXiv 2408.04093), section 6.3; Ulysses (arXiv 2309.14509); USP (arXiv
        2405.07719).

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape = cost.Shape(1, 1, 640_000, 16, 16, 128)
        >>> for t in cost.transfers("tree", "allreduce", shape, cost.topology("dgx_h100", (8,), nodes=16)):
        ...     print(t.kind, t.bytes)
        all-reduce 64
        all-reduce 8256
    """
    check_sizes(shape, topology)
    check_choice("method", method, tuple(METHODS))
    check_choice("merge", merge, METHODS[method])
    check_method(method, len(topology.links))
    if method == "tree":
        check_levels(str(merge), len(topology.links))
    if METHODS[method] == (None,) and method != "reproducible":
        check_sharded(method, shape, topology)
    check_options(derivatives, Derivatives)
    with_tangent, gradient = (
        check_flag(name, derivatives.get(name, False)) for name in ("tangent", "gradient")
    )
    if gradient:
        check_gradient(method, merge, with_tangent)
    gradient_bytes = shape.lse_bytes if gradient else 0
    if topology.devices == 1:
        return ()
    if method in ("ulysses", "hybrid"):
        return tuple(_exchanged(method, shape, topology, with_tangent, gradient_bytes))
    if method == "reproducible":
        sizes = kv_shard(shape, topology), local_rows(shape, topology)
        return tuple(reproduced(*sizes, shape, topology, with_tangent, gradient))
    near = near_keys(shape, topology)
    if near is not None:
        size, axes = -(-shape.keys // topology.devices), topology.axes
        sizes = kv_shard(shape, topology), size
        found = _near(near, *sizes, axes, shape, with_tangent, gradient_bytes)
        return (*_positions(shape.keys, shape, topology, axes), *found)
    if method == "gather":
        return tuple(_gathered(shape, topology, with_tangent, gradient))
    if method == "ring" and merge == "keys":
        keys = kv_shard(shape, topology)
        positions = _positions(shape.keys, shape, topology, topology.axes)
        return (
            *positions,
            *_around(keys, shape, topology, topology.axes, with_tangent, gradient_bytes),
        )
    # where all devices have the queries, a ring passes each device's state around, too
    strategy = str(merge) if method == "tree" else "ring"
    if not shape.queries_sharded:
        tangent = Transfer("all-reduce", shape.rows * shape.state, topology.axes)
        return (*FOLDED[strategy](shape, topology), *[tangent] * with_tangent)
    if method == "ring":
        return tuple(_queries(shape, topology, with_tangent))
    return tuple(_scattered(strategy, shape, topology, with_tangent))


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
    if method == "tree" or merge == "queries":
        raise ValueError(
            f"gradient: wanted False for {method!r} with merge={merge!r}, got True; the model has that of "
            "the ring of keys, of 'ulysses', of 'hybrid', of 'gather' and of 'reproducible'"
        )


def check_method(method: str, axes: int) -> None:
    """Raises `ValueError` where a method needs more mesh axes."""
    if method == "hybrid" and axes < 2:
        raise ValueError(
            "method: wanted two or more mesh axes for 'hybrid', slow ones first, got one; over one, "
            "there are 'ulysses' and 'ring'"
        )


def check_sharded(method: str, shape: Shape, topology: Topology) -> None:
    """Raises `ValueError` where a method needs sharded queries, or another number of heads."""
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
    """Whether the devices of a mesh can divide the heads as a method needs."""
    devices = _exchanging(method, topology)
    exchanges = method in ("ulysses", "hybrid")
    return not exchanges or key_copies(shape.heads, shape.kv_heads, devices) is not None


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


def _tangent_bytes(size: int, shape: Shape) -> int:
    """Bytes of the tangents, in `lse`'s dtype, of arrays of `size` bytes that are only sent."""
    return size // shape.bytes * shape.lse_bytes


def _scattered(merge: str, shape: Shape, topology: Topology, tangent: bool) -> Iterator[Transfer]:
    rows, axes = local_rows(shape, topology), topology.axes
    query = rows * shape.width * shape.bytes
    yield Transfer("all-gather", query, axes)
    scatter = summed if merge == "allreduce" else exchanged
    folds = tuple(scatter(rows * topology.devices, shape, topology))
    yield from folds
    if tangent:
        yield Transfer("all-gather", _tangent_bytes(query, shape), axes)
        yield from (fold for fold in folds if fold.kind != "all-reduce")  # but for the maximum


def _around(
    sizes: Sequence[int],
    shape: Shape,
    topology: Topology,
    axes: tuple[int, ...],
    tangent: bool,
    gradient_bytes: int,
) -> Iterator[Transfer]:
    """Keys and values of these sizes around a ring, and their gradients if `gradient_bytes` is not 0."""
    hops = math.prod(topology.links[axis].devices for axis in axes) - 1
    for size in sizes if hops else ():
        yield Transfer("collective-permute", size, axes, hops)
        if (
            tangent or gradient_bytes
        ) and hops > 1:  # again; XLA merges an only hop with the same one before
            yield Transfer("collective-permute", size, axes, hops)
        if tangent:  # directions
            yield Transfer("collective-permute", size, axes, hops)
        if gradient_bytes:  # gradients, which follow their keys, and return to their devices
            moving = size // shape.bytes * gradient_bytes
            yield Transfer("collective-permute", moving, axes, hops)
            yield Transfer("collective-permute", moving, axes)


def near_keys(shape: Shape, topology: Topology, shared: int = 1) -> Halo | None:
    """The keys that a window lets queries see, which a ring, a gather and a tree send and no others; None: all.

    Those of a hybrid are between groups of `shared` devices.
    """
    sizes = shape.queries, shape.keys
    if shape.window is None or not shape.queries_sharded:
        return None
    if shared > 1 and not has_groups(shape.layout, *sizes, topology.devices):
        return None
    return halo(shape.layout, topology.devices // shared, *sizes, shape.window)


def _near(
    near: Halo,
    sizes: Sequence[int],
    length: int,
    axes: tuple[int, ...],
    shape: Shape,
    tangent: bool,
    gradient_bytes: int,
) -> Iterator[Transfer]:
    """Keys and values of a halo, of these sizes for `length` tokens.

    Gradients return in the dtypes of keys and values, or behind keys that go around.
    """
    for whole in sizes:
        hops = near.around - 1
        if hops:
            again = 1 + (hops > 1 and bool(tangent or gradient_bytes)) + tangent
            yield from [Transfer("collective-permute", whole, axes, hops)] * again
            if gradient_bytes:
                moving = whole // shape.bytes * gradient_bytes
                yield Transfer("collective-permute", moving, axes, hops)
                yield Transfer("collective-permute", moving, axes)
        for span in near.spans:
            part = whole // length * (span.stop - span.start)
            # the backward's keys are the forward's, which XLA sends once
            count = 1 + tangent + bool(gradient_bytes)
            yield from [Transfer("collective-permute", part, axes)] * count


def _positions(
    length: int, shape: Shape, topology: Topology, axes: tuple[int, ...]
) -> Iterator[Transfer]:
    """The gather of each device's positions at the start."""
    if shape.causal:
        yield Transfer("all-gather", 4 * -(-length // topology.devices), axes)


def _queries(shape: Shape, topology: Topology, tangent: bool) -> Iterator[Transfer]:
    devices, rows, axes = topology.devices, local_rows(shape, topology), topology.axes
    # queries with the states of the keys that they have seen; the last hop brings them home
    query, state = rows * shape.width * shape.bytes, rows * shape.state
    yield from _positions(shape.queries, shape, topology, axes)
    tangents = (_tangent_bytes(query, shape), state) if tangent else ()
    for size in (query, state, *tangents):
        yield Transfer("collective-permute", size, axes, devices)


def _exchanged(
    method: str, shape: Shape, topology: Topology, tangent: bool, gradient_bytes: int
) -> Iterator[Transfer]:
    """Heads exchanged for sequence along all axes, or along the last, and keys around the others."""
    axes = topology.axes
    ring_axes, exchange_axes = (axes[:-1], axes[-1:]) if method == "hybrid" else ((), axes)
    devices, rows = _exchanging(method, topology), local_rows(shape, topology)
    copies = key_copies(shape.heads, shape.kv_heads, devices) or 1
    keys = [copies * size for size in kv_shard(shape, topology)]
    sizes = (rows * shape.width * shape.bytes, *keys)
    # the state of all keys: `out` in its own dtype, unless packed
    rounded = shape.out_width * shape.bytes + shape.lse_bytes
    state = rows * (shape.state if topology.platform == "cpu" else rounded)
    if devices > 1:
        yield from _positions(shape.queries, shape, topology, exchange_axes)
        yield from (Transfer("all-to-all", size, exchange_axes) for size in sizes)
    yield from _positions(shape.keys, shape, topology, axes)
    near = near_keys(shape, topology, devices) if method == "hybrid" else None
    if near is None:
        yield from _around(keys, shape, topology, ring_axes, tangent, gradient_bytes)
    else:
        length = shape.keys // topology.devices * devices
        yield from _near(near, keys, length, ring_axes, shape, tangent, gradient_bytes)
    if devices > 1:
        yield Transfer("all-to-all", state, exchange_axes)
    if devices > 1 and (
        tangent or gradient_bytes
    ):  # an exchange's transpose is the one that undoes it
        # XLA:TPU rounds gradients before it exchanges them
        is_rounded = gradient_bytes and topology.platform == "tpu"
        for size in sizes:
            sent = size if is_rounded else _tangent_bytes(size, shape)
            yield Transfer("all-to-all", sent, exchange_axes)
        yield Transfer("all-to-all", state, exchange_axes)


def _gathered(
    shape: Shape, topology: Topology, tangent: bool, gradient: bool
) -> Iterator[Transfer]:
    axes = topology.axes
    count = pieces(-(-shape.keys // topology.devices))
    yield from _positions(shape.keys, shape, topology, axes)
    for size in kv_shard(shape, topology):
        # for a tangent again, but for the first piece, whose gathers XLA merges; and directions
        counts = (count, count - 1, count) if tangent else (count,)
        yield from (Transfer("all-gather", size // count, axes, n) for n in counts if n)
        if (
            gradient
        ):  # the backward's gathers, of which XLA merges the first, or all of two, and scatters
            if count > 2:
                yield Transfer("all-gather", size // count, axes, count - 1)
            piece = _tangent_bytes(size, shape) * topology.devices // count
            yield Transfer("reduce-scatter", piece, axes, count)
