"""Loops whose length XLA does not know: over numbers, and over tiles of consecutive rows of one group.

The body of such a loop is compiled once, whatever the number of iterations. There are as many tiles of groups as all
rows fill, and one more per group.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Bool, Float, Int

from .._varying import vary_together
from ..autodiff._function import run_compiled

# of the state, the group of a tile, its first row, and which of its rows are the group's and in no other tile
Step = Callable[[Array, Int[Array, ""], Int[Array, ""], Bool[Array, " tile"]], Array]


def each(f: Callable[[Array], Any], count: int, like: Array, *, anywhere: bool = False) -> Any:
    """`f(n)` for each `n` below `count`, stacked. XLA:CPU would unroll and fuse a short loop of known length.

    The results vary over the mesh axes of `jax.shard_map` that `like` varies over. Raises `NotImplementedError` when it
    is lowered for another platform than CPUs, unless bits do not depend on what is fused there either (`anywhere`).
    """
    struct = jax.eval_shape(f, jnp.int32(0))
    begin = jax.tree.map(lambda x: lax.full_like(like, 0, x.dtype, (count, *x.shape)), struct)

    def add(n: Array, result: Any) -> Any:
        return jax.tree.map(
            lambda xs, x: lax.dynamic_update_index_in_dim(xs, x, n, 0), result, f(n)
        )

    return lax.fori_loop(jnp.int32(0), hidden(count, anywhere), add, begin)


def hidden(count: int, anywhere: bool = False) -> Array:
    """The number as an array that XLA:CPU does not constant-fold. Raises as `each`."""
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


def over_groups(
    step: Step, sizes: Int[Array, " groups"], rows: int, tile: int, state: Array
) -> Array:
    """The state after all tiles of `rows` rows; the first `sizes[0]` rows are the first group's."""
    # inside a `shard_map` the state of a loop varies over the axes that its arguments do
    ends, begin, state = vary_together((jnp.cumsum(sizes), jnp.zeros((), sizes.dtype), state))

    def one(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        begin, state = carry
        group = (ends <= begin).sum(dtype=ends.dtype)
        start = jnp.minimum(begin, rows - tile)
        end = jnp.minimum(ends[group], start + tile)
        index = start + jnp.arange(tile, dtype=begin.dtype)
        return end, step(state, group, start, (index >= begin) & (index < end))

    return lax.while_loop(lambda carry: carry[0] < ends[-1], one, (begin, state))[1]


def rows_of_groups(
    dot: Callable[[Array, Array], Array],
    x: Float[Array, "rows in"],
    weight: Float[Array, "groups ..."],
    sizes: Int[Array, " groups"],
    tile: int,
) -> Float[Array, "rows out"]:
    """`dot(x, weight[group])` of each row's group; zeros for rows behind all groups."""
    x, weight, sizes = vary_together((x, weight, sizes))

    def step(out: Array, group: Array, start: Array, inside: Array) -> Array:
        matrix = lax.dynamic_index_in_dim(weight, group, keepdims=False)
        result = dot(lax.dynamic_slice_in_dim(x, start, tile), matrix)
        old = lax.dynamic_slice_in_dim(out, start, tile)
        return lax.dynamic_update_slice_in_dim(
            out, jnp.where(inside[:, None], result, old), start, 0
        )

    kind = jax.eval_shape(dot, x[:tile], weight[0])
    out = jnp.zeros((x.shape[0], *kind.shape[1:]), kind.dtype)
    return over_groups(step, sizes, x.shape[0], tile, out)


def sums_of_groups(
    dot: Callable[[Array, Array], Array],
    a: Float[Array, "rows m"],
    b: Float[Array, "rows n"],
    sizes: Int[Array, " groups"],
    tile: int,
) -> Float[Array, "groups m n"]:
    """The sum of `dot(a^T, b)` over tiles of the rows of each group."""
    a, b, sizes = vary_together((a, b, sizes))

    def step(out: Array, group: Array, start: Array, inside: Array) -> Array:
        x, y = (
            jnp.where(inside[:, None], lax.dynamic_slice_in_dim(z, start, tile), 0) for z in (a, b)
        )
        old = lax.dynamic_index_in_dim(out, group, keepdims=False)
        return lax.dynamic_update_index_in_dim(out, old + dot(x.T, y), group, 0)

    out = jnp.zeros((len(sizes), a.shape[1], b.shape[1]), jnp.float32)
    return over_groups(step, sizes, len(a), tile, out)
