"""Scalings of a rotary embedding that depend on the length of the text."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from energy_attn.kernels.internal import check_finite_number, check_integer, received

from ._scaling import AbstractRope, check_positive, periods


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
        if check_finite_number("factor", self.factor) < 1:
            raise ValueError(f"factor: wanted at least 1, got {self.factor}")
        check_integer("max_position_embeddings", self.max_position_embeddings, 1)

    def scaled(
        self, frequencies: Float[np.ndarray, " half"], theta: float, length: int
    ) -> Float[np.ndarray, " half"]:
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
        check_integer("original_max_position_embeddings", self.original_max_position_embeddings, 2)
        check_positive("factor", self.factor)
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name)
            if not isinstance(values, tuple):  # hashable, as the scaling is static
                raise TypeError(f"{name}: wanted a tuple of numbers, got {received(values)}")
            for value in values:
                check_positive(name, value)
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"long_factor: wanted {len(self.short_factor)} numbers as in short_factor, "
                f"got {len(self.long_factor)}"
            )
        if self.scale is not None:
            check_finite_number("scale", self.scale)

    def scaled(
        self, frequencies: Float[np.ndarray, " half"], theta: float, length: int
    ) -> Float[np.ndarray, " half"]:
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
