"""Rotary embedding, and what scales its frequencies."""

import abc

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from energy_attn.kernels.internal import lse_dtype

Frequencies = Float[np.ndarray, " half"]


class AbstractRope(abc.ABC):
    """Lowers the frequencies of a rotary embedding; a frozen dataclass, as decoders have a static one.

    Examples:
        >>> import dataclasses
        >>> from energy_attn.models import AbstractRope
        >>> @dataclasses.dataclass(frozen=True)
        ... class Halved(AbstractRope):
        ...     def scaled(self, frequencies, theta, length):
        ...         return frequencies / 2
        >>> Halved().attention_factor
        1.0
    """

    @abc.abstractmethod
    def scaled(self, frequencies: Frequencies, theta: float, length: int) -> Frequencies:
        """The lowered frequencies, in the same dtype.

        Args:
            frequencies: of the pairs.
            theta: their base.
            length: the number of tokens that the text may have: of a call without a cache, its tokens; else the
                slots that the cache was made with.
        """

    @property
    def attention_factor(self) -> float:
        """The factor of turned queries and keys."""
        return 1.0


def periods(width: int, theta: float, dtype: np.dtype) -> Frequencies:
    r"""$\theta^{2i/H}$ for $i < H/2$: the tokens in which a pair turns by a radian.

    Each step is rounded as PyTorch rounds it in float32, as at positions of 10^5 a last bit here is a
    hundredth of a radian. The power is computed in float64, as NumPy's in float32 is less accurate.
    """
    exponent = np.arange(0, width, 2, dtype=dtype) / np.asarray(width, dtype)
    return np.power(float(theta), exponent.astype(np.float64)).astype(dtype)


def frequencies(
    width: int, theta: float, scaling: AbstractRope | None, dtype: np.dtype, length: int
) -> Frequencies:
    r"""$\theta^{-2i/H}$ for $i < H/2$, scaled: the radians that a pair turns per token of a text of `length` tokens.

    Source: Su et al. (arXiv 2104.09864), equation 15.
    """
    inverse = 1 / periods(width, theta, dtype)
    return inverse if scaling is None else scaling.scaled(inverse, theta, length)


def rotary(
    positions: Int[Array, "batch time"], frequencies: Frequencies, factor: float
) -> tuple[Float[Array, "batch time 1 half"], Float[Array, "batch time 1 half"]]:
    r"""Cosine and sine of position times frequency, times a factor, in the dtype of the frequencies."""
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
