"""Arrays in the layout of their axes, which XLA:TPU would choose otherwise."""

from typing import Any

from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array


def as_written(part: Array) -> Array:
    """A part of an array, cut in a loop over its parts, with its axes in memory in their order.

    Else XLA:TPU copies the whole array before the loop, in the layout that it prefers for the part. It is free to in
    exported programs: JAX does not serialise such a wish.
    """
    return as_written_p.bind(part)


def _lower(ctx: Any, x: mlir.ir.Value) -> Any:
    if ctx.module_context.lowering_parameters.for_export:
        return [x]

    def constrained(x: Array) -> Array:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return mlir.lower_fun(constrained, multiple_results=False)(ctx, x)


as_written_p = Primitive("as_written")
as_written_p.def_impl(lambda x: x)
as_written_p.def_abstract_eval(lambda x: x)
ad.deflinear2(as_written_p, lambda cotangent, _: [cotangent])
batching.defvectorized(as_written_p)
mlir.register_lowering(as_written_p, lambda ctx, x: [x])
mlir.register_lowering(as_written_p, _lower, platform="tpu")
