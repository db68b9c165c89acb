"""The networks of machines by name, and of the devices of a mesh.

The makers publish the figures, for one direction and device; other figures are marked as assumed. They serve to rank
strategies, and are not measurements.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from energy_attn.kernels.internal import checks, private_names

from ..runtime._mesh import network_part
from ._network import Link, Topology


class Interconnect(NamedTuple):
    """Links of one kind of device: inside a host (a TPU slice), and between hosts."""

    platform: str
    inside: Link
    between: Link
    all_reduce: str
    launch: float
    source: str  # of latencies and bandwidths
    kinds: tuple[str, ...] = ()  # words of `Device.device_kind`
    overhead: float = 0.0
    wraps: int = 4  # an axis of a torus wraps around if its length is a multiple

    def link(self, devices: int, within: int, slow: bool) -> Link:
        link = self.between if slow else self.inside
        if (
            slow and self.platform == "cpu"
        ):  # the devices of a process share the network card of a host
            link = dataclasses.replace(link, bandwidth=link.bandwidth / within, sharing=within)
        return dataclasses.replace(link, devices=devices)

    def over(self, name: str, links: Sequence[Link]) -> Topology:
        return Topology(
            name, tuple(links), self.all_reduce, self.launch, self.platform, self.overhead
        )


# The least latencies in NCCL's own model (NVIDIA/nccl, src/graph/tuning.cc, protocol LL), and RCCL's (ROCm/rccl, the
# same file): 6.6 and 12 µs before a collective; per hop 0.6 µs over NVLink, 1.0 over PCIe, 2.7 over a network, and
# 0.8 within a node of MI300X.
_NCCL, _RCCL = 6.6e-6, 12e-6
_NVLINK = Link(1, 0.6e-6, 450e9, "NVLink 4")
_INFINIBAND = Link(1, 2.7e-6, 50e9, "400 Gbit/s")
_DGX = "data sheet: 900 GB/s per GPU in both directions, a ConnectX-7 for each; latencies: NCCL"
_CLOUD = "Google Cloud's page of its architecture: a chip's links, Gbit/s of a pod or chip; latencies: assumed"
_THREADS = Link(1, 1e-6, 5e9, "memory")


def _tpu(
    link: float, network: float, kinds: tuple[str, ...], wraps: int = 4, source: str = _CLOUD
) -> Interconnect:
    """A TPU, from bytes per second in one direction over an ICI link and between slices."""
    ici = Link(1, 1e-6, 2 * link, "ICI", torus=True)  # a ring uses two links of a chip
    between = Link(1, 1e-5, network, "data-centre network")
    return Interconnect("tpu", ici, between, "levels", 1e-6, source, kinds, wraps=wraps)


INTERCONNECTS = {
    "dgx_h100": Interconnect(
        "gpu", _NVLINK, _INFINIBAND, "tree", _NCCL, f"NVIDIA DGX H100 {_DGX}", ("H100",)
    ),
    "dgx_h200": Interconnect(
        "gpu", _NVLINK, _INFINIBAND, "tree", _NCCL, f"NVIDIA DGX H200 {_DGX}", ("H200",)
    ),
    "mi300x": Interconnect(
        *("gpu", Link(1, 0.8e-6, 7 * 64e9, "Infinity Fabric"), _INFINIBAND, "tree", _RCCL),
        "AMD Instinct MI300X platform data sheet: seven links of 64 GB/s in each direction; latencies: RCCL",
        ("MI300X",),
    ),
    "rtx_4090": Interconnect(
        *("gpu", Link(1, 1e-6, 31.5e9, "PCIe 4.0 x16"), Link(1, 3e-5, 1.25e9, "10 Gbit/s")),
        *("tree", _NCCL),
        "PCI Express 4.0: 16 GT/s on 16 lanes, coded 128/130; latencies: NCCL; between hosts: assumed",
        ("RTX 4090",),
    ),
    "tpu_v4": _tpu(
        *(50e9, 6.25e9, ("TPU v4",)),
        source="N. Jouppi et al., TPU v4 (arXiv 2304.01433), table 4; between slices and latencies: assumed",
    ),
    "tpu_v5e": _tpu(50e9, 3.125e9, ("TPU v5 lite", "TPU v5e"), wraps=16),
    "tpu_v5p": _tpu(100e9, 6.25e9, ("TPU v5", "TPU v5p")),
    "tpu_v6e": _tpu(100e9, 12.5e9, ("TPU v6", "TPU v6e"), wraps=16),
    "tpu_7x": _tpu(100e9, 12.5e9, ("TPU7x", "TPU v7", "TPU v7x")),
    # gloo waits for the receiver's buffer, so that a message takes the 0.1 ms of a wire twice
    "ethernet": Interconnect(
        *("cpu", Link(1, 0.0, 1e9, "loopback"), Link(1, 2e-4, 1.25e8, "Ethernet"), "ring", 1e-4),
        "1 Gbit/s Ethernet; gloo (gloo/transport/tcp/pair.cc), with launch and overhead as measured: docs/choosing.md",
        overhead=2.5e-4,
    ),
    "simulated": Interconnect(
        *("cpu", _THREADS, _THREADS, "levels", 5e-5),
        "assumed: threads of one process meet in 50 µs and copy 5 GB/s each",
    ),
}


def topology(
    machine: str | Mesh,
    sizes: Sequence[int] = (),
    *,
    nodes: int | None = None,
    axes: str | Sequence[str] | None = None,
    latency: float | Sequence[float] | None = None,
    bandwidth: float | Sequence[float] | None = None,
    launch: float | None = None,
    overhead: float | None = None,
) -> Topology:
    r"""The network of a named kind of machine, or of the devices of a mesh, along the axes of a mesh.

    `Device.device_kind` determines the machine of a mesh. Along an axis that changes `Device.slice_index` (or
    `process_index`, without slices), devices communicate over the network between slices or hosts. On TPUs
    `Device.coords` determine the distance of neighbours of the mesh in chips, and whether an
    axis along one dimension of the torus wraps around. Devices of one chip share its links.
    A message of $n$ bytes along an axis takes $\alpha + n / \beta$ seconds:

    | name | inside a node: $\alpha$ in µs, $\beta$ in GB/s | between nodes |
    |---|---|---|
    | `"dgx_h100"`, `"dgx_h200"` | NVLink 4: 0.6, 450 | 400 Gbit/s: 2.7, 50 |
    | `"mi300x"` | Infinity Fabric: 0.8, 448 | 400 Gbit/s: 2.7, 50 |
    | `"rtx_4090"` | PCIe 4.0 x16: 1, 31.5 | 10 Gbit/s: 30, 1.25 |
    | `"tpu_v4"`, `"tpu_v5e"`; `"tpu_v5p"`, `"tpu_v6e"`, `"tpu_7x"` | a torus: 1, 100; 200 | 10, 3.1 to 12.5 |
    | `"ethernet"`: processes on CPUs, gloo | loopback: 0, 1 | 200, 0.125 shared by a node's devices |
    | `"simulated"`: CPU devices of one process | memory: 1, 5 | |

    Args:
        machine: the name of a kind of machine, as above; or a mesh with its devices, also one from
            `jax.experimental.topologies`.
        sizes: the sizes of the mesh axes inside a node (a host, or a TPU slice) of a named machine.
        nodes: the number of nodes of a named machine along a first, slow axis; None: no such axis.
        axes: axes of the mesh, slow ones first; None: all.
        latency: seconds for each axis, instead of the table; a single number is for the first axis. For gloo, which
            waits for the receiver's buffer, the time of a round trip.
        bandwidth: bytes per second for each axis, or for the first, that each device sends in one direction while
            all of them send.
        launch: seconds of any collective before its first message; None: the machine's.
        overhead: seconds of a processor for each message; None: the machine's, 0.25 ms over Ethernet. Where
            all processes share the cores of one machine, multiply it by the number of devices for each core.

    Returns:
        A [`Topology`][energy_attn.distributed.cost.Topology] over `(nodes, *sizes)`, or `sizes`, or with a link for
        each axis of the mesh.

    Raises:
        TypeError: `machine` is neither a name nor a mesh with devices, sizes are no integers, or seconds and
            bandwidths are no numbers.
        ValueError: an unknown name, no axes, axes that the mesh does not have, sizes with a mesh, sizes below 1,
            a negative time, a bandwidth that is not positive, or not one for each axis.

    Source: the makers' data sheets, Google Cloud's pages of TPUs and N. Jouppi et al. (arXiv 2304.01433); for
        latencies of GPUs, the `tuning.cc` of NCCL and RCCL. The latencies of TPUs and of CPUs are assumed. GPUs of
        unknown kinds count as DGX H100, TPUs as v5p, CPU processes as hosts with 1 Gbit/s and 0.1 ms between them.

    Examples:
        >>> import jax
        >>> from energy_attn.distributed import cost
        >>> cost.topology("dgx_h100", (8,), nodes=16).devices
        128
        >>> measured = cost.topology("ethernet", (2,), nodes=4, latency=4e-3, bandwidth=(5e7, 2e9))
        >>> [(link.latency, link.bandwidth) for link in measured.links]
        [(0.004, 50000000.0), (0.0, 2000000000.0)]
        >>> cost.topology(jax.make_mesh((jax.device_count(),), ("device",))).devices == jax.device_count()
        True
    """
    if isinstance(machine, str):
        if axes is not None:
            raise ValueError(
                f"axes: wanted None for the name of a machine, got {checks.received(axes)}"
            )
        interconnect = _of_machine(machine, sizes, nodes)
    elif len(sizes) or nodes is not None:
        raise ValueError("sizes: wanted no sizes and no nodes for a mesh, which has its own")
    else:
        interconnect = _of_mesh(machine, axes)
    # measured numbers replace the table's
    links = list(interconnect.links)
    for field, option in (("latency", latency), ("bandwidth", bandwidth)):
        if option is None:
            continue
        defaults = [getattr(link, field) for link in links[1:]]
        numbers = option if isinstance(option, Sequence) else [option, *defaults]
        if len(numbers) != len(links):
            raise ValueError(
                f"{field}: wanted one number, or one for each of {len(links)} axes, got {option}"
            )
        links = [
            dataclasses.replace(link, **{field: x}) for link, x in zip(links, numbers, strict=True)
        ]
    options = {"launch": launch, "overhead": overhead}
    options = {key: x for key, x in options.items() if x is not None}
    return dataclasses.replace(interconnect, links=tuple(links), **options)


def _of_machine(name: str, sizes: Sequence[int], nodes: int | None) -> Topology:
    checks.check_choice("machine", name, tuple(INTERCONNECTS))
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise TypeError(f"sizes: wanted one for each mesh axis, got {checks.received(sizes)}")
    machine = INTERCONNECTS[name]
    within = math.prod(checks.check_integer("sizes", size, least=1) for size in sizes)
    links = [machine.link(size, within, slow=False) for size in sizes]
    if nodes is not None:
        links.insert(
            0, machine.link(checks.check_integer("nodes", nodes, least=1), within, slow=True)
        )
    return machine.over(name, links)


def _of_mesh(mesh: object, axes: str | Sequence[str] | None) -> Topology:
    if not isinstance(mesh, Mesh) or mesh.empty:
        raise TypeError(
            f"machine: wanted a name or a jax.sharding.Mesh of devices, got {checks.received(mesh)}"
        )
    names = mesh.axis_names if axes is None else checks.check_names("axes", axes, "mesh axes")
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown:
        raise ValueError(f"axes: wanted axes of the mesh, {mesh.axis_names}, got {unknown[0]!r}")
    return _of_devices(mesh.devices, [mesh.axis_names.index(name) for name in names])


def usual_topology(mesh: AbstractMesh, axes: tuple[str, ...]) -> Topology:
    """Network along some axes of the mesh in force, from its devices if they are known."""
    device: Any = getattr(mesh, "abstract_device", None)
    platform = getattr(device, "platform", None) or jax.default_backend()
    kind = getattr(device, "device_kind", None) or ""
    devices = _devices(mesh, kind)
    if devices is not None:
        return _of_devices(devices, [mesh.axis_names.index(axis) for axis in axes])
    sizes = tuple(mesh.shape[axis] for axis in axes)
    return of_sizes(sizes, platform, kind, jax.process_count())


def of_sizes(sizes: tuple[int, ...], platform: str, kind: str, processes: int) -> Topology:
    """Network along axes of unknown devices: the first axis is between processes; TPUs share one slice."""
    name = _name(platform, kind, processes > 1)
    if processes > 1 and platform != "tpu":  # the processes of a TPU slice share its fast network
        return topology(name, sizes[1:], nodes=sizes[0])
    return topology(name, sizes)


def _devices(mesh: AbstractMesh, kind: str) -> np.ndarray | None:
    """Devices of the mesh in force if it equals `mesh`, else all devices if their number fits."""
    try:
        mesh_in_force: Mesh = private_names("mesh").in_force()
    except NotImplementedError:
        mesh_in_force = Mesh(np.empty((), object), ())
    if not mesh_in_force.empty and tuple(mesh_in_force.shape.items()) == tuple(mesh.shape.items()):
        return mesh_in_force.devices
    all_devices = jax.devices()
    sizes = tuple(mesh.shape.values())
    if len(all_devices) != math.prod(sizes) or kind not in ("", all_devices[0].device_kind):
        return None
    return np.array(all_devices, dtype=object).reshape(sizes)


def _name(platform: str, kind: str, between_processes: bool) -> str:
    if platform == "cpu":
        return "ethernet" if between_processes else "simulated"
    matching = (
        name
        for name, machine in INTERCONNECTS.items()
        if any(f" {words} " in f" {kind} " for words in machine.kinds)
    )
    return next(matching, "tpu_v5p" if platform == "tpu" else "dgx_h100")


def _of_devices(devices: np.ndarray, axes: Sequence[int]) -> Topology:
    first = devices.flat[0]
    parts = np.vectorize(network_part, otypes=[object])(devices)
    counts = [int((parts == part).sum()) for part in set(parts.flat)]
    name = _name(first.platform, first.device_kind, len(counts) > 1)
    machine, links = INTERCONNECTS[name], []
    for axis in axes:
        # an axis between slices or hosts, somewhere along the mesh
        slow = bool((parts != parts.take([0], axis)).any())
        link = machine.link(devices.shape[axis], max(counts), slow)
        on_chips = machine.platform == "tpu"
        links.append(_on_chips(machine, link, devices, axis) if on_chips else link)
    return machine.over(name, links)


def _on_chips(machine: Interconnect, link: Link, devices: np.ndarray, axis: int) -> Link:
    """Link of a chip along an axis, adjusted for devices that share it and for the distance of chips."""
    places = np.empty(devices.size, object)
    for i, device in enumerate(devices.flat):
        places[i] = (network_part(device), *device.coords)
    places = places.reshape(devices.shape)
    # two cores of one chip have its links in common
    shared = link.bandwidth * len(set(places.flat)) / devices.size
    link = dataclasses.replace(link, bandwidth=shared)
    if not link.torus:
        return link
    coordinates = np.array([place[1:] for place in places.flat])
    lengths = coordinates.max(0) - coordinates.min(0) + 1

    def distance(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        steps = np.abs(np.subtract(a[1:], b[1:]))
        around = np.where(lengths % machine.wraps == 0, lengths - steps, steps)
        return int(np.minimum(steps, around).sum())

    row = np.moveaxis(places, axis, -1).reshape(-1, devices.shape[axis])[0]
    # the least distance, since XLA orders its own ring over the chips of several dimensions
    neighbours = max(1, min((distance(*pair) for pair in itertools.pairwise(row)), default=1))
    one_dimension = sum(len(set(steps)) > 1 for steps in zip(*row, strict=True)) == 1
    # over a line, messages around the end travel all the way back
    line = one_dimension and distance(row[0], row[-1]) > neighbours
    stretch = neighbours * (2 if line else 1)
    return dataclasses.replace(
        link, latency=link.latency * stretch, bandwidth=link.bandwidth / stretch
    )
