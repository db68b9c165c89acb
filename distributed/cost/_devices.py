"""The network of a mesh, from the attributes of its devices."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from energy_attn.kernels.internal import check_names, private_names, received

from ..runtime._mesh import network_part
from ._interconnects import INTERCONNECTS, Interconnect, topology
from ._topology import Link, Topology


def topology_of_mesh(mesh: Mesh, axes: str | Sequence[str] | None = None) -> Topology:
    """The network of a mesh, from the attributes of its devices.

    `Device.device_kind` determines the machine. Along an axis that changes `Device.slice_index` (without
    one, `process_index`), devices communicate over the network between slices or hosts. On TPUs
    `Device.coords` determine how many chips neighbours of the mesh are apart, and whether the ends of an
    axis along one dimension of the torus are joined; devices of one chip share its links.

    Args:
        mesh: with its devices, also those of `jax.experimental.topologies`.
        axes: of the mesh, slow ones first; None: all.

    Returns:
        A [`Topology`][energy_attn.distributed.cost.Topology] with a link for each axis.

    Raises:
        TypeError: `mesh` is no mesh with devices.
        ValueError: axes that the mesh does not have.

    Source: for the figures, see [`topology`][energy_attn.distributed.cost.topology]. GPUs of unknown kinds count as
        those of DGX H100, TPUs as v5p, CPU processes as hosts with 1 Gbit/s and 0.1 ms between them. Google
        Cloud's pages say which axes of a torus are joined.

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
    """The network of some axes of the mesh in force, from its devices where they are known."""
    device: Any = getattr(mesh, "abstract_device", None)
    platform = getattr(device, "platform", None) or jax.default_backend()
    kind = getattr(device, "device_kind", None) or ""
    devices = _devices(mesh, kind)
    if devices is not None:
        return _of_devices(devices, [mesh.axis_names.index(axis) for axis in axes])
    sizes = tuple(mesh.shape[axis] for axis in axes)
    return of_sizes(sizes, platform, kind, jax.process_count())


def of_sizes(sizes: tuple[int, ...], platform: str, kind: str, processes: int) -> Topology:
    """The network of axes with unknown devices: the first is between processes, TPUs are in one slice."""
    name = _name(platform, kind, processes > 1)
    if processes > 1 and platform != "tpu":
        return topology(name, sizes[1:], nodes=sizes[0])
    return topology(name, sizes)


def _devices(mesh: AbstractMesh, kind: str) -> np.ndarray | None:
    """The devices of a mesh: those of the mesh in force, or all devices, if their number is right."""
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
    """The row of the table for devices of a kind, in several processes or one."""
    if platform == "cpu":
        return "ethernet" if between_processes else "simulated"
    matching = (
        name
        for name, machine in INTERCONNECTS.items()
        if any(f" {words} " in f" {kind} " for words in machine.kinds)
    )
    return next(matching, "tpu_v5p" if platform == "tpu" else "dgx_h100")


def _of_devices(devices: np.ndarray, axes: Sequence[int]) -> Topology:
    """The network along some axes of an array of devices."""
    first = devices.flat[0]
    parts = np.vectorize(network_part, otypes=[object])(devices)
    counts = [int((parts == part).sum()) for part in set(parts.flat)]
    name = _name(first.platform, first.device_kind, len(counts) > 1)
    machine, links = INTERCONNECTS[name], []
    for axis in axes:
        slow = bool((parts != parts.take([0], axis)).any())
        link = machine.link(devices.shape[axis], max(counts), slow)
        on_chips = machine.platform == "tpu"
        links.append(_on_chips(machine, link, devices, axis) if on_chips else link)
    return machine.over(name, links)


def _on_chips(machine: Interconnect, link: Link, devices: np.ndarray, axis: int) -> Link:
    """A chip's link along an axis, adjusted for devices that share it and for the distance of chips."""
    places = np.empty(devices.size, object)
    for i, device in enumerate(devices.flat):
        places[i] = (network_part(device), *device.coords)
    places = places.reshape(devices.shape)
    shared = link.bandwidth * len(set(places.flat)) / devices.size
    link = dataclasses.replace(link, bandwidth=shared)
    if not link.torus:
        return link
    every = np.array([place[1:] for place in places.flat])
    lengths = every.max(0) - every.min(0) + 1

    def apart(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        steps = np.abs(np.subtract(a[1:], b[1:]))
        around = np.where(lengths % machine.joined == 0, lengths - steps, steps)
        return int(np.minimum(steps, around).sum())

    row = np.moveaxis(places, axis, -1).reshape(-1, devices.shape[axis])[0]
    # XLA orders its own ring over the chips of several dimensions
    neighbours = max(1, min((apart(*pair) for pair in itertools.pairwise(row)), default=1))
    one_dimension = sum(len(set(steps)) > 1 for steps in zip(*row, strict=True)) == 1
    # over a line, messages around the end travel all the way back
    line = one_dimension and apart(row[0], row[-1]) > neighbours
    stretch = neighbours * (2 if line else 1)
    return dataclasses.replace(
        link, latency=link.latency * stretch, bandwidth=link.bandwidth / stretch
    )
