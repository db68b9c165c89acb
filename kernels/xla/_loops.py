"""Loops and products in the forms that XLA compiles best: loops of any length, groups of rows, and few rows.

The body of a loop of hidden length is compiled once, whatever the number of iterations. A loop over groups visits tiles
of consecutive rows of one group: as many as all rows fill, and one more per group.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Bool, Float, Int

from .._varying import vary_together
from ..autodiff._function import run_compiled
from ..call._state import lse_dtype

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


FOLDED = 16  # numbers that a short loop folds: XLA:CPU unrolls it, and folds vectors


class Products(NamedTuple):
    """How a block is multiplied; static. The defaults were chosen by measurement."""

    # most rows of a key head whose products are one loop of vector instructions over the block as it lies in memory;
    # more are matrix products, for which XLA copies the block head by head
    rows: int = 8
    lanes: int = 8  # features that are multiplied at a time
    keys: int = 16  # consecutive keys whose products are added in registers
    # most rows of a key head of which each has its weighed sum of values in a pass over the block, which is in a
    # CPU's cache; more are a matrix product
    passes: int = 4


PRODUCTS = Products()


def scores_of(
    query: Float[Array, "K R H"], key: Float[Array, "S K H"], how: Products
) -> Float[Array, "S K R"]:
    r"""$q_{kr} \cdot k_{sk}$ in float32, or float64 of such."""
    (kv_heads, rows, width), key_len = query.shape, len(key)
    dtype = lse_dtype(query.dtype)
    query, key = query.astype(dtype), key.astype(dtype)
    if rows > how.rows or width % how.lanes:
        return jnp.einsum("krh,skh->skr", query, key, precision=lax.Precision.HIGHEST)
    query = query.reshape(1, kv_heads, rows, -1, how.lanes)
    sums = _reduced(query * key.reshape(key_len, kv_heads, 1, -1, how.lanes), 3)
    ones = jnp.ones((how.lanes, 1), dtype)
    scores = lax.dot(sums.reshape(-1, how.lanes), ones, precision=lax.Precision.HIGHEST)
    return scores.reshape(key_len, kv_heads, rows)


def weighed_sum(
    weights: Float[Array, "K R S"],
    value: Callable[[], Float[Array, "S K W"]],
    present: Bool[Array, "#S"] | None,
    how: Products,
) -> Float[Array, "K R W"]:
    r"""$\sum_s w_{krs} v_{sk}$ in the dtype of the weights, without the values that are not `present`.

    Their weights are zero, but they may not be finite; zeros in their place would take another pass over the block.
    So the sum includes them, and is computed again with zeros only if it is not finite.
    """
    out = _weighed_sum(weights, value(), how)
    if present is None:
        return out

    def without_absent() -> Array:
        return _weighed_sum(weights, jnp.where(present[:, None, None], value(), 0), how)

    return lax.cond(jnp.isfinite(out).all(), lambda: out, without_absent)


def _weighed_sum(weights: Array, value: Array, how: Products) -> Array:
    key_len, value = len(value), value.astype(weights.dtype)
    if weights.shape[1] > how.passes or key_len % how.keys:
        return jnp.einsum("krs,skw->krw", weights, value, precision=lax.Precision.HIGHEST)
    return jnp.stack([_weighed_by_row(x, value, how) for x in weights.swapaxes(0, 1)], 1)


def _weighed_by_row(weights: Array, value: Array, how: Products) -> Array:
    kv_heads, width = value.shape[1:]
    weights = weights.T.reshape(-1, how.keys, kv_heads, 1)
    sums = _reduced(weights * value.reshape(-1, how.keys, kv_heads, width), 1)
    sums = sums.reshape(len(sums), -1)
    out = lax.dot(jnp.ones(len(sums), sums.dtype), sums, precision=lax.Precision.HIGHEST)
    return out.reshape(kv_heads, width)


def row_maximum(x: Float[Array, "rows S"]) -> Float[Array, " rows"]:
    return _folded(x, lambda a, b: -lax.min(-a, -b), -jnp.inf)


def row_sum(x: Float[Array, "rows S"]) -> Float[Array, " rows"]:
    return _folded(x, _plus, 0.0)


def _folded(x: Array, f: Callable[[Array, Array], Array], start: float) -> Array:
    # in steps: XLA:CPU makes vector instructions of short loops only
    while x.shape[1] > FOLDED and x.shape[1] % FOLDED == 0:
        x = lax.optimization_barrier(_reduced(x.reshape(len(x), FOLDED, -1), 1, f, start))
    return _reduced(x, 1, f, start)


def _plus(a: Array, b: Array) -> Array:
    return a - (-b)


def _reduced(
    x: Array, axis: int, f: Callable[[Array, Array], Array] = _plus, start: float = 0.0
) -> Array:
    # XLA:CPU calls YNNPACK for sums and maxima, and writes their operand to memory first; or makes windows of them
    # (https://github.com/jax-ml/jax/issues/37465). It fuses other functions with their operand, so a + b is written
    # a - (-b).
    return lax.reduce(x, jnp.asarray(start, x.dtype), f, (axis,))
