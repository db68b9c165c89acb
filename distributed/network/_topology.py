"""Networks of devices in the cost model: a latency and a bandwidth for each mesh axis.

Figures are published by the makers, one direction, per device; unpublished overheads are marked as
assumed. They rank strategies; they are no measurement.
"""

import dataclasses
import math

from energy_attn.kernels.internal import (
    check_choice,
    check_finite_number,
    check_flag,
    check_integer,
    received,
)

ALL_REDUCES = ("ring", "tree", "levels")
PLATFORMS = ("cpu", "gpu", "tpu")


@dataclasses.dataclass(frozen=True)
class Link:
    """The network between the devices along one mesh axis.

    Attributes:
        devices: their number.
        latency: seconds from one to the next, software included, for a message of no length.
        bandwidth: bytes per second that each device sends in one direction while all of them send.
            Devices that share a host's network card have their part of it.
        name: for display.
        torus: whether it joins neighbours only, in both directions and around the end, so that a
            message to the device $d$ places on travels $d$ hops.
        sharing: how many devices share the network card; one that sends alone has as many times
            `bandwidth`.

    Raises:
        TypeError: a field of another type.
        ValueError: no devices, a negative or infinite latency, a bandwidth that is not positive,
            or a card that nobody shares.

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
        check_integer("devices", self.devices, least=1)
        if check_finite_number("latency", self.latency) < 0:
            raise ValueError(f"latency: wanted seconds, 0 or more, got {self.latency}")
        if check_finite_number("bandwidth", self.bandwidth) <= 0:
            raise ValueError(f"bandwidth: wanted bytes per second, above 0, got {self.bandwidth}")
        if not isinstance(self.name, str):
            raise TypeError(f"name: wanted a string, got {received(self.name)}")
        check_flag("torus", self.torus)
        check_integer("sharing", self.sharing, least=1)


@dataclasses.dataclass(frozen=True)
class Topology:
    r"""Devices on a mesh, and the network along each axis.

    Attributes:
        name: for display.
        links: one for each mesh axis, slow ones first, as the axes themselves.
        all_reduce: how the platform sums over $p$ devices.
            `"ring"`, one ring over all of them, as gloo: $2(p-1)$ latencies, $2\frac{p-1}{p}$ of
            the payload sent by each device. gloo sends after the receiver has said where to, so that
            each step waits for the slowest link of the ring; and two processes that send to each
            other take turns on their connection;
            `"tree"`, two binary trees that each carry half, as NCCL for small messages:
            $2 \lceil\log_2\rceil$ of each axis' devices latencies, and up to twice the payload;
            `"levels"`, axis by axis, as XLA:TPU: a reduce-scatter from the fast axis to the slow
            one and a gather back, the volume of the ring.
        launch: seconds that any collective takes before its first message.
        overhead: seconds of a processor that each message takes, beside the link's latency: those of an
            all-to-all wait for each other.
        platform: `"cpu"`, `"gpu"` or `"tpu"`: on CPUs, states are sent as one array of `lse`'s
            dtype.

    Raises:
        TypeError: `links` is not a tuple of `Link`.
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
            raise TypeError(f"links: wanted a tuple of Link, got {received(self.links)}")
        if not self.links:
            raise ValueError("links: wanted one for each mesh axis, got none")
        check_choice("all_reduce", self.all_reduce, ALL_REDUCES)
        check_choice("platform", self.platform, PLATFORMS)
        for name in ("launch", "overhead"):
            if check_finite_number(name, getattr(self, name)) < 0:
                raise ValueError(f"{name}: wanted seconds, 0 or more, got {getattr(self, name)}")

    @property
    def devices(self) -> int:
        """The product of the axes' sizes."""
        return math.prod(link.devices for link in self.links)


def all_axes(topology: Topology) -> tuple[int, ...]:
    """The places of all mesh axes in `Topology.links`."""
    return tuple(range(len(topology.links)))
