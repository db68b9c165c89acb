"""Helpers shared by all Pallas kernels."""

import inspect
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Array

from ..call._operands import Operands


def result_like(x: Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result; inside `jax.shard_map` it varies over the mesh axes of `x`."""
    kind = jax.typeof(x)
    varying = {"manual_axis_type": kind.manual_axis_type} if _NEW else {"vma": kind.vma}
    return jax.ShapeDtypeStruct(shape, dtype, **varying)


def moving_arrays(directions: Operands) -> dict[str, Any]:
    """The directions of query, key and value that are not None, by name."""
    named = {"query": directions.query, "key": directions.key, "value": directions.value}
    return {name: x for name, x in named.items() if x is not None}


# Newer versions of JAX call the mesh axes that an array varies over `manual_axis_type`, older ones `vma`.
_NEW = "manual_axis_type" in inspect.signature(jax.ShapeDtypeStruct.__init__).parameters
