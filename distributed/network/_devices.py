"""The network of a mesh, from what its devices say of themselves."""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from energy_attn.kernels.internal import check_integer, check_names, private_names, received

from ..runtime._mesh import network_part
from ._file import topology_from_environment
from ._presets import CHIPS, GPUS, THREADS, Machine, over, processes
from ._topology import Link, Topology

# `Device.device_kind` of each machine, as JAX reports it.
_KINDS = {
    r"TPU v4\b": CHIPS["v4"],
    r"TPU v5 ?(lite|e)\b": CHIPS["v5e"],
    r"TPU v5": CHIPS["v5p"],
    r"TPU v6": CHIPS["v6e"],
    r"TPU ?v?7": CHIPS["tpu7x"],
    r"\bH100\b": GPUS["H100"],
    r"\bH200\b": GPUS["H200"],
    r"\bMI300X\b": GPUS["MI300X"],
    r"\bRTX 4090\b": GPUS["RTX 4090"],
}
# Google Cloud's pages: the ends of an axis of the torus are joined where its length is a multiple of
# 4 (v4, v5p, tpu7x) or 16 (v5e, v6e).
_JOINED = {"TPU v5e": 16, "TPU v6e": 16}


def topology_of(
    axis_names: Sequence[str],
    sizes: Sequence[int],
    platform: str,
    processes: int = 1,
    *,
    kind: str = "",
) -> Topology:
    """The usual network of mesh axes on a platform, where the devices are not at hand.

    With several processes the first axis is between hosts, but on TPUs, where all axes are in one
    slice. [`topology_of_mesh`][energy_attn.distributed.cost.topology_of_mesh] reads the devices of a
    mesh, and [`tpu`][energy_attn.distributed.cost.tpu] has several slices.

    Args:
        axis_names: the mesh axes, slow ones first.
        sizes: the size of each.
        platform: `"cpu"` or `"tpu"`, as `jax.default_backend()` says it; any other counts as a GPU.
        processes: `jax.process_count()`.
        kind: `Device.device_kind`. Of one that is not known, and by default, the network is that of
            TPU v5p or of DGX H100; of CPU processes, 1 Gbit/s and 0.1 ms.

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
        >>> cost.topology_of(("x", "y"), (4, 4), "tpu", kind="TPU v6 lite").name
        'TPU v6e'
    """
    for name, x in (("axis_names", axis_names), ("sizes", sizes)):
        if not isinstance(x, Sequence) or isinstance(x, str):
            raise TypeError(f"{name}: wanted one for each mesh axis, got {received(x)}")
    if len(axis_names) != len(sizes) or not sizes:
        raise ValueError(f"sizes: wanted one for each of {tuple(axis_names)}, got {tuple(sizes)}")
    for name, x in (("platform", platform), ("kind", kind)):
        if not isinstance(x, str):
            raise TypeError(f"{name}: wanted a string, got {received(x)}")
    within = math.prod(check_integer("sizes", size, least=1) for size in sizes[1:])
    machine = _machine(platform, kind, processes > 1, within)
    several = processes > 1 and platform != "tpu"
    links = (machine.between if several and not i else machine.inside for i in range(len(sizes)))
    sized = zip(links, sizes, strict=True)
    return over(machine, tuple(dataclasses.replace(link, devices=size) for link, size in sized))


def topology_of_mesh(mesh: Mesh, axes: str | Sequence[str] | None = None) -> Topology:
    """The network of a mesh, from what its devices say of themselves.

    `Device.device_kind` says which machine it is. Along an axis that changes `Device.slice_index`
    (without one, `process_index`), devices talk over the network between slices or hosts. On TPUs
    `Device.coords` say how many chips neighbours of the mesh are apart, and whether the ends of an axis
    along one dimension of the torus are joined; devices of one chip share its links.

    Args:
        mesh: with its devices, also those of `jax.experimental.topologies`.
        axes: of the mesh, slow ones first; None: all.

    Returns:
        A [`Topology`][energy_attn.distributed.cost.Topology] with a link for each axis.

    Raises:
        TypeError: `mesh` is no mesh with devices.
        ValueError: axes that the mesh does not have.

    Source: for the figures, the makers' pages: see [`tpu`][energy_attn.distributed.cost.tpu] and
        [`dgx_h100`][energy_attn.distributed.cost.dgx_h100]. For devices of unknown kinds, those of
        [`topology_of`][energy_attn.distributed.cost.topology_of].

    Examples:
        >>> import jax
        >>> from energy_attn.distributed import cost, make_mesh
        >>> mesh = make_mesh((jax.device_count(),), ("device",))
        >>> cost.topology_of_mesh(mesh).devices == jax.device_count()
        True
    """
    if not isinstance(mesh, Mesh) or mesh.empty:
        raise TypeError(f"mesh: wanted a jax.sharding.Mesh of devices, got {received(mesh)}")
    names = mesh.axis_names if axes is None else check_names("axes", axes, "mesh axes")
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown:
        raise ValueError(f"axes: wanted axes of the mesh, {mesh.axis_names}, got {unknown[0]!r}")
    return _of_devices(mesh.devices, [mesh.axis_names.index(name) for name in names])


