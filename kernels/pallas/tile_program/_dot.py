"""The product of two tiles, in float32."""

import functools
import operator

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def dot(a: Array, b: Array, over: tuple[int, int]) -> Float[Array, "i j"]:
    """The product of two tiles over an axis of each, summed in float32.

    A tile of float32 beside one of bfloat16, as cotangents have beside weights, is cut into three of bfloat16: 24 bits
    are three times 8, and products of 16 bits are many times faster.
    """
    kinds = {x.dtype.name for x in (a, b)}
    if kinds == {"bfloat16", "float32"}:
        wide, narrow = (a, b) if a.dtype == jnp.float32 else (b, a)
        # a part that is 0 makes a NaN of what is not finite; the last is not
        finite = jnp.where(jnp.abs(narrow.astype(jnp.float32)) < jnp.inf, narrow, 0)
        pairs = zip(_thirds(wide), (finite, finite, narrow), strict=True)
        parts = (dot(x, y, over) if wide is a else dot(y, x, over) for x, y in pairs)
        return functools.reduce(operator.add, parts)
    if len(kinds) > 1:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    axes = ((over[0],), (over[1],)), ((), ())
    return lax.dot_general(a, b, axes, precision, jnp.float32)


def _thirds(x: Array) -> list[Array]:
    """Three arrays of bfloat16 whose sum is `x`, the smallest first."""
    parts = []
    for _ in range(3):
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.insert(0, part.astype(jnp.bfloat16))
        x = jnp.where(jnp.abs(x) == jnp.inf, 0.0, x - part)
    return parts
