"""Functions that exported programs leave out."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array

from ..autodiff._function import run_compiled
from ._lowering import is_exported


def unless_exported(function: Callable[..., Array], x: Array, *others: Array) -> Array:
    """`function(x, *others)`, of the type of `x`; in a program of `jax.export`, `x`.

    So a callback, with which JAX does not serialise a program, is in other programs only.
    """
    return _bind(x, *others, function=function)


unless_exported_p = Primitive("unless_exported")
_bind = run_compiled(unless_exported_p, ("function",))


@unless_exported_p.def_abstract_eval
def _type(x: jax.core.ShapedArray, *others: object, **params: object) -> jax.core.ShapedArray:
    return x


def _batch(
    args: Sequence[Array], axes: Sequence[int | None], *, function: Callable[..., Array]
) -> tuple[Array, int]:
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    first, *others = axes
    x = batching.bdim_at_front(args[0], first, size)
    mapped = jax.vmap(function, in_axes=(0, *others))
    return unless_exported_p.bind(x, *args[1:], function=mapped), 0


batching.primitive_batchers[unless_exported_p] = _batch


def _lower(ctx: Any, *args: Any, function: Callable[..., Array]) -> Any:
    if is_exported(ctx.module_context):
        return [args[0]]
    return mlir.lower_fun(function, multiple_results=False)(ctx, *args)


mlir.register_lowering(unless_exported_p, _lower)
