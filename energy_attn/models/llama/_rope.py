"""Rotary embedding, and scalings of its frequencies for contexts longer than trained."""

import abc
import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from energy_attn.kernels.internal import checks, lse_dtype

from ..decoder._config import check_numbers, check_positive, check_that

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


@dataclass(frozen=True)
class LinearRope(AbstractRope):
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
        check_numbers(self, positive=("factor",))

    def scaled(self, frequencies: Frequencies, theta: float, length: int) -> Frequencies:
        """The lowered frequencies, in the same dtype."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Rope(AbstractRope):
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
        check_numbers(self, positive=("factor", "low_freq_factor"))
        low, high = self.low_freq_factor, self.high_freq_factor
        check_that(self, "high_freq_factor", high > low, f"more than low_freq_factor {low}")

    def scaled(self, frequencies: Frequencies, theta: float, length: int) -> Frequencies:
        """The lowered frequencies, in the same dtype."""
        turns = self.original_max_position_embeddings / (2 * math.pi / frequencies)
        low, high = self.low_freq_factor, self.high_freq_factor
        weight = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - weight) * frequencies / self.factor + weight * frequencies


@dataclass(frozen=True)
class YarnRope(AbstractRope):
    r"""Low frequencies divided by a factor, high ones kept, a ramp over the pairs between; queries and keys grow.

    Pair $i$ of the $H/2$ makes $t_i = \theta^{-2i/H} L / 2\pi$ turns in the $L$ tokens of the original context. With
    $i_t$, the pair that makes $t$ turns,

    $$f_i \to (c_i / s + 1 - c_i)\, f_i, \qquad
      c_i = \mathrm{clip}\left(\frac{i - i_{t_h}}{i_{t_l} - i_{t_h}}, 0, 1\right)$$

    and turned queries and keys are multiplied by $0.1 \ln s + 1$, for $s > 1$.

    Attributes:
        factor: $s$, above 0.
        original_max_position_embeddings: $L$.
        beta_fast: $t_h$: pairs of more turns are kept.
        beta_slow: $t_l$: pairs of fewer turns are divided by the whole factor.
        mscale: with `mscale_all_dim`, a factor of the logarithm above, as in DeepSeek-V2 and V3.
        mscale_all_dim: that of the factor by which this one is divided; None, or 0 for both: neither.
        scale: the factor of queries and keys; None: as above. transformers calls it `attention_factor`.
        truncate: whether $i_{t_h}$ and $i_{t_l}$ are rounded to whole pairs, outwards.

    Raises:
        TypeError: a factor is not a number, the context not an integer, or `truncate` no bool.
        ValueError: factors out of range, or a context below 1.

    Source: Peng et al., YaRN (arXiv 2309.00071), section 3.2 and equation 22; Hugging Face's rope type `yarn`.

    Examples:
        >>> from energy_attn.models import YarnRope
        >>> round(YarnRope(factor=4.0, original_max_position_embeddings=32768).attention_factor, 4)
        1.1386
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    scale: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_numbers(self, positive=("factor", "beta_fast", "beta_slow"))

    def scaled(self, frequencies: Frequencies, theta: float, length: int) -> Frequencies:
        """The lowered frequencies, in the same dtype."""
        half = len(frequencies)

        def pair(turns: float) -> float:
            context = self.original_max_position_embeddings
            return half * math.log(context / (turns * 2 * math.pi)) / math.log(theta)

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        last = last if last != first else last + 0.001
        dtype = frequencies.dtype
        ramp = np.clip((np.arange(half, dtype=dtype) - dtype.type(first)) / (last - first), 0, 1)
        keep = (1 - ramp).astype(dtype)
        lowered = 1 / (dtype.type(self.factor) * periods(2 * half, theta, dtype))
        return (lowered * (1 - keep) + frequencies * keep).astype(dtype)

    @property
    def attention_factor(self) -> float:
        """The factor of turned queries and keys."""
        if self.scale is not None:
            return self.scale
        if self.mscale and self.mscale_all_dim:
            return self.grown(self.mscale) / self.grown(self.mscale_all_dim)
        return self.grown(1.0)

    def grown(self, by: float) -> float:
        r"""The factor $0.1 \, b \ln s + 1$, or 1 for $s \le 1$."""
        return 1.0 if self.factor <= 1 else 0.1 * by * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class DynamicRope(AbstractRope):
    r"""A base that grows with the length of the text, beyond the context that the model is meant for.

    For a text of $T$ tokens, more than the context $L$, and turned parts of heads of width $H$,

    $$\theta \to \theta \left(\frac{s T}{L} - (s - 1)\right)^{H / (H - 2)}$$

    $T$ is known before the first token is read, as keys in a cache would not change with it: without a cache it is the
    number of tokens of the call, and with one the `slots` that it was made with. transformers turns each token
    by the length so far instead, and keeps the keys of tokens that it turned otherwise.

    Attributes:
        factor: $s$, at least 1.
        max_position_embeddings: $L$, that of the configuration.

    Raises:
        TypeError: the factor is not a number, or the context not an integer.
        ValueError: a factor below 1, or a context below 1.

    Source: the rope type `dynamic` of Hugging Face; NTK-aware scaling in YaRN (arXiv 2309.00071), section 3.1.

    Examples:
        >>> from energy_attn.models import DynamicRope, LlamaConfig
        >>> LlamaConfig(rope_scaling=DynamicRope(2.0, 2048)).context_length
        4096
    """

    factor: float
    max_position_embeddings: int

    def __post_init__(self) -> None:
        check_numbers(self)
        check_that(self, "factor", self.factor >= 1, "at least 1")

    def scaled(self, frequencies: Frequencies, theta: float, length: int) -> Frequencies:
        """The frequencies of the grown base, in the same dtype."""
        width = 2 * len(frequencies)
        context = self.max_position_embeddings
        if length <= context or width == 2:
            return frequencies
        grown = self.factor * length / context - (self.factor - 1)
        return 1 / periods(width, theta * grown ** (width / (width - 2)), frequencies.dtype)


