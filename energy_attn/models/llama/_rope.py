"""Rotary embedding, and the scaling of its frequencies for contexts longer than trained."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from energy_attn.kernels.internal import check_finite_number, check_integer, lse_dtype


@dataclass(frozen=True)
class LinearRope:
    r"""Every frequency divided by a factor: $f \to f / s$.

    Attributes:
        factor: $s$, the ratio of the new context to the original one.

    Raises:
        TypeError: the factor is not a number.
        ValueError: the factor is not above 0.

    Source: Chen et al., position interpolation (arXiv 2306.15595), equation 4.

    Examples:
        >>> from energy_attn.models import LinearRope, LlamaConfig
        >>> LlamaConfig(rope_scaling=LinearRope(factor=4.0)).rope_scaling
        LinearRope(factor=4.0)
    """

    factor: float

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)

    def scaled(self, frequencies: Float[np.ndarray, " half"]) -> Float[np.ndarray, " half"]:
        """The lowered frequencies, in the same dtype."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Rope:
    r"""Low frequencies divided by a factor, high ones kept, as in Llama 3.1 and 3.2.

    A frequency makes $t = f L / 2\pi$ turns in the $L$ tokens of the original context:

    $$f \to (1 - c) \, f / s + c \, f, \qquad
      c = \mathrm{clip}\left(\frac{t - l}{h - l}, 0, 1\right)$$

    Attributes:
        factor: $s$, above 0.
        low_freq_factor: $l$: frequencies of fewer turns are divided by the whole factor.
        high_freq_factor: $h$, above $l$: frequencies of more turns are kept.
        original_max_position_embeddings: $L$.

    Raises:
        TypeError: a factor is not a number, or the context not an integer.
        ValueError: factors out of range or order, or a context below 1.

    Source: The Llama 3 herd of models (arXiv 2407.21783), section 3.4.2; Hugging Face's rope type
    `llama3`.

    Examples:
        >>> from energy_attn.models import Llama3Rope
        >>> Llama3Rope(factor=8.0).high_freq_factor
        4.0
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)
        low = check_positive("low_freq_factor", self.low_freq_factor)
        high = check_finite_number("high_freq_factor", self.high_freq_factor)
        if high <= low:
            raise ValueError(
                f"high_freq_factor: wanted more than low_freq_factor {low}, got {high}"
            )
        context = self.original_max_position_embeddings
        check_integer("original_max_position_embeddings", context, 1)

    def scaled(self, frequencies: Float[np.ndarray, " half"]) -> Float[np.ndarray, " half"]:
        """The lowered frequencies, in the same dtype."""
        turns = self.original_max_position_embeddings / (2 * math.pi / frequencies)
        low, high = self.low_freq_factor, self.high_freq_factor
        weight = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - weight) * frequencies / self.factor + weight * frequencies


def check_positive(name: str, x: float) -> float:
    """Returns `x`, a number above 0; raises `TypeError` or `ValueError` for anything else."""
    number = check_finite_number(name, x)
    if number <= 0:
        raise ValueError(f"{name}: wanted more than 0, got {x}")
    return number


def frequencies(
    width: int, theta: float, scaling: LinearRope | Llama3Rope | None, dtype: np.dtype
) -> Float[np.ndarray, " half"]:
    r"""$\theta^{-2i/H}$ for $i < H/2$, scaled: the angle in radians of a pair's turn per token.

    Each step is rounded as PyTorch rounds it in float32, as at positions of 10^5 a last bit here is a
    hundredth of a radian. The power is computed in float64, as NumPy's in float32 is less accurate.

    Source: Su et al. (arXiv 2104.09864), equation 15.
    """
    exponent = np.arange(0, width, 2, dtype=dtype) / np.asarray(width, dtype)
    power = np.power(float(theta), exponent.astype(np.float64)).astype(dtype)
    inverse = 1 / power
    return inverse if scaling is None else scaling.scaled(inverse)


def rotary(
    positions: Int[Array, "batch time"], frequencies: Float[np.ndarray, " half"]
) -> tuple[Float[Array, "batch time 1 half"], Float[Array, "batch time 1 half"]]:
    r"""Cosine and sine of position times frequency, in the dtype of the frequencies.

    Source: Su et al. (arXiv 2104.09864), equation 15.
    """
    angle = positions.astype(frequencies.dtype)[:, :, None, None] * frequencies[None, None, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "batch time heads width"], cos: Array, sin: Array
) -> Float[Array, "batch time heads width"]:
    """Turns each pair $(x_i, x_{i+H/2})$ by its angle: halves, as in Hugging Face, not neighbours."""
    a, b = jnp.split(x.astype(lse_dtype(x.dtype)), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
