"""The network of a mesh: latencies and bandwidths of its axes, and the cost of a collective."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from energy_attn.kernels.internal import checks

from ..hlo._parse import Kind


@dataclasses.dataclass(frozen=True)
class Link:
    r"""The network between the devices along one mesh axis.

    Attributes:
        devices: the number of devices along the axis.
        latency: seconds of an empty message to the next device, software included.
        bandwidth: bytes per second that each device sends in one direction while all of them send.
        name: for display.
        torus: whether it joins neighbours only, in both directions and around the end, so that a
            message over a distance of $d$ devices travels $d$ hops.
        sharing: the number of devices that share a host's network card; a device that sends alone has `sharing` times
            its `bandwidth`.

    Raises:
        TypeError: a field of another type.
        ValueError: no devices, a negative or infinite latency, a bandwidth that is not positive,
            or `sharing` below 1.

    Source: R. Hockney, The communication challenge for MPP, Parallel Computing 20 (1994): a message of $n$
        bytes takes $\alpha + n / \beta$, of `latency` and `bandwidth`.

    Examples:
        >>> from energy_attn.distributed.cost import Link
        >>> Link(8, 0.6e-6, 450e9, "NVLink").devices
        8
    """

    devices: int
    latency: float
    bandwidth: float
    name: str = ""
    torus: bool = False
    sharing: int = 1

    def __post_init__(self) -> None:
        checks.check_integer("devices", self.devices, least=1)
        checks.check_text("name", self.name)
        checks.check_flag("torus", self.torus)
        checks.check_integer("sharing", self.sharing, least=1)
        check_seconds("latency", self.latency)
        if checks.check_finite_number("bandwidth", self.bandwidth) <= 0:
            raise ValueError(f"bandwidth: wanted bytes per second, above 0, got {self.bandwidth}")


@dataclasses.dataclass(frozen=True)
class Topology:
    r"""Devices on a mesh, and the network along each axis.

    Attributes:
        name: for display, such as a name of [`topology`][energy_attn.distributed.cost.topology].
        links: a link for each mesh axis, slow axes first.
        all_reduce: how the platform sums over $p$ devices.
            `"ring"`, one ring over all of them, as gloo: $2(p-1)$ latencies, and each device sends $2\frac{p-1}{p}$ of
            the payload. gloo waits for the receiver's address, so that
            each step waits for the slowest link of the ring, and two processes that send to each
            other take turns on their connection.
            `"tree"`, two binary trees that each carry half, as NCCL for small messages:
            $2 \lceil\log_2 d\rceil$ latencies for each axis of $d$ devices, and up to twice the payload.
            `"levels"`, axis by axis, as XLA:TPU: a reduce-scatter from the fast axis to the slow
            one and a gather back, with the bytes of the ring.
        launch: seconds of any collective before its first message.
        platform: `"cpu"`, `"gpu"` or `"tpu"`: on CPUs, states are sent as one array of `lse`'s
            dtype.
        overhead: seconds of a processor for each message, in addition to the link's latency; the messages of an
            all-to-all wait for each other.

    Raises:
        TypeError: `links` is not a tuple of `Link`, or `name` not a text.
        ValueError: no links, an unknown `all_reduce` or platform, a negative `launch` or `overhead`.

    Source: for `"tree"`, P. Sanders et al., Two-tree algorithms for full bandwidth broadcast,
        reduction and scan, Parallel Computing 35 (2009).

    Examples:
        >>> from energy_attn.distributed.cost import Link, Topology
        >>> two = Topology("two hosts", (Link(2, 1e-3, 1e8), Link(4, 1e-5, 1e9)))
        >>> two.devices
        8
    """

    name: str
    links: tuple[Link, ...]
    all_reduce: str = "ring"
    launch: float = 0.0
    platform: str = "gpu"
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.links, tuple) or not all(isinstance(x, Link) for x in self.links):
            raise TypeError(f"links: wanted a tuple of Link, got {checks.received(self.links)}")
        checks.check_text("name", self.name)
        if not self.links:
            raise ValueError("links: wanted one for each mesh axis, got none")
        checks.check_choice("all_reduce", self.all_reduce, ("ring", "tree", "levels"))
        checks.check_choice("platform", self.platform, ("cpu", "gpu", "tpu"))
        check_seconds("launch", self.launch)
        check_seconds("overhead", self.overhead)

    @property
    def devices(self) -> int:
        """The product of the axes' sizes."""
        return math.prod(link.devices for link in self.links)

    @property
    def axes(self) -> tuple[int, ...]:
        """The places of all mesh axes in `links`."""
        return tuple(range(len(self.links)))


