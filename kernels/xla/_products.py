"""Products of a block of keys or values with few rows per key head, in the forms that XLA:CPU computes fastest."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ..call._state import lse_dtype

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
    # XLA:CPU calls YNNPACK for sums and maxima, and writes their operand to memory first; or makes windows of them. It
    # fuses other functions with their operand, so a + b is written a - (-b).
    return lax.reduce(x, jnp.asarray(start, x.dtype), f, (axis,))
