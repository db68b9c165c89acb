"""Rotary embedding."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from energy_attn.kernels.internal import lse_dtype

from ._scaling import AbstractRope, periods


def frequencies(
    width: int, theta: float, scaling: AbstractRope | None, dtype: np.dtype, length: int
) -> Float[np.ndarray, " half"]:
    r"""$\theta^{-2i/H}$ for $i < H/2$, scaled: the radians that a pair turns per token of a text of `length` tokens.

    Source: Su et al. (arXiv 2104.09864), equation 15.
    """
    inverse = 1 / periods(width, theta, dtype)
    return inverse if scaling is None else scaling.scaled(inverse, theta, length)


def rotary(
    positions: Int[Array, "batch time"], frequencies: Float[np.ndarray, " half"], factor: float
) -> tuple[Float[Array, "batch time 1 half"], Float[Array, "batch time 1 half"]]:
    r"""Cosine and sine of position times frequency, times a factor, in the dtype of the frequencies.

    Source: Su et al. (arXiv 2104.09864), equation 15.
    """
    angle = positions.astype(frequencies.dtype)[:, :, None, None] * frequencies[None, None, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def rotate(
    x: Float[Array, "batch time heads width"], cos: Array, sin: Array
) -> Float[Array, "batch time heads width"]:
    """Turns each pair $(x_i, x_{i+H/2})$ by its angle: halves, as in Hugging Face, not neighbours.

    $H$ is twice the number of angles; what a head has beyond $H$ is not turned.
    """
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = jnp.split(turned.astype(lse_dtype(x.dtype)), 2, -1)
    out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
    return jnp.concatenate([out, rest], -1) if rest.shape[-1] else out
