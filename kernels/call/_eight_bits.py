"""Keys and values of eight bits, with a scale for each head and token."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from ._operands import NO_SCALES, Operands


def dequantize(x: Array, scale: Array | None, dtype: DTypeLike) -> Array:
    """Stored keys or values: int8 `[..., H]` times a scale `[...]`, rounded to `dtype`; without one, `x`."""
    if scale is None:
        return x
    return (x.astype(jnp.float32) * scale[..., None]).astype(dtype)


def dequantized(operands: Operands) -> Operands:
    """Operands with keys and values in the dtype of the query, in place of eight bits and scales."""
    dtype = operands.query.dtype
    return operands._replace(
        key=dequantize(operands.key, operands.scales.key, dtype),
        value=dequantize(operands.value, operands.scales.value, dtype),
        scales=NO_SCALES,
    )
