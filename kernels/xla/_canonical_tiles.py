"""The programs of a tile, some rows of queries by a leaf of keys, and the joins of what they return.

No product meets a sum in them before it is rounded: XLA:CPU fuses such pairs in some surroundings, not in others.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ..call._state import holds_keys, precision, safe_shift, unfused
from ._products import row_maximum, row_sum
from ._softmax import normalised


class Part(NamedTuple):
    """The softmax of rows over some keys, a commutative monoid; that of no keys is the identity in every bit."""

    maximum: Float[Array, "K rows"]
    total: Float[Array, "K rows"]
    weighed: Float[Array, "K rows W"]


class Rows(NamedTuple):
    """Rows of a backward. Of a fully masked row `lse` is plus infinity, and the others are zero."""

    query: Float[Array, "K rows H"]
    d_out: Float[Array, "K rows W"]
    lse: Float[Array, "K rows"]
    delta: Float[Array, "K rows"]


def product(a: Array, b: Array, over: tuple[int, int]) -> Array:
    """The matrix products that contract these axes, of matrices that XLA fuses nothing with."""
    a, b = lax.optimization_barrier((a, b))
    axes = ((over[0],), (over[1],)), ((0,), (0,))
    return lax.dot_general(a, b, axes, precision(a.dtype))


def scores(
    query: Float[Array, "K rows H"],
    key: Float[Array, "K keys H"],
    scale: float,
    seen: Bool[Array, "some keys"],
) -> Float[Array, "K some keys"]:
    """Of the first rows: scaled, each rounded, and minus infinity where a key is hidden.

    The product is of all rows, as one of fewer rows may be another program.
    """
    raw = product(query, key, (2, 2))[:, : len(seen)]
    return lax.optimization_barrier(jnp.where(seen[None], unfused(raw * scale), -jnp.inf))


def weighed_sum(
    weights: Float[Array, "K some keys"], value: Float[Array, "K keys W"], rows: int
) -> Array:
    """The weighed sums of values `[K, rows, W]`, zero in rows that have no weights."""
    return product(_all_rows(weights, rows, 0.0), value, (2, 1))


def sums(x: Float[Array, "K some keys"], rows: int) -> Float[Array, "K rows"]:
    """The sum over keys, zero in rows that have none."""
    return _all_rows(_of_rows(row_sum, x), rows, 0.0)


def part(scores: Float[Array, "K some keys"], value: Float[Array, "K keys W"], rows: int) -> Part:
    """The softmax over a leaf, of no keys in rows that have no scores."""
    maximum = _of_rows(row_maximum, scores)
    weights = lax.optimization_barrier(jnp.exp(scores - safe_shift(maximum)[..., None]))
    maximum = _all_rows(maximum, rows, -jnp.inf)
    return Part(maximum, sums(weights, rows), weighed_sum(weights, value, rows))


def _of_rows(f: Callable[[Array], Array], x: Array) -> Array:
    return f(x.reshape(-1, x.shape[-1])).reshape(x.shape[:-1])


def _all_rows(x: Array, rows: int, fill: float) -> Array:
    """`x` with more rows, to `rows`. XLA:CPU takes another exponential for a few odd numbers of entries."""
    if x.shape[1] == rows:
        return x
    pads = [(0, 0)] * x.ndim
    pads[1] = (0, rows - x.shape[1])
    return jnp.pad(x, pads, constant_values=fill)


def join_parts(a: Part, b: Part) -> Part:
    """The softmax over both; the weight of the larger is exactly 1."""
    maximum = jnp.maximum(a.maximum, b.maximum)
    shift = safe_shift(maximum)
    x, y = lax.optimization_barrier((jnp.exp(a.maximum - shift), jnp.exp(b.maximum - shift)))
    total = unfused(a.total * x) + unfused(b.total * y)
    weighed = unfused(a.weighed * x[..., None]) + unfused(b.weighed * y[..., None])
    return Part(maximum, total, weighed)


def finished(whole: Part) -> tuple[Array, Array]:
    """`out` and `lse`."""
    total, lse, _ = normalised(whole.total, whole.maximum)
    return whole.weighed / total[..., None], lse


def without_signs(x: Array) -> Array:
    """`x` with all zeros positive, as a sum with more zeros in it may be, and as XLA brings them over a mesh."""
    return jnp.where(x == 0, 0.0, x)


def backward_rows(query: Array, d_out: Array, out: Array, lse: Array, d_lse: Array | None) -> Rows:
    r"""The rows of a backward; $\delta = \dot{out} \cdot out - \dot{lse}$."""
    seen = holds_keys(lse)
    query, d_out = (jnp.where(seen[..., None], x, 0.0) for x in (query, d_out))
    delta = _of_rows(row_sum, lax.optimization_barrier(unfused(d_out * out)))
    delta = delta if d_lse is None else delta - d_lse
    return Rows(query, d_out, jnp.where(seen, lse, jnp.inf), jnp.where(seen, delta, 0.0))


def d_scores(
    rows: Rows, scores: Float[Array, "K some keys"], value: Float[Array, "K keys W"]
) -> tuple[Array, Array]:
    r"""The weights $P$ of a tile and $\dot s = P (\dot{out} \cdot v - \delta)$."""
    lse, delta = (x[:, : scores.shape[1], None] for x in (rows.lse, rows.delta))
    weights = lax.optimization_barrier(jnp.exp(scores - lse))
    along = product(rows.d_out, value, (2, 2))[:, : scores.shape[1]]
    return weights, lax.optimization_barrier(weights * (along - delta))
