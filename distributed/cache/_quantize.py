"""Eight-bit quantization with one scale per vector."""

import dataclasses
from typing import NoReturn

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from energy_attn.kernels.internal import AbstractFunction, function_call

_LEVELS = 127


def quantize(
    x: Float[Array, "*batch width"],
) -> tuple[Int8[Array, "*batch width"], Float[Array, "*batch"]]:
    r"""Rounds every vector to multiples of 1/127 of its largest entry.

    $$s = \max_h |x_h| / 127, \qquad |x_h - s\, q_h| \le s / 2 = \max_h |x_h| / 254$$

    up to the rounding of float32, in which all of it is computed. A vector with a NaN or an
    infinity is read back as NaN. Differentiated it raises `TypeError`: rounding has no derivative.
    """
    quantized: tuple[Array, Array] = function_call(_Quantize(), x)
    return quantized


@dataclasses.dataclass(frozen=True)
class _Quantize(AbstractFunction):
    def apply(self, args: Array) -> tuple[Array, Array]:
        x = args.astype(jnp.float32)
        scale = jnp.abs(x).max(-1) / _LEVELS
        steps = jnp.round(x / jnp.where(scale > 0, scale, 1.0)[..., None])
        return jnp.clip(steps, -_LEVELS, _LEVELS).astype(jnp.int8), scale

    def jvp(self, primals: Array, tangents: Array) -> NoReturn:
        raise TypeError(
            "quantize: wanted a cache that stores floating numbers where it is differentiated, got "
            "'int8', whose rounding has no derivative; stop the gradient or use quantize=None"
        )