@dataclass(frozen=True)
class LongRope(AbstractRope):
    r"""A divisor for each frequency: one list for texts within the original context, one for longer ones.

    $$f_i \to f_i / \lambda_i$$

    and turned queries and keys are multiplied by $\sqrt{1 + \ln s / \ln L}$ with the original context $L$ and the ratio
    $s$ of the contexts, if that is above 1. The length of the text is known before its first token is read, as for
    [`DynamicRope`][energy_attn.models.DynamicRope].

    Attributes:
        short_factor: $\lambda$ within the original context, for each pair.
        long_factor: $\lambda$ beyond it.
        original_max_position_embeddings: $L$.
        factor: $s$.
        scale: the factor of queries and keys; None: as above. transformers calls it `attention_factor`.

    Raises:
        TypeError: a number or a list of another type.
        ValueError: lists of different lengths, or numbers out of range.

    Source: Ding et al., LongRoPE (arXiv 2402.13753), section 3; Phi-3 (arXiv 2404.14219).

    Examples:
        >>> from energy_attn.models import LongRope
        >>> rope = LongRope((1.0, 1.0), (1.5, 4.0), original_max_position_embeddings=4096, factor=32.0)
        >>> round(rope.attention_factor, 4)
        1.1902
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float
    scale: float | None = None

    def __post_init__(self) -> None:
        check_numbers(self, ("factor",), {"original_max_position_embeddings": 2})
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name)
            if not isinstance(values, tuple):  # hashable, as the scaling is static
                raise TypeError(f"{name}: wanted a tuple of numbers, got {checks.received(values)}")
            for value in values:
                check_positive(name, value)
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"long_factor: wanted {len(self.short_factor)} numbers as in short_factor, "
                f"got {len(self.long_factor)}"
            )

    def scaled(self, frequencies: Frequencies, theta: float, length: int) -> Frequencies:
        """The divided frequencies, in the same dtype; raises `ValueError` for another number of pairs."""
        is_long = length > self.original_max_position_embeddings
        factors = np.array(self.long_factor if is_long else self.short_factor, frequencies.dtype)
        if len(factors) != len(frequencies):
            raise ValueError(
                f"short_factor: wanted a number for each of {len(frequencies)} pairs, got {len(factors)}"
            )
        return 1 / (factors * periods(2 * len(frequencies), theta, frequencies.dtype))

    @property
    def attention_factor(self) -> float:
        """The factor of turned queries and keys."""
        if self.scale is not None:
            return self.scale
        if self.factor <= 1:
            return 1.0
        context = self.original_max_position_embeddings
        return math.sqrt(1 + math.log(self.factor) / math.log(context))
