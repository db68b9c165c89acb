"""One step of a ring: what goes to the next device, and whose part is here."""

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..merge._packing import joined, moved
from ._arguments import Axes

Tree = TypeVar("Tree")


def hop(tree: Tree, axes: Axes, way: int = 1) -> Tree:
    """The arrays of a tree, passed to the next device of the ring, and those of the one before.

    `way` is -1 for the other direction, or another number of places.
    """
    devices = lax.axis_size(axes)
    pairs = [(i, (i + way) % devices) for i in range(devices)]

    def pass_on(x: Array) -> Array:
        return lax.ppermute(x, axes, pairs)

    return jax.tree.map(functools.partial(moved, pass_on), tree)


def origin(step: int | Array, axes: Axes, way: int = 1) -> Array:
    """The device whose part is here after `step` hops."""
    return (lax.axis_index(axes) - way * step) % lax.axis_size(axes)


def whole(x: Array | None, size: int, axes: Axes) -> Array | None:
    """Positions or segments of all devices, `[B, p size]`, of which one device may have been given its own."""
    return x if x is None or x.shape[1] != size else joined(x, axes, 1)


def part(x: Array | None, axis: int, place: Array, size: int) -> Array | None:
    """The part of an array along an axis that belongs to one device, unless it is broadcast."""
    if x is None or x.shape[axis] == 1:
        return x
    return lax.dynamic_slice_in_dim(x, place * size, size, axis)


def among(x: Array, axis: int, first: int, size: int) -> Array:
    """An array as a part along an axis of `size`, from `first` on, of one that is zero elsewhere."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = first, size - first - x.shape[axis]
    return jnp.pad(x, widths)
