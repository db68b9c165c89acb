"""Rotary embedding."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from energy_attn.kernels.internal import lse_dtype

from ._scaling import AbstractRope, periods


def frequencies(
    width: int, theta: float, scaling: AbstractRope | None, dtype: np.dtype
) -> Float[np.ndarray, " half"]:
    r"""$\theta^{-2i/H}$ for $i < H/2$, scaled: the angle in radians of a pair's turn per token.

    Source: Su et al. (arXiv 2104.09864), equation 15.
    """
    inverse = 1 / periods(width, theta, dtype)
    return inverse if scaling is None else scaling.scaled(inverse, theta)


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
    """Turns each pair $(x_i, x_{i+H/2})$ by its angle: halves, as in Hugging Face, not neighbours."""
    a, b = jnp.split(x.astype(lse_dtype(x.dtype)), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
