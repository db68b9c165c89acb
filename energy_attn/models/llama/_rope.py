"""Rotary position embedding, and the scalings of its frequencies for contexts longer than trained."""

import abc
import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from energy_attn.kernels.internal import lse_dtype

from ..decoder._config import check_numbers, check_positive, check_that, check_type

Frequencies = Float[np.ndarray, " half"]


class Rope(abc.ABC):
    """A scaling of the frequencies of a rotary embedding, as `Rope.linear`, `Rope.yarn` and others make it.

    [`LlamaConfig`][energy_attn.models.LlamaConfig] takes one as `rope_scaling`. The arguments of a constructor are
    attributes of the scaling. For another scaling, subclass `Rope` as a frozen dataclass: configurations are hashable.

    Examples:
        >>> import dataclasses
        >>> from energy_attn.models import LlamaConfig, Rope
        >>> LlamaConfig(rope_scaling=Rope.linear(4.0)).context_length
        8192
        >>> @dataclasses.dataclass(frozen=True)
        ... class Halved(Rope):
        ...     def scaled(self, frequencies, theta, length):
        ...         return frequencies / 2
        >>> Halved().attention_factor
        1.0
    """

    @abc.abstractmethod
    def scaled(self, frequencies: Frequencies, theta: float, length: int) -> Frequencies:
        """Returns the scaled frequencies, in the same dtype.

        Args:
            frequencies: radians per token of each pair, `[rotary_dim / 2]`.
            theta: the base of the frequencies.
            length: the most tokens that the text may have: without a cache the tokens of the call, with one the
                slots that it was made with.
        """

    @property
    def attention_factor(self) -> float:
        """The factor of rotated queries and keys."""
        return 1.0

    @staticmethod
    def linear(factor: float) -> "Rope":
        r"""Position interpolation: every frequency divided by a factor, $f \to f / s$.

        Args:
            factor: $s$, above 0, the ratio of the new context to the original one.

        Raises:
            TypeError: the factor is not a number.
            ValueError: the factor is not above 0.

        Source: Chen et al., position interpolation (arXiv 2306.15595), equation 4.
        """
        return LinearRope(factor)

    @staticmethod
    def llama3(
        factor: float,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        original_max_position_embeddings: int = 8192,
    ) -> "Rope":
        r"""The scaling of Llama 3.1 and 3.2: low frequencies divided by a factor, high ones kept.

        A frequency makes $t = f L / 2\pi$ turns in the $L$ tokens of the original context:

        $$f \to (1 - c) \, f / s + c \, f, \qquad
          c = \mathrm{clip}\left(\frac{t - l}{h - l}, 0, 1\right)$$

        Args:
            factor: $s$, above 0.
            low_freq_factor: $l$: frequencies of fewer turns are divided by the whole factor.
            high_freq_factor: $h$, above $l$: frequencies of more turns are kept.
            original_max_position_embeddings: $L$, in tokens.

        Raises:
            TypeError: a factor is not a number, or the context not an integer.
            ValueError: factors out of range or order, or a context below 1.

        Source: The Llama 3 herd of models (arXiv 2407.21783), section 3.4.2; Hugging Face's rope type `llama3`.
        """
        context = original_max_position_embeddings
        return Llama3Rope(factor, low_freq_factor, high_freq_factor, context)

    @staticmethod
    def yarn(
        factor: float,
        original_max_position_embeddings: int,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        scale: float | None = None,
        truncate: bool = True,
    ) -> "Rope":
        r"""YaRN: low frequencies divided by a factor, high ones kept, and a ramp over the pairs in between.

        Pair $i$ of the $H/2$ makes $t_i = \theta^{-2i/H} L / 2\pi$ turns in the $L$ tokens of the original context.
        With $i_t$, the pair that makes $t$ turns,

        $$f_i \to (c_i / s + 1 - c_i)\, f_i, \qquad
          c_i = \mathrm{clip}\left(\frac{i - i_{t_h}}{i_{t_l} - i_{t_h}}, 0, 1\right)$$

        and rotated queries and keys are multiplied by $0.1 \ln s + 1$, for $s > 1$.

        Args:
            factor: $s$, above 0.
            original_max_position_embeddings: $L$, in tokens.
            beta_fast: $t_h$: pairs of more turns are kept.
            beta_slow: $t_l$: pairs of fewer turns are divided by the whole factor.
            mscale: with `mscale_all_dim`, as in DeepSeek-V2 and V3: queries and keys are multiplied by
                $(0.1\, m \ln s + 1) / (0.1\, m' \ln s + 1)$ with these two, unless one is None or 0.
            mscale_all_dim: $m'$.
            scale: the factor of queries and keys; None: as above. transformers calls it `attention_factor`.
            truncate: whether $i_{t_h}$ and $i_{t_l}$ are rounded outwards to whole pairs.

        Raises:
            TypeError: a factor is not a number, the context not an integer, or `truncate` not a bool.
            ValueError: factors out of range, or a context below 1.

        Source: Peng et al., YaRN (arXiv 2309.00071), section 3.2 and equation 22; Hugging Face's rope type `yarn`.

        Examples:
            >>> from energy_attn.models import Rope
            >>> round(Rope.yarn(4.0, 32768).attention_factor, 4)
            1.1386
        """
        context, betas = original_max_position_embeddings, (beta_fast, beta_slow)
        return YarnRope(factor, context, *betas, mscale, mscale_all_dim, scale, truncate)

    @staticmethod
    def dynamic(factor: float, max_position_embeddings: int) -> "Rope":
        r"""NTK-aware scaling: a base that grows with the length of the text, beyond the context of the model.

        For a text of $T$ tokens, more than the context $L$, and rotated parts of heads of width $H$,

        $$\theta \to \theta \left(\frac{s T}{L} - (s - 1)\right)^{H / (H - 2)}$$

        $T$ is fixed before the first token is read, so that keys in a cache stay valid: without a cache it is the
        number of tokens of the call, with one the `slots` that it was made with. transformers rotates each token by the
        length so far instead.

        Args:
            factor: $s$, at least 1.
            max_position_embeddings: $L$ of the configuration, in tokens.

        Raises:
            TypeError: the factor is not a number, or the context not an integer.
            ValueError: a factor or a context below 1.

        Source: Hugging Face's rope type `dynamic`; NTK-aware scaling in YaRN (arXiv 2309.00071), section 3.1.
        """
        return DynamicRope(factor, max_position_embeddings)

    @staticmethod
    def longrope(
        short_factor: tuple[float, ...],
        long_factor: tuple[float, ...],
        original_max_position_embeddings: int,
        factor: float,
        scale: float | None = None,
    ) -> "Rope":
        r"""LongRoPE: a divisor for each frequency, from one list within the original context and another beyond it.

        $$f_i \to f_i / \lambda_i$$

        and rotated queries and keys are multiplied by $\sqrt{1 + \ln s / \ln L}$ if that is above 1. The length of the
        text is fixed before the first token is read, as for `Rope.dynamic`.

        Args:
            short_factor: $\lambda$ of each pair within the original context.
            long_factor: $\lambda$ beyond it.
            original_max_position_embeddings: $L$, in tokens.
            factor: $s$, the ratio of the new context to the original one.
            scale: the factor of queries and keys; None: as above. transformers calls it `attention_factor`.

        Raises:
            TypeError: a number or a list of another type.
            ValueError: lists of different lengths, or numbers out of range.

        Source: Ding et al., LongRoPE (arXiv 2402.13753), section 3; Phi-3 (arXiv 2404.14219).

        Examples:
            >>> from energy_attn.models import Rope
            >>> round(Rope.longrope((1.0, 1.0), (1.5, 4.0), 4096, factor=32.0).attention_factor, 4)
            1.1902
        """
        context = original_max_position_embeddings
        return LongRope(short_factor, long_factor, context, factor, scale)


