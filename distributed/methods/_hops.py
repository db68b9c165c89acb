"""One step of a ring: what goes to the next device, and whose part is here."""

import functools
from typing import TypeVar

import jax
from jax import lax
from jaxtyping import Array

from ..merge._packing import moved
from ..spec._arguments import Axes

Tree = TypeVar("Tree")


def hop(tree: Tree, axes: Axes) -> Tree:
    """The arrays of a tree, passed to the next device of the ring, and those of the one before."""
    devices = lax.axis_size(axes)
    pairs = [(i, (i + 1) % devices) for i in range(devices)]

    def pass_on(x: Array) -> Array:
        return lax.ppermute(x, axes, pairs)

    return jax.tree.map(functools.partial(moved, pass_on), tree)


def origin(step: int | Array, axes: Axes) -> Array:
    """The device whose part is here after `step` hops."""
    return (lax.axis_index(axes) - step) % lax.axis_size(axes)


def part(x: Array | None, axis: int, place: Array, size: int) -> Array | None:
    """The part of a bias or mask along an axis that belongs to one device, unless it is broadcast."""
    if x is None or x.shape[axis] == 1:
        return x
    return lax.dynamic_slice_in_dim(x, place * size, size, axis)
