"""A loop of which XLA does not know the length, so that its body is one program however often it runs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array

from ..autodiff._function import run_compiled


def each(f: Callable[[Array], Any], count: int, like: Array, *, anywhere: bool = False) -> Any:
    """`f(n)` for each `n` below `count`, stacked: XLA:CPU makes no loop of a few turns that it counts, and fuses them.

    The results vary over the mesh axes of `jax.shard_map` that `like` varies over. Raises `NotImplementedError` when it
    is lowered for another platform than CPUs, unless bits do not depend on what is fused there either (`anywhere`).
    """
    struct = jax.eval_shape(f, jnp.int32(0))
    begin = jax.tree.map(lambda x: lax.full_like(like, 0, x.dtype, (count, *x.shape)), struct)

    def add(n: Array, found: Any) -> Any:
        return jax.tree.map(lambda xs, x: lax.dynamic_update_index_in_dim(xs, x, n, 0), found, f(n))

    return lax.fori_loop(jnp.int32(0), hidden(count, anywhere), add, begin)


def hidden(count: int, anywhere: bool = False) -> Array:
    """The number, which XLA:CPU does not know. Raises as `each`."""
    return _hidden_p.bind(jnp.int32(count), anywhere=anywhere)


def _lower(ctx: mlir.LoweringRuleContext, x: Any, *, on: str, anywhere: bool) -> Any:
    if on != "cpu":
        if anywhere:
            return [x]
        raise NotImplementedError(
            f"reproducible: wanted a program for CPUs, or attention that the kernels for TPUs and GPUs take, "
            f"without arrays of biases and masks and gradients of scores' arrays, got a program for {on}"
        )
    return mlir.lower_fun(lax.optimization_barrier, multiple_results=False)(ctx, x)


_hidden_p = Primitive("hidden_number")
_hidden_p.def_abstract_eval(lambda x, anywhere: x)
run_compiled(_hidden_p, ("anywhere",))
for _platform in ("cpu", "cuda", "rocm", "tpu"):
    mlir.register_lowering(_hidden_p, functools.partial(_lower, on=_platform), platform=_platform)
