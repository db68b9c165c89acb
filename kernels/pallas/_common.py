"""Helpers of all kernels written in Pallas."""

import inspect
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Array

from ..call._operands import Operands


def result_like(x: Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result; inside `jax.shard_map` it varies over the mesh axes of `x`."""
    return jax.ShapeDtypeStruct(shape, dtype, **_varying(x))


def moving_arrays(directions: Operands) -> dict[str, Array]:
    """The directions of the operands that move, by name; those that do not are None."""
    named = zip(Operands._fields, directions[:3], strict=False)
    return {name: x for name, x in named if x is not None}


# JAX 0.10 renamed the argument for the mesh axes that an array varies over
_NEW = "manual_axis_type" in inspect.signature(jax.ShapeDtypeStruct.__init__).parameters


def _varying(x: Array) -> dict[str, Any]:
    kind = jax.typeof(x)
    return {"manual_axis_type": kind.manual_axis_type} if _NEW else {"vma": kind.vma}
