"""Tiles over the devices of the mesh in force, of which each computes some, by the same program."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import Array, PyTree

from energy_attn.kernels.internal import folded

Axes = tuple[str, ...]


def mesh_axes() -> Axes:
    """The axes of the mesh in force, unless a surrounding `jax.shard_map` has taken them.

    Raises `NotImplementedError` for explicit ones, by whose types arrays of tiles would have to be sharded.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        raise NotImplementedError(
            f"reproducible: wanted a mesh of automatic axes for a decoder, got {mesh}"
        )
    return () if AxisType.Manual in mesh.axis_types else mesh.axis_names


def on_one_device(axes: Axes) -> AbstractContextManager[None]:
    """Where a tile is traced, without the mesh that has these axes: experts that are sharded over one are whole."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ())) if axes else nullcontext()


def device_count(axes: Axes) -> int:
    """The number of devices along axes of the mesh in force."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in axes)


def over_devices(
    run: Callable[[list[Array], Any], Any], axes: Axes, out_specs: PyTree[jax.P]
) -> Callable[..., Any]:
    """`run(weights, tiles)` on each device, with the weights whole and its part of the tiles, or all of them."""
    # a traced program says nothing of what varies over devices
    in_specs = jax.P(), jax.P(axes)
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def padded(x: Array, multiple: int) -> Array:
    """`x` with zeros behind its first axis, to a multiple."""
    return jnp.pad(x, ((0, -len(x) % multiple), *[(0, 0)] * (x.ndim - 1)))


def folded_across(nodes: list[Array], numbers: Array, axes: Axes) -> list[Array]:
    """The sums by one tree of nodes `[units, ...]` of all devices; those of negative numbers are absent.

    Each device folds a part of every weight: as much is sent and held as by an all-reduce.
    """
    devices = device_count(axes)
    everyone = lax.all_gather(numbers, axes, tiled=True)

    def of_part(x: Array) -> Array:
        units, shape = len(x), x.shape[1:]
        flat = x.reshape(units, -1)
        size = flat.shape[1]
        flat = jnp.pad(flat, ((0, 0), (0, -size % devices))).reshape(units, devices, -1)
        mine = lax.all_to_all(flat, axes, 1, 0, tiled=False)  # [devices, units, part]
        items = mine.reshape(devices * units, -1)
        total = folded(everyone, items, jnp.zeros_like(items[0]), jnp.add)
        whole = lax.all_gather(total, axes, tiled=True)
        return whole[:size].reshape(shape)

    return [of_part(x) for x in nodes]
