"""Meshes of devices."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from energy_attn.kernels._errors import check_flag, check_integer, received


def make_mesh(
    shape: Sequence[int] | None = None,
    axis_names: Sequence[str] = ("node", "device"),
    *,
    devices: Sequence[Any] | None = None,
    explicit: bool = False,
) -> Mesh:
    """A mesh of devices with named axes, slow axes first.

    Args:
        shape: the size of each axis. None with the two default axes means processes × devices of
            each process; with a single axis, all devices.
        axis_names: a name for each axis; by default `("node", "device")`, which is what
            [`SequenceParallel`][energy_attn.distributed.SequenceParallel] spreads keys over.
        devices: the devices; all by default, in the order that suits the hardware's links.
        explicit: whether the axes are explicit, so that array types say how arrays are sharded
            (`jax.typeof`) and attention takes the sharded path by itself.

    Returns:
        A `jax.sharding.Mesh`; put it in force with `jax.set_mesh(mesh)`.

    Raises:
        TypeError: names that are no strings, sizes that are no integers, devices that are none.
        ValueError: names that repeat, a number of names other than of sizes, or sizes that do not
            use every device.

    Source: the two-level meshes of Tree Attention (arXiv 2408.04093), section 6.

    Examples:
        >>> import jax
        >>> from energy_attn.distributed import make_mesh
        >>> make_mesh((jax.device_count(),), ("device",)).axis_names
        ('device',)
    """
    names = (axis_names,) if isinstance(axis_names, str) else axis_names
    if (
        not isinstance(names, Sequence)
        or not names
        or not all(isinstance(name, str) for name in names)
    ):
        raise TypeError(f"axis_names: wanted names of axes, got {received(axis_names)}")
    names = tuple(names)
    if len(set(names)) != len(names):
        raise ValueError(f"axis_names: wanted different names, got {names}")
    if devices is not None and not (
        isinstance(devices, Sequence) and all(isinstance(x, jax.Device) for x in devices)
    ):
        raise TypeError(f"devices: wanted a sequence of devices or None, got {received(devices)}")
    count = jax.device_count() if devices is None else len(devices)
    if shape is None:
        if len(names) > 2:
            raise ValueError(f"shape: wanted the size of each of the axes {names}, got None")
        processes = jax.process_count() if devices is None else 1
        shape = (processes, count // processes) if len(names) == 2 else (count,)
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise TypeError(f"shape: wanted a sequence of integers, got {received(shape)}")
    shape = tuple(check_integer("shape", size, least=1) for size in shape)
    if len(shape) != len(names):
        raise ValueError(f"shape: wanted a size for each of the axes {names}, got {shape}")
    if math.prod(shape) != count:
        raise ValueError(f"shape: wanted sizes whose product is {count} devices, got {shape}")
    kind = AxisType.Explicit if check_flag("explicit", explicit) else AxisType.Auto
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=devices)
