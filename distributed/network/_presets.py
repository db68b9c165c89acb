"""Networks of machines that are made: a latency and a bandwidth inside a part of them, and between parts.

Figures are published by the makers, one direction, per device; unpublished overheads are marked as
assumed. They rank strategies; they are no measurement.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from energy_attn.kernels.internal import (
    check_choice,
    check_finite_number,
    check_integer,
    received,
)

from ._topology import Link, Topology


class Machine(NamedTuple):
    """Devices of one kind: the link inside a host (a TPU slice), and that between them.

    Links are of one device each; whoever lays a mesh over them sets their sizes.
    """

    name: str
    inside: Link
    between: Link
    all_reduce: str
    launch: float
    platform: str
    overhead: float = 0.0


# The smallest latencies that NCCL's own model assumes (NVIDIA/nccl, src/graph/tuning.cc, protocol
# LL): before a collective 6.6 µs, per hop 0.6 µs over NVLink, 1.0 over PCIe, 2.7 over a network.
_NCCL, _NVLINK, _PCIE, _NETWORK = 6.6e-6, 0.6e-6, 1.0e-6, 2.7e-6
# And RCCL's (ROCm/rccl, the same file): 12 µs, and 0.8 µs per hop within a node.
_RCCL, _XGMI = 12e-6, 0.8e-6
_INFINIBAND = Link(1, _NETWORK, 50e9, "400 Gbit/s")
# Assumed: a microsecond per ICI hop and to start a collective, ten between slices' hosts.
_ICI, _DCN = 1e-6, 10e-6
# Measured over loopback (docs/choosing.md): a core's time for a message of gloo's, and to start a
# collective. Assumed: 1 GB/s within a host.
_GLOO, _START = 2.5e-4, 1e-4
_LOOPBACK = Link(1, 0.0, 1e9, "loopback")
# Assumed: threads of one process meet in 50 µs and copy 5 GB/s each.
_THREADS = Link(1, 1e-6, 5e9, "memory")


def _tpu(chip: str, link: float, network: float) -> Machine:
    # a ring along an axis of the torus sends both ways
    ici = Link(1, _ICI, 2 * link, "ICI", torus=True)
    between = Link(1, _DCN, network, "data-centre network")
    return Machine(f"TPU {chip}", ici, between, "levels", _ICI, "tpu")


def _nvidia(name: str, inside: Link, between: Link = _INFINIBAND) -> Machine:
    return Machine(name, inside, between, "tree", _NCCL, "gpu")


# TPUs: one-way bytes per second of a chip's ICI link, and of its part of the data-centre network.
# Google Cloud's pages of v5e, v5p, v6e and tpu7x give 400, 1200, 800 and 1200 GB/s in both directions over
# 4, 6, 4 and 6 links, 50 and 100 Gbit/s per chip of v5p and tpu7x between slices, and 6.4 and 25.6
# Tbit/s per pod of 256 chips of v5e and v6e. The paper on v4 (arXiv 2304.01433, table 4) gives six links
# of 50 GB/s; its data-centre network is assumed to be v5p's.
CHIPS = {
    "v4": _tpu("v4", 50e9, 6.25e9),
    "v5e": _tpu("v5e", 50e9, 3.125e9),
    "v5p": _tpu("v5p", 100e9, 6.25e9),
    "v6e": _tpu("v6e", 100e9, 12.5e9),
    "tpu7x": _tpu("tpu7x", 100e9, 12.5e9),
}
_NVLINK_4 = Link(1, _NVLINK, 450e9, "NVLink 4")
GPUS = {
    "H100": _nvidia("DGX H100", _NVLINK_4),
    "H200": _nvidia("DGX H200", _NVLINK_4),
    "MI300X": Machine(
        "MI300X",
        Link(1, _XGMI, 7 * 64e9, "Infinity Fabric"),
        _INFINIBAND,
        "tree",
        _RCCL,
        "gpu",
    ),
    # assumed: hosts of consumer cards have 10 Gbit/s, which their cards share
    "RTX 4090": _nvidia(
        "RTX 4090", Link(1, _PCIE, 31.5e9, "PCIe 4.0 x16"), Link(1, 3e-5, 1.25e9, "10 Gbit/s")
    ),
}
THREADS = Machine("one process", _THREADS, _THREADS, "levels", 5e-5, "cpu")


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
    return _nodes(GPUS["H100"], nodes)


def dgx_h200(nodes: int = 1) -> Topology:
    """Nodes of eight H200, with the network of H100s: NVLink 4, and 400 Gbit/s for each GPU.

    Args:
        nodes: how many; one has no slow axis.

    Returns:
        A [`Topology`][energy_attn.distributed.cost.Topology] of `(nodes, 8)` devices, or `(8,)`.

    Raises:
        TypeError: `nodes` is no integer.
        ValueError: `nodes` is below 1.

    Source: NVIDIA DGX H200 data sheet (900 GB/s per GPU in both directions, ConnectX-7).

    Examples:
        >>> from energy_attn.distributed import cost
        >>> cost.dgx_h200(2).links[1].name
        'NVLink 4'
    """
    return _nodes(GPUS["H200"], nodes)


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
    return _nodes(GPUS["MI300X"], nodes)


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
    machine = GPUS["RTX 4090"]
    link = dataclasses.replace(machine.inside, devices=devices)
    return over(machine, (link,), f"{devices}x {machine.name}")


def tpu(chip: str, axes: Sequence[int], slices: int = 1) -> Topology:
    """TPU slices: each a torus of chips, joined by the data-centre network.

    Args:
        chip: `"v4"`, `"v5e"`, `"v5p"`, `"v6e"` or `"tpu7x"`.
        axes: the size of each axis of the torus, or of the mesh axes laid over it.
        slices: how many slices; one has no slow axis.

    Returns:
        A [`Topology`][energy_attn.distributed.cost.Topology] whose first axis are the slices, if
        there are several.

    Raises:
        TypeError: sizes that are no integers.
        ValueError: an unknown chip, no axes, sizes below 1.

    Source: Google Cloud's system architecture pages of TPU v5e, v5p, v6e and tpu7x; for v4, N. Jouppi
        et al., TPU v4 (arXiv 2304.01433), table 4.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> cost.tpu("v5p", (2, 2, 2), slices=16).devices
        128
    """
    check_choice("chip", chip, tuple(CHIPS))
    if not isinstance(axes, Sequence) or isinstance(axes, str) or not axes:
        raise ValueError(f"axes: wanted the sizes of one or more axes, got {received(axes)}")
    machine = CHIPS[chip]
    links = tuple(dataclasses.replace(machine.inside, devices=size) for size in axes)
    slices = check_integer("slices", slices, least=1)
    if slices > 1:
        links = (dataclasses.replace(machine.between, devices=slices), *links)
    name = f"TPU {chip} {'x'.join(map(str, axes))}"
    return over(machine, links, name if slices == 1 else f"{slices} slices of {name}")


def ethernet(
    hosts: int,
    devices: int = 1,
    *,
    bandwidth: float = 1.25e8,
    latency: float = 1e-4,
    overhead: float = _GLOO,
) -> Topology:
    """CPU processes on hosts, one or more devices each, that talk by gloo over TCP.

    Args:
        hosts: how many, one process each.
        devices: the devices of each, which share its network card.
        bandwidth: bytes per second of the card in one direction; by default 1 Gbit/s.
        latency: seconds one way. A message costs it twice: gloo sends after the receiver has said
            where to.
        overhead: seconds of a core that a message takes. Where all processes share the cores of one
            machine, it is as many times longer as there are devices for each core.

    Returns:
        A [`Topology`][energy_attn.distributed.cost.Topology] of `(hosts, devices)`, or `(hosts,)`.

    Raises:
        TypeError: an argument that is not a number.
        ValueError: sizes below 1, a bandwidth that is not positive, a negative latency or overhead.

    Source: gloo's unbound buffers (`gloo/transport/tcp/pair.cc`).

    Examples:
        >>> from energy_attn.distributed import cost
        >>> hosts = cost.ethernet(4, 2, latency=2e-3)
        >>> [round(1e3 * link.latency, 2) for link in hosts.links]
        [4.0, 0.0]
    """
    check_integer("devices", devices, least=1)
    for name, seconds in (("latency", latency), ("overhead", overhead)):
        if check_finite_number(name, seconds) < 0:
            raise ValueError(f"{name}: wanted seconds, 0 or more, got {seconds}")
    bandwidth = check_finite_number("bandwidth", bandwidth) / devices
    links = (Link(hosts, 2 * latency, bandwidth, "Ethernet", sharing=devices),)
    if devices > 1:
        links = (*links, dataclasses.replace(_LOOPBACK, devices=devices))
    return Topology(f"{hosts} hosts, gloo", links, "ring", _START, "cpu", overhead)


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
    return over(THREADS, tuple(dataclasses.replace(_THREADS, devices=size) for size in sizes))


def processes(within: int) -> Machine:
    """The machine of CPU processes on hosts of so many devices."""
    made = ethernet(2, within)
    between, rest = made.links[0], (made.all_reduce, made.launch, made.platform, made.overhead)
    return Machine("hosts, gloo", _LOOPBACK, between, *rest)


def over(machine: Machine, links: tuple[Link, ...], name: str = "") -> Topology:
    """The network of a machine's devices with these links along the mesh axes."""
    rest = machine.all_reduce, machine.launch, machine.platform, machine.overhead
    return Topology(name or machine.name, links, *rest)


def _nodes(machine: Machine, nodes: int) -> Topology:
    inside = dataclasses.replace(machine.inside, devices=8)
    if check_integer("nodes", nodes, least=1) == 1:
        return over(machine, (inside,))
    between = dataclasses.replace(machine.between, devices=nodes)
    return over(machine, (between, inside), f"{nodes}x {machine.name}")
