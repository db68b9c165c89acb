"""What all kernels written in Pallas share."""

import inspect
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Array


def result_like(x: Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result; inside `jax.shard_map` it varies over the mesh axes of `x`."""
    return jax.ShapeDtypeStruct(shape, dtype, **_varying(x))


# JAX 0.10 renamed the argument for the mesh axes that an array varies over
_NEW = "manual_axis_type" in inspect.signature(jax.ShapeDtypeStruct.__init__).parameters


def _varying(x: Array) -> dict[str, Any]:
    kind = jax.typeof(x)
    return {"manual_axis_type": kind.manual_axis_type} if _NEW else {"vma": kind.vma}
