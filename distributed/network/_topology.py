"""Networks of devices in the cost model: a latency and a bandwidth for each mesh axis.

Figures are published by the makers, one direction, per device; unpublished overheads are marked as
assumed. They rank strategies; they are no measurement.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

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

    Raises:
        TypeError: a field of another type.
        ValueError: no devices, a negative or infinite latency, a bandwidth that is not positive.

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

    def __post_init__(self) -> None:
        check_integer("devices", self.devices, least=1)
        if check_finite_number("latency", self.latency) < 0:
            raise ValueError(f"latency: wanted seconds, 0 or more, got {self.latency}")
        if check_finite_number("bandwidth", self.bandwidth) <= 0:
            raise ValueError(f"bandwidth: wanted bytes per second, above 0, got {self.bandwidth}")
        if not isinstance(self.name, str):
            raise TypeError(f"name: wanted a string, got {received(self.name)}")
        check_flag("torus", self.torus)


@dataclasses.dataclass(frozen=True)
class Topology:
    r"""Devices on a mesh, and the network along each axis.

    Attributes:
        name: for display.
        links: one for each mesh axis, slow ones first, as the axes themselves.
        all_reduce: how the platform sums over $p$ devices.
            `"ring"`, one ring over all of them, as gloo: $2(p-1)$ latencies, $2\frac{p-1}{p}$ of
            the payload sent by each device;
            `"tree"`, two binary trees that each carry half, as NCCL for small messages:
            $2 \lceil\log_2\rceil$ of each axis' devices latencies, and up to twice the payload;
            `"levels"`, axis by axis, as XLA:TPU: a reduce-scatter from the fast axis to the slow
            one and a gather back, the volume of the ring.
        launch: seconds that any collective takes before its first message.
        platform: `"cpu"`, `"gpu"` or `"tpu"`: on CPUs, states are sent as one array of `lse`'s
            dtype.

    Raises:
        TypeError: `links` is not a tuple of `Link`.
        ValueError: no links, an unknown `all_reduce` or platform, or a negative `launch`.

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

    def __post_init__(self) -> None:
        if not isinstance(self.links, tuple) or not all(isinstance(x, Link) for x in self.links):
            raise TypeError(f"links: wanted a tuple of Link, got {received(self.links)}")
        if not self.links:
            raise ValueError("links: wanted one for each mesh axis, got none")
        check_choice("all_reduce", self.all_reduce, ALL_REDUCES)
        check_choice("platform", self.platform, PLATFORMS)
        if check_finite_number("launch", self.launch) < 0:
            raise ValueError(f"launch: wanted seconds, 0 or more, got {self.launch}")

    @property
    def devices(self) -> int:
        """The product of the axes' sizes."""
        return math.prod(link.devices for link in self.links)


# The smallest latencies that NCCL's own model assumes (NVIDIA/nccl, src/graph/tuning.cc, protocol
# LL): before a collective 6.6 µs, per hop 0.6 µs over NVLink, 1.0 over PCIe, 2.7 over a network.
_NCCL, _NVLINK, _PCIE, _NETWORK = 6.6e-6, 0.6e-6, 1.0e-6, 2.7e-6
# And RCCL's (ROCm/rccl, the same file): 12 µs, and 0.8 µs per hop within a node.
_RCCL, _XGMI = 12e-6, 0.8e-6
# One-way bytes per second of a chip's ICI link and of its data-centre network: Google Cloud's
# "TPU v5p", "v5e" and "v6e" pages give 1200, 400 and 800 GB/s in both directions over 6, 4 and 4
# links, and 50 Gbit/s per chip for v5p; 100 Gbit/s per host of 4 (v5e) or 8 (v6e) chips are assumed.
_TPU = {"v5p": (100e9, 6.25e9), "v5e": (50e9, 3.125e9), "v6e": (100e9, 3.125e9)}
# Assumed: a microsecond per ICI hop and to start a collective, ten between slices' hosts.
_ICI, _DCN = 1e-6, 10e-6
# Assumed: 0.1 ms for gloo's threads to start a collective, and as much for each message within a
# host, over loopback at 1 GB/s.
_GLOO, _LOOPBACK = 1e-4, Link(1, 1e-4, 1e9, "loopback")
# Assumed: threads of one process meet in 50 µs and copy 5 GB/s each.
_THREADS = Link(1, 1e-6, 5e9, "memory")