def check_seconds(name: str, x: float) -> None:
    if checks.check_finite_number(name, x) < 0:
        raise ValueError(f"{name}: wanted seconds, 0 or more, got {x}")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective that the compiled program is predicted to have.

    Attributes:
        kind: as HLO names it.
        bytes: payload, as of [`collectives`][energy_attn.distributed.collectives]: its operands on one device in
            each run. `out` and `lse` of a state are one transfer; a program that
            sends two arrays may show an instruction for each.
        axes: the mesh axes that it joins, as indices of `Topology.links`.
        count: the number of runs.
        distance: for a permute, the number of devices along its axis that a message moves.
        pairs: for a permute, whether devices exchange two by two.

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


class Derivatives(NamedTuple):
    """Whether to count the transfers of the tangent, or of the gradients, with respect to query, key and value."""

    tangent: bool = False
    gradient: bool = False


def total_seconds(transfers: Iterable[Transfer], topology: Topology) -> float:
    return sum(transfer.count * seconds(transfer, topology) for transfer in transfers)


def sent(transfer: Transfer, topology: Topology) -> float:
    """Bytes that the busiest device sends in all runs of a transfer."""
    devices = math.prod(topology.links[axis].devices for axis in transfer.axes)
    part = part_sent(transfer.kind, devices, topology.all_reduce)
    return part * transfer.bytes * transfer.count


def part_sent(kind: Kind, devices: int, all_reduce: str = "ring") -> float:
    """Bytes sent per device, as a multiple of the payload."""
    peers = devices - 1
    part = {
        # a reduce-scatter and a gather; with two trees at most twice the payload
        "all-reduce": 2.0 if all_reduce == "tree" else 2 * peers / devices,
        "all-gather": peers,
        "reduce-scatter": peers / devices,
        "all-to-all": peers / devices,  # its own part stays
        "collective-permute": 1,
    }
    return part[kind]


def seconds(transfer: Transfer, topology: Topology) -> float:
    """Seconds of one run; linear in `launch`, `overhead`, and each link's latency and seconds per byte."""
    links = [topology.links[axis] for axis in transfer.axes]
    active = [
        dataclasses.replace(link, latency=link.latency + topology.overhead)
        for link in links
        if link.devices > 1
    ]
    steps = {"collective-permute": _permute, "all-to-all": _exchange}.get(transfer.kind)
    if steps is None:
        steps = _levels if topology.all_reduce == "levels" else _around
    return topology.launch + steps(transfer, active, topology)


def _around(transfer: Transfer, links: list[Link], topology: Topology) -> float:
    # one ring over all devices, (p - 1) (α + n / (p β)); for sums twice, or two trees, 2 ⌈log₂ p⌉ α
    devices = math.prod(link.devices for link in links)
    hops, inner, slowest = 0.0, 0, math.inf
    for i, link in enumerate(links):
        blocks = math.prod(x.devices for x in links[: i + 1])
        hops += (blocks - inner) / devices * link.latency  # the ring's hops at this level
        inner = blocks
        # of the devices within a block, one sends over the slow link
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
    # axis by axis; the payload grows with the axes gathered before
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
    # one message per device; in a ring over several axes, one device of each block sends over slow links
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
    # an all-to-all: each device sends a different part to every other device
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
    # two devices that send to each other: with gloo they alternate on one connection
    return 2.0 if topology.all_reduce == "ring" else 1.0
