"""The network of a mesh: a latency and a bandwidth for each of its axes."""

import dataclasses
import math

from energy_attn.kernels.internal import (
    check_choice,
    check_finite_number,
    check_flag,
    check_integer,
    check_text,
    received,
)


@dataclasses.dataclass(frozen=True)
class Link:
    r"""The network between the devices along one mesh axis.

    Attributes:
        devices: their number.
        latency: seconds from one to the next, software included, for a message of no length.
        bandwidth: bytes per second that each device sends in one direction while all of them send.
        name: for display.
        torus: whether it joins neighbours only, in both directions and around the end, so that a
            message to the device $d$ places on travels $d$ hops.
        sharing: how many devices share a host's network card; a device that sends alone has `sharing` times
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
        check_integer("devices", self.devices, least=1)
        check_text("name", self.name)
        check_flag("torus", self.torus)
        check_integer("sharing", self.sharing, least=1)
        check_seconds("latency", self.latency)
        if check_finite_number("bandwidth", self.bandwidth) <= 0:
            raise ValueError(f"bandwidth: wanted bytes per second, above 0, got {self.bandwidth}")


@dataclasses.dataclass(frozen=True)
class Topology:
    r"""Devices on a mesh, and the network along each axis.

    Attributes:
        name: that of [`topology`][energy_attn.distributed.cost.topology], or any, for display.
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
        platform: `"cpu"`, `"gpu"` or `"tpu"`: on CPUs, states are sent as one array of `lse`'s
            dtype.
        overhead: seconds of a processor that each message takes, beside the link's latency: those of an
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
            raise TypeError(f"links: wanted a tuple of Link, got {received(self.links)}")
        check_text("name", self.name)
        if not self.links:
            raise ValueError("links: wanted one for each mesh axis, got none")
        check_choice("all_reduce", self.all_reduce, ("ring", "tree", "levels"))
        check_choice("platform", self.platform, ("cpu", "gpu", "tpu"))
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


def check_seconds(name: str, x: float) -> float:
    """Returns `x` if it is a time; raises `TypeError` or `ValueError` otherwise."""
    if check_finite_number(name, x) < 0:
        raise ValueError(f"{name}: wanted seconds, 0 or more, got {x}")
    return x