def dgx_h100(nodes: int = 1) -> Topology:
    """Nodes of eight H100: NVLink 4 inside, a 400 Gbit/s network card for each GPU between them.

    Args:
        nodes: how many; one has no slow axis.

    Returns:
        A [`Topology`][energy_attn.distributed.cost.Topology] of `(nodes, 8)` devices, or `(8,)`.

    Raises:
        TypeError: `nodes` is no integer.
        ValueError: `nodes` is below 1.

    Source: NVIDIA DGX H100 data sheet (900 GB/s per GPU in both directions, ConnectX-7).

    Examples:
        >>> from energy_attn.distributed import cost
        >>> cost.dgx_h100(16).devices
        128
    """
    nvlink = Link(8, _NVLINK, 450e9, "NVLink 4")
    return _nodes("DGX H100", nodes, nvlink, Link(1, _NETWORK, 50e9, "400 Gbit/s"), _NCCL)


def mi300x(nodes: int = 1) -> Topology:
    """Nodes of eight MI300X: Infinity Fabric inside, 400 Gbit/s for each GPU between them.

    Args:
        nodes: how many; one has no slow axis.

    Returns:
        A [`Topology`][energy_attn.distributed.cost.Topology] of `(nodes, 8)` devices, or `(8,)`.

    Raises:
        TypeError: `nodes` is no integer.
        ValueError: `nodes` is below 1.

    Source: AMD Instinct MI300X platform data sheet (seven links of 64 GB/s in each direction).

    Examples:
        >>> from energy_attn.distributed import cost
        >>> [link.devices for link in cost.mi300x(4).links]
        [4, 8]
    """
    fabric = Link(8, _XGMI, 7 * 64e9, "Infinity Fabric")
    return _nodes("MI300X", nodes, fabric, Link(1, _NETWORK, 50e9, "400 Gbit/s"), _RCCL)


def rtx_4090(devices: int = 2) -> Topology:
    """RTX 4090 cards in one host, over PCIe 4.0 x16 (they have no NVLink).

    Args:
        devices: how many.

    Returns:
        A [`Topology`][energy_attn.distributed.cost.Topology] of one axis.

    Raises:
        TypeError: `devices` is no integer.
        ValueError: `devices` is below 1.

    Source: PCI Express 4.0: 16 GT/s on 16 lanes, coded 128/130.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> cost.rtx_4090().links[0].name
        'PCIe 4.0 x16'
    """
    pcie = Link(devices, _PCIE, 31.5e9, "PCIe 4.0 x16")
    return Topology(f"{devices}x RTX 4090", (pcie,), "tree", _NCCL)


def tpu(chip: str, axes: Sequence[int], slices: int = 1) -> Topology:
    """TPU slices: each a torus of chips, joined by the data-centre network.

    Args:
        chip: `"v5p"`, `"v5e"` or `"v6e"`.
        axes: the size of each axis of the torus, or of the mesh axes laid over it.
        slices: how many slices; one has no slow axis.

    Returns:
        A [`Topology`][energy_attn.distributed.cost.Topology] whose first axis are the slices, if
        there are several.

    Raises:
        TypeError: sizes that are no integers.
        ValueError: an unknown chip, no axes, sizes below 1.

    Source: Google Cloud's system architecture pages of TPU v5p, v5e and v6e.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> cost.tpu("v5p", (2, 2, 2), slices=16).devices
        128
    """
    check_choice("chip", chip, tuple(_TPU))
    if not isinstance(axes, Sequence) or isinstance(axes, str) or not axes:
        raise ValueError(f"axes: wanted the sizes of one or more axes, got {received(axes)}")
    ici, network = _TPU[chip]
    links = tuple(Link(size, _ICI, 2 * ici, "ICI", torus=True) for size in axes)
    slices = check_integer("slices", slices, least=1)
    if slices > 1:
        links = (Link(slices, _DCN, network, "data-centre network"), *links)
    size = "x".join(map(str, axes))
    name = f"TPU {chip} {size}" if slices == 1 else f"{slices} slices of TPU {chip} {size}"
    return Topology(name, links, "levels", _ICI, "tpu")


