"""The mesh axes of a surrounding `jax.shard_map` that arrays vary over."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

_Tree = TypeVar("_Tree")


def vary_together(tree: _Tree, axes: Sequence[str] = ()) -> _Tree:
    """Arrays that all vary over the mesh axes `axes` and over all that any of them varies over."""
    # Inside shard_map a kernel may get replicated arrays (a query) together with arrays that vary over devices (a shard
    # of the keys). Cast to varying here, the derivative of a replicated operand is summed over devices by JAX itself.
    union = frozenset(axes).union(*map(varying_axes, jax.tree.leaves(tree)))
    return vary_over(union, tree)


def vary_over(axes: frozenset[str], tree: _Tree) -> _Tree:
    def vary(x: Array) -> Array:
        missing = tuple(sorted(axes - varying_axes(x)))
        return apply_in_float32(lambda x: lax.pcast(x, missing, to="varying"), x) if missing else x

    return jax.tree.map(vary, tree) if axes else tree


def apply_in_float32(collective: Callable[[Array], Array], x: Array) -> Array:
    """Applies a collective that reduces over devices, or whose derivative does, in at least float32.

    XLA:CPU aborts on sums of bfloat16 in a `jax.shard_map` over some axes of a mesh: "Invalid binary instruction
    opcode copy" (JAX 0.8 to 0.12; fails without the cast: `test_bfloat16_beside_another_axis`).
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 2:
        return collective(x)
    return collective(x.astype(jnp.float32)).astype(x.dtype)


def varying_axes(x: Array | np.ndarray) -> frozenset[str]:
    return axes_of(jax.typeof(x))


def axes_of(kind: Any) -> frozenset[str]:
    # its name before JAX 0.10
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying


def result_like(x: Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result, which varies over the mesh axes of `x`."""
    kind = jax.typeof(x)
    varying = {"manual_axis_type": kind.manual_axis_type} if _NEW else {"vma": kind.vma}
    return jax.ShapeDtypeStruct(shape, dtype, **varying)


_NEW = "manual_axis_type" in inspect.signature(jax.ShapeDtypeStruct.__init__).parameters