@dataclass(frozen=True)
class LinearRope(Rope):
    factor: float

    def __post_init__(self) -> None:
        check_numbers(self, positive=("factor",))

    def scaled(self, frequencies: Frequencies, theta: float, length: int) -> Frequencies:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Rope(Rope):
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        check_numbers(self, positive=("factor", "low_freq_factor"))
        low, high = self.low_freq_factor, self.high_freq_factor
        check_that(self, "high_freq_factor", high > low, f"more than low_freq_factor {low}")

    def scaled(self, frequencies: Frequencies, theta: float, length: int) -> Frequencies:
        turns = self.original_max_position_embeddings / (2 * math.pi / frequencies)
        low, high = self.low_freq_factor, self.high_freq_factor
        weight = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - weight) * frequencies / self.factor + weight * frequencies


@dataclass(frozen=True)
class YarnRope(Rope):
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
        if self.scale is not None:
            return self.scale
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude(1.0)

    def magnitude(self, mscale: float) -> float:
        r"""Returns $0.1 \, m \ln s + 1$ for $s > 1$, else 1."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class DynamicRope(Rope):
    factor: float
    max_position_embeddings: int

    def __post_init__(self) -> None:
        check_numbers(self)
        check_that(self, "factor", self.factor >= 1, "at least 1")

    def scaled(self, frequencies: Frequencies, theta: float, length: int) -> Frequencies:
        width = 2 * len(frequencies)
        context = self.max_position_embeddings
        if length <= context or width == 2:
            return frequencies
        grown = self.factor * length / context - (self.factor - 1)
        return 1 / periods(width, theta * grown ** (width / (width - 2)), frequencies.dtype)


@dataclass(frozen=True)
class LongRope(Rope):
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float
    scale: float | None = None

    def __post_init__(self) -> None:
        check_numbers(self, ("factor",), {"original_max_position_embeddings": 2})
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name)
            # hashable, as the scaling is static
            check_type(name, values, tuple, "a tuple of numbers")
            for value in values:
                check_positive(name, value)
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"long_factor: wanted {len(self.short_factor)} numbers as in short_factor, "
                f"got {len(self.long_factor)}"
            )

    def scaled(self, frequencies: Frequencies, theta: float, length: int) -> Frequencies:
        is_long = length > self.original_max_position_embeddings
        factors = np.array(self.long_factor if is_long else self.short_factor, frequencies.dtype)
        if len(factors) != len(frequencies):
            raise ValueError(
                f"short_factor: wanted a number for each of {len(frequencies)} pairs, got {len(factors)}"
            )
        return 1 / (factors * periods(2 * len(frequencies), theta, frequencies.dtype))

    @property
    def attention_factor(self) -> float:
        if self.scale is not None:
            return self.scale
        if self.factor <= 1:
            return 1.0
        context = self.original_max_position_embeddings
        return math.sqrt(1 + math.log(self.factor) / math.log(context))


def periods(width: int, theta: float, dtype: np.dtype) -> Frequencies:
    r"""Returns $\theta^{2i/H}$ for $i < H/2$: the tokens in which each pair turns by one radian."""
    # Each step is rounded as PyTorch rounds it in float32: at positions of 10^5 a last bit is a hundredth of a radian.
    # The power is computed in float64, as NumPy's in float32 is less accurate.
    exponent = np.arange(0, width, 2, dtype=dtype) / np.asarray(width, dtype)
    return np.power(float(theta), exponent.astype(np.float64)).astype(dtype)


def frequencies(
    width: int, theta: float, scaling: Rope | None, dtype: np.dtype, length: int
) -> Frequencies:
    r"""Returns the scaled $\theta^{-2i/H}$ for $i < H/2$: radians per token of each pair.

    Source: Su et al. (arXiv 2104.09864), equation 15.
    """
    inverse = 1 / periods(width, theta, dtype)
    return inverse if scaling is None else scaling.scaled(inverse, theta, length)


def rotary(
    positions: Int[Array, "batch time"], frequencies: Frequencies, factor: float
) -> tuple[Float[Array, "batch time 1 half"], Float[Array, "batch time 1 half"]]:
    """Returns the cosine and sine of position times frequency, each times `factor`."""
    angle = positions.astype(frequencies.dtype)[:, :, None, None] * frequencies[None, None, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def rotate(
    x: Float[Array, "batch time heads width"], cos: Array, sin: Array
) -> Float[Array, "batch time heads width"]:
    r"""Rotates each pair $(x_i, x_{i+H/2})$ by its angle $\phi_i$; entries beyond $H$ are kept.

    $(a, b) \to (a \cos\phi - b \sin\phi,\ b \cos\phi + a \sin\phi)$, with halves paired as in Hugging Face.
    """
    half = cos.shape[-1]
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = jnp.split(rotated.astype(lse_dtype(x.dtype)), 2, -1)
    out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
    return jnp.concatenate([out, rest], -1) if rest.shape[-1] else out