def ethernet(
    hosts: int, devices: int = 1, *, bandwidth: float = 1.25e8, latency: float = 1e-4
) -> Topology:
    """CPU processes on hosts, one or more devices each, that talk by gloo over TCP.

    Args:
        hosts: how many, one process each.
        devices: the devices of each, which share its network card.
        bandwidth: bytes per second of the card in one direction; by default 1 Gbit/s.
        latency: seconds one way. A message costs it twice: gloo sends after the receiver has said
            where to.

    Returns:
        A [`Topology`][energy_attn.distributed.cost.Topology] of `(hosts, devices)`, or `(hosts,)`.

    Raises:
        TypeError: an argument that is not a number.
        ValueError: sizes below 1, a bandwidth that is not positive, a negative latency.

    Source: gloo's unbound buffers (`gloo/transport/tcp/pair.cc`).

    Examples:
        >>> from energy_attn.distributed import cost
        >>> hosts = cost.ethernet(4, 2, latency=2e-3)
        >>> [round(1e3 * link.latency, 1) for link in hosts.links]
        [4.1, 0.1]
    """
    check_integer("devices", devices, least=1)
    latency = 2 * check_finite_number("latency", latency)
    latency = latency + _LOOPBACK.latency if latency >= 0 else latency
    bandwidth = check_finite_number("bandwidth", bandwidth) / devices
    links = (Link(hosts, latency, bandwidth, "Ethernet"),)
    if devices > 1:
        links = (*links, dataclasses.replace(_LOOPBACK, devices=devices))
    return Topology(f"{hosts} hosts, gloo", links, "ring", _GLOO, "cpu")


def simulated(*sizes: int) -> Topology:
    """CPU devices simulated in one process, which copy from memory at each collective.

    Args:
        *sizes: of the mesh axes.

    Returns:
        A [`Topology`][energy_attn.distributed.cost.Topology] in which the number of collectives
        decides.

    Raises:
        TypeError: sizes that are no integers.
        ValueError: no sizes, or one below 1.

    Source: `--xla_force_host_platform_device_count` of XLA.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> cost.simulated(2, 4).devices
        8
    """
    links = tuple(dataclasses.replace(_THREADS, devices=size) for size in sizes)
    return Topology("one process", links, "levels", 5e-5, "cpu")


def topology_of(
    axis_names: Sequence[str], sizes: Sequence[int], platform: str, processes: int = 1
) -> Topology:
    """The usual network of mesh axes on a platform, where nothing more is known.

    With several processes the first axis is between hosts: on GPUs DGX H100 nodes, on CPUs a
    network of 1 Gbit/s and 0.1 ms. On TPUs all axes are in one slice of v5p; for several slices
    use [`tpu`][energy_attn.distributed.cost.tpu].

    Args:
        axis_names: the mesh axes, slow ones first.
        sizes: the size of each.
        platform: `"cpu"` or `"tpu"`, as `jax.default_backend()` says it; any other counts as a GPU.
        processes: `jax.process_count()`.

    Returns:
        A [`Topology`][energy_attn.distributed.cost.Topology] with a link for each axis.

    Raises:
        TypeError: an argument of another type.
        ValueError: no axes, sizes below 1, or not one for each axis.

    Source: none: these are defaults.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> cost.topology_of(("node", "device"), (16, 8), "gpu", processes=16).links[0].name
        '400 Gbit/s'
    """
    for name, x in (("axis_names", axis_names), ("sizes", sizes)):
        if not isinstance(x, Sequence) or isinstance(x, str):
            raise TypeError(f"{name}: wanted one for each mesh axis, got {received(x)}")
    if len(axis_names) != len(sizes) or not sizes:
        raise ValueError(f"sizes: wanted one for each of {tuple(axis_names)}, got {tuple(sizes)}")
    if not isinstance(platform, str):
        raise TypeError(f"platform: wanted a string, got {received(platform)}")
    if platform == "tpu":
        return tpu("v5p", tuple(sizes))
    if platform == "cpu" and processes == 1:
        return simulated(*sizes)
    within = math.prod(check_integer("sizes", size, least=1) for size in sizes[1:])
    known = ethernet(2, within) if platform == "cpu" else dgx_h100(2)
    between, inside = known.links[0], known.links[-1]
    usual = [inside if i or processes == 1 else between for i in range(len(sizes))]
    links = tuple(
        dataclasses.replace(link, devices=size) for link, size in zip(usual, sizes, strict=True)
    )
    return dataclasses.replace(known, links=links)


def _nodes(name: str, nodes: int, inside: Link, between: Link, launch: float) -> Topology:
    if check_integer("nodes", nodes, least=1) == 1:
        return Topology(name, (inside,), "tree", launch)
    between = dataclasses.replace(between, devices=nodes)
    return Topology(f"{nodes}x {name}", (between, inside), "tree", launch)


def all_axes(topology: Topology) -> tuple[int, ...]:
    """The places of all mesh axes in `Topology.links`."""
    return tuple(range(len(topology.links)))


def usual_topology(mesh: AbstractMesh, axes: tuple[str, ...]) -> Topology:
    """The usual network of some axes of a mesh on this platform."""
    device: Any = getattr(mesh, "abstract_device", None)
    platform = getattr(device, "platform", None) or jax.default_backend()
    sizes = tuple(mesh.shape[axis] for axis in axes)
    return topology_of(axes, sizes, platform, jax.process_count())
