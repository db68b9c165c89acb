"""The collectives of a call with `reproducible=True`: everything is gathered, and nothing is added on the way."""

from collections.abc import Iterator, Sequence

from energy_attn.kernels.internal import LEAF

from ._shape import Shape
from ._topology import Topology
from ._transfer import Transfer

# Keys and values of all devices that take fewer bytes are gathered at once.
LEAST = 8 << 20


def reproduced(
    sizes: Sequence[int],
    rows: int,
    shape: Shape,
    topology: Topology,
    tangent: bool,
    gradient: bool,
) -> Iterator[Transfer]:
    """Those of keys and values of these sizes on a device, and of so many rows of queries."""
    share = -(-shape.keys // topology.devices)
    run = {"contiguous": share, "zigzag": share // 2}.get(shape.layout)
    if not shape.queries_sharded and run is not None and run % LEAF == 0:
        nodes = share // (run & -run) if run else 0
        return _roots(nodes, shape, topology, tangent, gradient)
    return _everything(sizes, rows, shape, topology, tangent, gradient)


def _roots(
    nodes: int, shape: Shape, topology: Topology, tangent: bool, gradient: bool
) -> Iterator[Transfer]:
    """The roots of the trees over a device's own keys, of rows, and their numbers."""
    rows = nodes * shape.batch * shape.queries * shape.heads
    state = shape.out_width, 1, 1  # numerator, denominator, maximum
    found = [*state, *(state if tangent else ()), *([shape.width] if gradient else ())]
    for size in (4 * nodes * shape.batch, *(rows * width * shape.lse_bytes for width in found)):
        if size:
            yield Transfer("all-gather", size, topology.axes)


def _everything(
    sizes: Sequence[int],
    rows: int,
    shape: Shape,
    topology: Topology,
    tangent: bool,
    gradient: bool,
) -> Iterator[Transfer]:
    """Positions and keys; for gradients of keys what else a row has, where devices have rows of their own."""
    devices, axes = topology.devices, topology.axes
    yield Transfer("all-gather", 4 * -(-shape.keys // devices), axes)
    if gradient and shape.queries_sharded and shape.queries != shape.keys:
        yield Transfer("all-gather", 4 * -(-shape.queries // devices), axes)
    turns = head_turns(sum(sizes), shape.kv_heads, devices)
    # the backward's keys are the forward's, unless each gathered some heads at a time; or there are directions
    found = [*sizes] * (1 + (tangent or (gradient and turns > 1)))
    if gradient and shape.queries_sharded:
        numbers = shape.width * shape.bytes, shape.out_width * shape.bytes, shape.lse_bytes
        query, out, lse = (rows * x for x in numbers)
        found += [query, out, out, lse, lse]  # and cotangents
    for size in found:
        if size:
            yield Transfer("all-gather", size // turns, axes, turns)


def head_turns(own: int, heads: int, devices: int) -> int:
    """In how many parts of so many heads keys are gathered, of which a device has `own` bytes."""
    least = max(1, -(-own * devices // max(2 * own, LEAST)))
    return next((n for n in range(least, heads) if heads % n == 0), heads)