def usual_topology(mesh: AbstractMesh, axes: tuple[str, ...]) -> Topology:
    """The network of some axes of the mesh in force: measured, or as its devices say."""
    measured = topology_from_environment(dict(mesh.shape), axes)
    if measured is not None:
        return measured
    device: Any = getattr(mesh, "abstract_device", None)
    platform = getattr(device, "platform", None) or jax.default_backend()
    kind = getattr(device, "device_kind", None) or ""
    devices = _devices(mesh, kind)
    if devices is not None:
        return _of_devices(devices, [mesh.axis_names.index(axis) for axis in axes])
    sizes = tuple(mesh.shape[axis] for axis in axes)
    return topology_of(axes, sizes, platform, jax.process_count(), kind=kind)


def _devices(mesh: AbstractMesh, kind: str) -> np.ndarray | None:
    """The devices of a mesh: those of the mesh in force, or all, in their order, if they are as many."""
    try:
        found: Mesh = private_names("mesh").in_force()
    except NotImplementedError:
        found = Mesh(np.empty((), object), ())
    if not found.empty and tuple(found.shape.items()) == tuple(mesh.shape.items()):
        return found.devices
    every = jax.devices()
    sizes = tuple(mesh.shape.values())
    if len(every) != math.prod(sizes) or kind not in ("", every[0].device_kind):
        return None
    return np.array(every, dtype=object).reshape(sizes)


def _machine(platform: str, kind: str, several: bool, within: int) -> Machine:
    """The machine of devices of a kind, in several processes or one, so many in each of them."""
    if platform == "cpu":
        return processes(within) if several else THREADS
    known = (machine for pattern, machine in _KINDS.items() if re.search(pattern, kind))
    return next(known, CHIPS["v5p"] if platform == "tpu" else GPUS["H100"])


def _of_devices(devices: np.ndarray, axes: Sequence[int]) -> Topology:
    """The network along some axes of an array of devices."""
    first = devices.flat[0]
    parts = np.vectorize(network_part, otypes=[object])(devices)
    counts = [int((parts == part).sum()) for part in set(parts.flat)]
    machine = _machine(first.platform, first.device_kind, len(counts) > 1, max(counts))
    across = [bool((parts != parts.take([0], axis)).any()) for axis in axes]
    links = []
    for axis, slow in zip(axes, across, strict=True):
        link = machine.between if slow else machine.inside
        if machine.platform == "tpu":
            link = _on_chips(machine, link, devices, axis, slow)
        links.append(dataclasses.replace(link, devices=devices.shape[axis]))
    name = machine.name
    if len(counts) > 1 and machine.platform != "cpu":
        name = f"{len(counts)} {'slices' if machine.platform == 'tpu' else 'hosts'} of {name}"
    return over(machine, tuple(links), name)


def _on_chips(machine: Machine, link: Link, devices: np.ndarray, axis: int, slow: bool) -> Link:
    """A chip's link as the devices along an axis have it: shared, and longer where chips are apart."""
    places = np.empty(devices.size, object)
    for i, device in enumerate(devices.flat):
        places[i] = (network_part(device), *device.coords)
    places = places.reshape(devices.shape)
    link = dataclasses.replace(
        link, bandwidth=link.bandwidth * len(set(places.flat)) / devices.size
    )
    if slow:
        return link
    every = np.array([place[1:] for place in places.flat])
    lengths = every.max(0) - every.min(0) + 1
    multiple = _JOINED.get(machine.name, 4)

    def apart(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        steps = np.abs(np.subtract(a[1:], b[1:]))
        return int(
            np.where(lengths % multiple == 0, np.minimum(steps, lengths - steps), steps).sum()
        )

    row = np.moveaxis(places, axis, -1).reshape(-1, devices.shape[axis])[0]
    # XLA lays its own ring over the chips of several dimensions, whatever their order
    neighbours = max(1, min((apart(*pair) for pair in itertools.pairwise(row)), default=1))
    one_dimension = sum(len(set(steps)) > 1 for steps in zip(*row, strict=True)) == 1
    # over a line, what goes around the end goes all the way back
    line = one_dimension and apart(row[0], row[-1]) > neighbours
    stretch = neighbours * (2 if line else 1)
    return dataclasses.replace(
        link, latency=link.latency * stretch, bandwidth=link.bandwidth / stretch
    )
