"""The predicted collectives of each merge strategy, and of a scatter of states."""

from collections.abc import Callable, Iterator

from ..merge._halving import fast_axis, rounds
from ._shape import Shape
from ._topology import Topology
from ._transfer import Transfer

# With at least this many chips in a slice, XLA:TPU turns a small gather into an all-reduce of arrays padded with
# zeros (`tests/tpu/test_programs.py`).
_MANY_CHIPS = 64


def _allreduce(shape: Shape, topology: Topology) -> Iterator[Transfer]:
    yield Transfer("all-reduce", shape.rows * shape.lse_bytes, topology.axes)
    yield Transfer("all-reduce", shape.rows * shape.state, topology.axes)


def _gather(shape: Shape, topology: Topology) -> Iterator[Transfer]:
    size, tpu = shape.rows * shape.state, topology.platform == "tpu"
    if tpu and shape.out_width > 0:  # energies fill rows of outputs
        row = shape.out_width * shape.lse_bytes
        size = row * (shape.rows + -(-shape.rows * shape.lse_bytes // row))
    one_slice = all(link.torus for link in topology.links)
    if tpu and one_slice and topology.devices >= _MANY_CHIPS:
        yield Transfer("all-reduce", topology.devices * size, topology.axes)
    else:
        yield Transfer("all-gather", size, topology.axes)


def _butterfly(shape: Shape, topology: Topology) -> Iterator[Transfer]:
    yield from _exchanges(shape.rows * shape.state, topology, topology.axes)


def _exchanges(state: int, topology: Topology, axes: tuple[int, ...]) -> Iterator[Transfer]:
    """A butterfly's permutes over these axes, of states of `state` bytes."""
    for axis in reversed(axes):
        size = topology.links[axis].devices
        odd, held = size // (size & -size), 1
        while held < odd:  # Bruck's all-gather among neighbours
            sent = min(held, odd - held)
            yield Transfer("collective-permute", sent * state, (axis,), 1, held)
            held += sent
        while held < size:
            yield Transfer("collective-permute", state, (axis,), 1, held, pairs=True)
            held *= 2


def _hierarchical(shape: Shape, topology: Topology) -> Iterator[Transfer]:
    *slow, fast = topology.axes
    devices = topology.links[fast].devices
    share = -(-shape.rows // devices)
    if devices > 1:
        yield Transfer("all-to-all", share * devices * shape.state, (fast,))
    yield from _exchanges(share * shape.state, topology, tuple(slow))
    if devices > 1:
        yield Transfer("all-gather", share * shape.state, (fast,))


def _halving(shape: Shape, topology: Topology) -> Iterator[Transfer]:
    share = rows = -(-shape.rows // topology.devices)
    sizes, back = [link.devices for link in topology.links], []
    for axis, devices in enumerate(sizes):
        for step, sent in reversed(rounds(devices)):
            size, pairs = sent * rows * shape.state, 2 * step == devices
            back.append(Transfer("collective-permute", size, (axis,), 1, step, pairs))
        rows *= devices
    fast = fast_axis(sizes)
    yield from reversed(back)
    yield Transfer("collective-permute", share * shape.state, (fast,), pairs=sizes[fast] == 2)
    yield from back


def _ring(shape: Shape, topology: Topology) -> Iterator[Transfer]:
    hops = topology.devices - 1
    yield Transfer("collective-permute", shape.rows * shape.state, topology.axes, hops)


def exchanged(rows: int, shape: Shape, topology: Topology) -> Iterator[Transfer]:
    """A scatter of states by one exchange, for the rows of all devices."""
    yield Transfer("all-to-all", rows * shape.state, topology.axes)


def summed(rows: int, shape: Shape, topology: Topology) -> Iterator[Transfer]:
    """A scatter of states by a maximum and a reduce-scatter of sums, for the rows of all devices."""
    yield Transfer("all-reduce", rows * shape.lse_bytes, topology.axes)
    yield Transfer("reduce-scatter", rows * shape.state, topology.axes)


FOLDED: dict[str, Callable[[Shape, Topology], Iterator[Transfer]]] = {
    "allreduce": _allreduce,
    "gather": _gather,
    "butterfly": _butterfly,
    "hierarchical": _hierarchical,
    "halving": _halving,
    "ring": _ring,
}
