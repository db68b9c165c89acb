"""The product of two tiles of numbers of any widths, in float32."""

import functools
import operator

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..canonical._programs import dot


def dot_of(a: Array, b: Array, over: tuple[int, int]) -> Float[Array, "i j"]:
    """The product of two tiles over an axis of each, as exact as that of float32.

    A tile of float32 beside one of bfloat16, as cotangents have beside weights, is cut into three of bfloat16: 24 bits
    are three times 8, and products of 16 bits are many times faster.
    """
    if a.dtype == b.dtype:
        return dot(a, b, over)
    if {a.dtype, b.dtype} != {jnp.dtype("float32"), jnp.dtype("bfloat16")}:
        return dot(a.astype(jnp.float32), b.astype(jnp.float32), over)
    is_first = a.dtype == jnp.float32
    pairs = [(x, b) for x in _thirds(a)] if is_first else [(a, x) for x in _thirds(b)]
    return functools.reduce(operator.add, (dot(*x, over) for x in pairs))


def _thirds(x: Array) -> list[Array]:
    """Three arrays of bfloat16 whose sum is `x`, the smallest first."""
    parts = []
    for _ in range(3):
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.insert(0, part.astype(jnp.bfloat16))
        x = jnp.where(jnp.abs(x) == jnp.inf, 0.0, x - part)
    return parts
