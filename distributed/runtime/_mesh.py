"""Meshes of devices."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from energy_attn.kernels.internal import checks

_SLICE, _PROCESS = "slice_index", "process_index"  # of a device


def make_mesh(
    shape: Sequence[int] | None = None,
    axis_names: Sequence[str] = ("node", "device"),
    *,
    devices: Sequence[Any] | None = None,
    explicit: bool = False,
) -> Mesh:
    """A mesh of devices with named axes, slow axes first.

    Devices that share a fast network are neighbours along the last axes, and hosts along the first.
    The parts that a slow network joins are TPU slices (or, on GPUs, hosts) where
    `Device.slice_index` tells them apart, and processes otherwise; the first axes take the factors
    of their number. Within each slice `jax.experimental.mesh_utils` makes neighbours of the mesh
    neighbours on the chips' links. One TPU slice has no slow network.

    Args:
        shape: the size of each axis. None with two axes means slices × devices of each where there
            are several, else processes × devices of each (1 × all where each process has one
            device of the same slice); with a single axis, all devices.
        axis_names: a name for each axis; by default `("node", "device")`, which is what
            [`SequenceParallel`][energy_attn.distributed.SequenceParallel] shards keys over.
        devices: the devices; all by default. Those of one part of the slow network become
            neighbours; otherwise their order is kept where links do not decide it.
        explicit: whether the axes are explicit: array types then have the sharding (`jax.typeof`),
            and attention takes the sharded path by itself.

    Returns:
        A `jax.sharding.Mesh`; put it in force with `jax.set_mesh(mesh)`.

    Raises:
        TypeError: names that are not strings, sizes that are not integers, or `devices` that are
            not devices.
        ValueError: names that repeat, a number of names other than of sizes, or sizes that do not
            use every device; or, with `shape` None, parts of the slow network that differ in size.

    Source: the two-level meshes of Tree Attention (arXiv 2408.04093), section 6.

    Examples:
        >>> import jax
        >>> from energy_attn.distributed import make_mesh
        >>> make_mesh((jax.device_count(),), ("device",)).axis_names
        ('device',)
    """
    names = checks.check_names("axis_names", axis_names, "axes")
    if devices is not None and not (
        isinstance(devices, Sequence) and all(isinstance(x, jax.Device) for x in devices)
    ):
        raise TypeError(
            f"devices: wanted a sequence of devices or None, got {checks.received(devices)}"
        )
    all_devices = jax.devices() if devices is None else list(devices)
    if not all_devices:
        raise ValueError("devices: wanted at least one, got none")
    if shape is None:
        shape = _default_shape(all_devices, names)
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise TypeError(f"shape: wanted a sequence of integers, got {checks.received(shape)}")
    shape = tuple(checks.check_integer("shape", size, least=1) for size in shape)
    if len(shape) != len(names):
        raise ValueError(f"shape: wanted a size for each of the axes {names}, got {shape}")
    if math.prod(shape) != len(all_devices):
        raise ValueError(
            f"shape: wanted sizes whose product is {len(all_devices)} devices, got {shape}"
        )
    kind = AxisType.Explicit if checks.check_flag("explicit", explicit) else AxisType.Auto
    return Mesh(_arranged(shape, all_devices), names, axis_types=(kind,) * len(names))


def _default_shape(devices: Sequence[Any], names: tuple[str, ...]) -> tuple[int, ...]:
    if len(names) == 1:
        return (len(devices),)
    if len(names) > 2:
        raise ValueError(f"shape: wanted the size of each of the axes {names}, got None")
    sizes = _sizes(devices, _SLICE) or _sizes(devices, _PROCESS)
    if len(set(sizes)) > 1:
        raise ValueError(
            "shape: wanted the size of each axis, as slices or processes have different numbers "
            f"of devices ({', '.join(map(str, sizes))}); got None"
        )
    if sizes[0] == 1 and getattr(devices[0], _SLICE, None) is not None:
        return (1, len(devices))  # a process for each device, on one fast network
    return (len(sizes), sizes[0])


def _arranged(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """The devices as an array of that shape: the slow network along the first axes."""
    parts = _sizes(devices, _SLICE)
    by_process = not parts and devices[0].platform != "tpu"
    if by_process:
        parts = _sizes(devices, _PROCESS)
    if len(parts) <= 1:
        return _linked(mesh_utils.create_device_mesh, shape, devices)
    if len(set(parts)) > 1:
        if not by_process:
            raise ValueError(
                "devices: wanted as many of each slice, "
                f"got {', '.join(map(str, parts))} of {len(parts)} slices"
            )
        return np.array(devices, dtype=object).reshape(shape)
    remaining, slow = len(parts), []
    for size in shape:
        slow.append(math.gcd(size, remaining))
        remaining //= slow[-1]
    fast = [size // across for size, across in zip(shape, slow, strict=True)]
    return _linked(
        mesh_utils.create_hybrid_device_mesh,
        fast,
        slow,
        devices,
        process_is_granule=by_process,
        should_sort_granules_by_key=False,
    )


def _linked(arrange: Callable[..., np.ndarray], *args: Any, **options: Any) -> np.ndarray:
    try:
        return arrange(*args, **options)
    except NotImplementedError:
        # Sizes that are no products of the torus's axes split these.
        return arrange(*args, **options, allow_split_physical_axes=True)


def _sizes(devices: Sequence[Any], part: str) -> list[int]:
    """The number of devices in each part; empty where devices have no slices."""
    parts = [getattr(device, part, None) for device in devices]
    distinct = len(set(parts)) > 1 or part == _PROCESS
    return [parts.count(name) for name in dict.fromkeys(parts)] if distinct else []


def network_part(device: Any) -> int:
    """The part of the slow network that a device is in: its slice if it has one; for CPUs, its process."""
    part = None if device.platform == "cpu" else getattr(device, _SLICE, None)
    if part is None:
        return 0 if device.platform == "tpu" else device.process_index
    return part
