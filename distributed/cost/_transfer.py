"""A predicted collective, and its cost on a network: bytes sent and seconds."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..hlo._parse import Kind
from ._shape import Shape
from ._topology import Link, Topology


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective that the compiled program is predicted to have.

    Attributes:
        kind: as HLO names it.
        bytes: payload, with the meaning of `bytes` in
            [`Collective`][energy_attn.distributed.Collective]: its operands on one device, each
            time that it runs. `out` and `lse` of a state are one transfer; where they are
            sent as two arrays, a program may show an instruction for each.
        axes: the mesh axes that it joins, as indices of `Topology.links`.
        count: how often it runs.
        distance: of a permute, how many devices along its axis a message moves.
        pairs: of a permute, whether devices exchange with each other, two by two.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape = cost.Shape(1, 1, 4096, 16, 16, 64, dtype="float32")
        >>> cost.transfers("tree", "gather", shape, cost.topology("ethernet", nodes=8))
        (Transfer(kind='all-gather', bytes=4160, axes=(0,), count=1, distance=1, pairs=False),)
    """

    kind: Kind
    bytes: int
    axes: tuple[int, ...]
    count: int = 1
    distance: int = 1
    pairs: bool = False


Transfers = Iterator[Transfer]


class SentDerivatives(NamedTuple):
    """The derivatives whose transfers are counted, too.

    Attributes:
        tangent: whether the tangent of the state, in directions of query, key and value.
        gradient: whether the gradients in query, key and value.
    """

    tangent: bool = False
    gradient: bool = False


def position_gather(
    length: int, shape: Shape, topology: Topology, axes: tuple[int, ...]
) -> Transfers:
    """The gather, at the start, of the positions of `length` tokens where they are compared."""
    if shape.causal:
        yield Transfer("all-gather", 4 * -(-length // topology.devices), axes)


def total_seconds(transfers: Iterable[Transfer], topology: Topology) -> float:
    """Seconds of all runs of some transfers, one after the other."""
    return sum(transfer.count * seconds(transfer, topology) for transfer in transfers)


def sent(transfer: Transfer, topology: Topology) -> float:
    """Bytes that one device, the busiest, puts on links: for all runs of a transfer."""
    devices = math.prod(topology.links[axis].devices for axis in transfer.axes)
    part = part_sent(transfer.kind, devices, topology.all_reduce)
    return part * transfer.bytes * transfer.count


def part_sent(kind: Kind, devices: int, all_reduce: str = "ring") -> float:
    """How many times its payload a device puts on links, in a collective over so many devices."""
    peers = devices - 1
    part = {
        "all-reduce": 2.0 if all_reduce == "tree" else 2 * peers / devices,
        "all-gather": peers,
        "reduce-scatter": peers / devices,
        "all-to-all": peers / devices,
        "collective-permute": 1,
    }
    return part[kind]


def seconds(transfer: Transfer, topology: Topology) -> float:
    """Of one run of a transfer, linear in `launch`, `overhead`, and each link's latency and seconds per byte."""
    links = [topology.links[axis] for axis in transfer.axes]
    joined = [
        dataclasses.replace(link, latency=link.latency + topology.overhead)
        for link in links
        if link.devices > 1
    ]
    steps = {"collective-permute": _permute, "all-to-all": _exchange}.get(transfer.kind)
    if steps is None:
        steps = _levels if topology.all_reduce == "levels" else _around
    return topology.launch + steps(transfer, joined, topology)


def _around(transfer: Transfer, links: list[Link], topology: Topology) -> float:
    """One ring over all devices; or, for sums, two trees."""
    devices = math.prod(link.devices for link in links)
    hops, inner, slowest = 0.0, 0, math.inf
    for i, link in enumerate(links):
        blocks = math.prod(x.devices for x in links[: i + 1])
        hops += (blocks - inner) / devices * link.latency  # the ring's hops at this level
        inner = blocks
        slowest = min(slowest, link.bandwidth * (devices // blocks))
    if topology.all_reduce == "ring":
        # receivers announce themselves in the other direction, so each step waits for the slowest hop
        hops = max(link.latency for link in links)
    hops *= devices - 1
    if transfer.kind == "all-reduce":
        hops *= 2
        if topology.all_reduce == "tree":
            hops = 2 * sum(math.ceil(math.log2(link.devices)) * link.latency for link in links)
    turns = _turns(topology) if devices == 2 and transfer.kind == "all-gather" else 1
    return hops + turns * sent(dataclasses.replace(transfer, count=1), topology) / slowest


def _levels(transfer: Transfer, links: list[Link], topology: Topology) -> float:
    """Axis by axis; the payload grows with the axes gathered before."""
    seconds, gathered = 0.0, 1
    devices = math.prod(link.devices for link in links)
    for link in links:
        gathers = 2 if transfer.kind == "all-reduce" else 1
        shard = transfer.bytes if transfer.kind == "all-gather" else transfer.bytes / devices
        payload = shard * gathered * (link.devices - 1)
        seconds += gathers * (_rounds(link) * link.latency + payload / link.bandwidth)
        gathered *= link.devices
    return seconds


def _permute(transfer: Transfer, links: list[Link], topology: Topology) -> float:
    """A message of each device, those of a ring over several axes one from each block of devices."""
    *slow, fast = links
    distance = transfer.distance % fast.devices
    hops = min(distance, fast.devices - distance) if fast.torus and not slow else 1
    devices = math.prod(link.devices for link in links)
    turns = _turns(topology) if transfer.pairs or devices == 2 else 1
    # messages through the links of other devices share these
    seconds = hops * (fast.latency + turns * transfer.bytes / fast.bandwidth)
    slow_seconds = [
        link.latency + transfer.bytes / (link.bandwidth * link.sharing) for link in slow
    ]
    return max([seconds, *slow_seconds])


def _exchange(transfer: Transfer, links: list[Link], topology: Topology) -> float:
    """All to all: each device's part for every other, over the links between them."""
    seconds, remaining = 0.0, float(transfer.bytes)
    for link in links:
        crossing = remaining * (link.devices - 1) / link.devices
        # around a torus a part travels a quarter of the way on average, in both directions
        congestion = max(1.0, link.devices / 4) if link.torus else 1.0
        if link.devices == 2:
            congestion = _turns(topology)
        seconds = (
            max(seconds, _rounds(link) * link.latency) + congestion * crossing / link.bandwidth
        )
        remaining -= crossing
    peers = math.prod(link.devices for link in links) - 1
    return seconds + (peers - 1) * topology.overhead


def _rounds(link: Link) -> int:
    return link.devices // 2 if link.torus else 1


def _turns(topology: Topology) -> float:
    """The factor for two devices that send to each other, which with gloo take turns on a connection."""
    return 2.0 if topology.all_reduce == "ring" else 1.0
