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


def hop(tree: Tree, axes: Axes, places: int = 1) -> Tree:
    """Sends the arrays of a tree this number of places around the ring, and returns those that arrive."""
    devices = lax.axis_size(axes)
    pairs = [(i, (i + places) % devices) for i in range(devices)]

    def pass_on(x: Array) -> Array:
        return lax.ppermute(x, axes, pairs)

    return jax.tree.map(functools.partial(moved, pass_on), tree)


def origin(step: int | Array, axes: Axes) -> Array:
    """The device whose part is here after `step` hops."""
    return (lax.axis_index(axes) - step) % lax.axis_size(axes)


def whole(x: Array | None, size: int, axes: Axes) -> Array | None:
    """Positions or segments of all devices, `[B, p size]`, of which one device may have been given its own."""
    return x if x is None or x.shape[1] != size else joined(x, axes, 1)


def part(x: Array | None, axis: int, place: Array, size: int) -> Array | None:
    """The part of an array along an axis that belongs to one device, unless it is broadcast."""
    if x is None or x.shape[axis] == 1:
        return x
    return lax.dynamic_slice_in_dim(x, place * size, size, axis)


def placed(found: Array, like: Array, axis: int, place: Array) -> Array:
    """Returns one device's part in its place among zeros, as long as `like` along an axis; a broadcast one stays."""
    if like.shape[axis] == 1:
        return found
    size = found.shape[axis]
    shape = (*found.shape[:axis], like.shape[axis], *found.shape[axis + 1 :])
    zeros = lax.full_like(found, 0.0, shape=shape)
    return lax.dynamic_update_slice_in_dim(zeros, found, place * size, axis)


def among(x: Array, axis: int, first: int, size: int) -> Array:
    """An array as a part along an axis of `size`, from `first` on, of one that is zero elsewhere."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = first, size - first - x.shape[axis]
    return jnp.pad(x, widths)
