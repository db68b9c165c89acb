"""What the kernels that are written in Pallas share."""

import inspect
from typing import Any

import jax
from jax.typing import DTypeLike


def result_like(x: Any, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result, which inside `jax.shard_map` may differ where `x` does.

    Raises nothing.
    """
    return jax.ShapeDtypeStruct(shape, dtype, **_varying(x))


# jax 0.10 renamed what says along which axes of a mesh an array may differ
_NEW = "manual_axis_type" in inspect.signature(jax.ShapeDtypeStruct.__init__).parameters


def _varying(x: Any) -> dict[str, Any]:
    kind = jax.typeof(x)
    return {"manual_axis_type": kind.manual_axis_type} if _NEW else {"vma": kind.vma}
