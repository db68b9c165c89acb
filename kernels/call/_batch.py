"""The batch axes of the user's arrays, any number, and the one batch axis of a kernel's operands."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._checks import check_shape

# The sizes of the user's batch axes, of which the first is not read: a shard has less of it.
BatchAxes = tuple[int, ...]


def broadcast_axes(query: Any, key: Any, value: Any) -> BatchAxes:
    """The batch axes of the result: an axis of size 1 of the query, key or value broadcasts."""
    axes = query.shape[:-3]
    for x in (key, value):
        if x.ndim == query.ndim:
            axes = tuple(
                have if size == 1 else size for size, have in zip(axes, x.shape, strict=False)
            )
    return axes


def check_batched(name: str, x: Any, axes: BatchAxes, shape: tuple[int | str, ...]) -> None:
    """Checks that `x` has the axes `shape` after its batch axes, each of the size in `axes` or 1."""
    given = x.shape[: len(axes)] if x.ndim == len(axes) + len(shape) else axes
    fits = (1 if have == 1 else size for size, have in zip(axes, given, strict=True))
    check_shape(name, x, (*fits, *shape))


def flattened(x: Any, axes: BatchAxes) -> Any:
    """`[*axes, ...]`, each of the batch axes of its size or 1, as `[B, ...]`; `[1, ...]` where all of them are 1."""
    count, rest = len(axes), x.shape[len(axes) :]
    if count == 1:
        return x
    if all(size == 1 for size in x.shape[:count]):
        return x.reshape(1, *rest)
    return joined(x if x.shape[:count] == axes else jnp.broadcast_to(x, (*axes, *rest)), count)


def joined(x: Any, count: int) -> Any:
    """Joins the first `count` axes to one; without any, adds one. Raises for axes that JAX cannot join."""
    if count < 2:
        return x if count else x[None]
    split = [] if isinstance(x, np.ndarray) else list(jax.typeof(x).sharding.spec)
    if any(part is not None for part in split[1:count]):
        raise ValueError(
            "query, key, value: wanted only the first of several batch axes split by their types "
            f"(jax.reshard, or jax.vmap over the others), got {jax.typeof(x)}"
        )
    return x.reshape(math.prod(x.shape[:count]), *x.shape[count:])


def restored(x: Array, axes: BatchAxes) -> Array:
    """`[B, ...]` with the user's batch axes in place of the first; the inverse of `joined`."""
    if len(axes) < 2:
        return x if axes else x[0]
    return x.reshape(restored_shape(x.shape, axes))


def restored_shape(shape: tuple[int, ...], axes: BatchAxes) -> tuple[int, ...]:
    """The shape of `restored(x, axes)` for an array of this shape."""
    if len(axes) < 2:
        return shape if axes else shape[1:]
    return (shape[0] // math.prod(axes[1:]), *axes[1:], *shape[1:])
