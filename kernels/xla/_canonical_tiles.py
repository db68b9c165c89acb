"""The programs of a tile, some rows of queries by a leaf of keys, and the joins of what they return.

No product meets a sum in them before it is rounded: XLA:CPU fuses such pairs in some surroundings, not in others.
Operands count as products, as XLA fuses what computes them, and so do exponentials, which end in one.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..call._state import holds_keys, of_each, precision, safe_shift, unfused
from ._products import row_maximum, row_sum
from ._softmax import normalised

DEPTH = 256  # products that are summed in one sweep


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
    """The matrix products that contract these axes, of matrices that XLA fuses nothing with.

    XLA:CPU cuts sums of more than `DEPTH` products in pieces, in some calls, so they are cut here.
    """
    x, y = over
    depth = a.shape[x]
    cuts = [slice(first, first + DEPTH) for first in range(0, depth, DEPTH)] or [slice(0)]
    axes = ((x,), (y,)), ((0,), (0,))

    def piece(cut: slice) -> Array:
        sides = (m[(*[slice(None)] * axis, cut)] for m, axis in ((a, x), (b, y)))
        a_cut, b_cut = lax.optimization_barrier(tuple(sides))
        return lax.dot_general(a_cut, b_cut, axes, precision(a.dtype))

    return functools.reduce(lambda x, y: lax.optimization_barrier(x) + y, map(piece, cuts))


def raw_scores(
    query: Float[Array, "K rows H"], key: Float[Array, "K keys H"], scale: float
) -> Float[Array, "K rows keys"]:
    """The scaled products, each rounded."""
    return lax.optimization_barrier(unfused(product(query, key, (2, 2)) * scale))


def weighed_sum(weights: Float[Array, "K rows keys"], value: Float[Array, "K keys W"]) -> Array:
    """The weighed sums of values `[K, rows, W]`.

    Of 64 or 128 features at a time: of other widths the program of a few rows rounds otherwise than that of many.
    """
    width = value.shape[-1]
    value = jnp.pad(value, ((0, 0), (0, 0), (0, -width % 64)))
    pieces = (value[..., first : first + 128] for first in range(0, value.shape[-1], 128))
    found = [product(weights, x, (2, 1)) for x in pieces]
    return jnp.concatenate(found, -1)[..., :width] if found else weights[..., :0]


def sums(x: Float[Array, "*rows keys"]) -> Float[Array, "*rows"]:
    """The sum over keys."""
    return _of_rows(row_sum, x)


def part(scores: Float[Array, "K rows keys"], value: Float[Array, "K keys W"]) -> Part:
    """The softmax over a leaf."""
    maximum = _of_rows(row_maximum, scores)
    weights = lax.optimization_barrier(jnp.exp(scores - safe_shift(maximum)[..., None]))
    return Part(maximum, sums(weights), weighed_sum(weights, value))


def _of_rows(f: Callable[[Array], Array], x: Array) -> Array:
    return f(x.reshape(-1, x.shape[-1])).reshape(x.shape[:-1])


def join_parts(a: Part, b: Part) -> Part:
    """The softmax over both; the weight of the larger is exactly 1."""
    maximum = jnp.maximum(a.maximum, b.maximum)
    shift = safe_shift(maximum)
    x, y = (of_each(jnp.exp, old - shift) for old in (a.maximum, b.maximum))
    total = unfused(a.total * x) + unfused(b.total * y)
    weighed = unfused(a.weighed * x[..., None]) + unfused(b.weighed * y[..., None])
    return Part(maximum, total, weighed)


def of_sink(sink: Float[Array, "K rows"], like: Part) -> Part:
    """The softmax over one more outcome alone, whose value is zero."""
    return Part(sink, jnp.ones_like(sink), jnp.zeros_like(like.weighed))


def finished(whole: Part) -> tuple[Array, Array, Array]:
    """`out`, `lse`, and what rounding took from it."""
    total, lse, rest = normalised(whole.total, whole.maximum, functools.partial(of_each, jnp.log))
    return whole.weighed / total[..., None], lse, rest


def without_signs(x: Array) -> Array:
    """`x` with all zeros positive, as a sum with more zeros in it may be, and as XLA brings them over a mesh."""
    return jnp.where(x == 0, 0.0, x)


def backward_rows(query: Array, d_out: Array, out: Array, lse: Array, d_lse: Array | None) -> Rows:
    r"""The rows of a backward; $\delta = \dot{out} \cdot out - \dot{lse}$."""
    seen = holds_keys(lse)
    query, d_out = (jnp.where(seen[..., None], x, 0.0) for x in (query, d_out))
    delta = _of_rows(row_sum, lax.optimization_barrier(unfused(d_out * out)))
    delta = delta if d_lse is None else delta - unfused(d_lse)
    return Rows(query, d_out, jnp.where(seen, lse, jnp.inf), jnp.where(seen, delta, 0.0))


def d_scores(
    rows: Rows, scores: Float[Array, "K rows keys"], value: Float[Array, "K keys W"]
) -> tuple[Array, Array]:
    r"""The weights $P$ of a tile and $\dot s = P (\dot{out} \cdot v - \delta)$."""
    weights = lax.optimization_barrier(jnp.exp(scores - rows.lse[..., None]))
    along = product(rows.d_out, value, (2, 2))
    return weights, lax.optimization_barrier(weights * (along - rows.delta[..., None]))
