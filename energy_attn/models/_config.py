"""The sizes and constants of a Llama decoder."""

from dataclasses import dataclass

from ..kernels._errors import check_finite_number, check_flag, check_integer

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_key_value_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes and constants of a Llama decoder, under Hugging Face's names.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_hidden_layers: number of layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key/value heads, a divisor of the query heads; None for one
            each.
        head_dim: width of a head, even; None for `hidden_size / num_attention_heads`.
        rms_norm_eps: added to the mean square before its root.
        rope_theta: the rotary embedding's base.
        tie_word_embeddings: whether the output projection is the embedding.
        max_position_embeddings: the context that the model is meant for; nothing is sized by it.

    Raises:
        TypeError: a size that is no integer, a constant that is no number.
        ValueError: a size that is not positive, heads that do not divide, an odd head.

    Examples:
        >>> from energy_attn.models import LlamaConfig
        >>> LlamaConfig(hidden_size=64, num_attention_heads=4).head_dim
        16
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    # None only as an argument: these are filled in
    num_key_value_heads: int = None  # pyright: ignore[reportAssignmentType]
    head_dim: int = None  # pyright: ignore[reportAssignmentType]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        check_integer("num_attention_heads", heads, 1)
        self._fill("num_key_value_heads", heads if kv_heads is None else kv_heads)
        for name in _SIZES:
            check_integer(name, getattr(self, name), 1)
        if heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_key_value_heads: wanted a divisor of the {heads} heads, "
                f"got {self.num_key_value_heads}"
            )
        if self.head_dim is None:
            if self.hidden_size % heads != 0:
                raise ValueError(
                    f"hidden_size: wanted a multiple of the {heads} heads where head_dim is not "
                    f"given, got {self.hidden_size}"
                )
            self._fill("head_dim", self.hidden_size // heads)
        if check_integer("head_dim", self.head_dim, 2) % 2:
            raise ValueError(f"head_dim: wanted an even number, got {self.head_dim}")
        for name, least in (("rms_norm_eps", 0.0), ("rope_theta", 1.0)):
            if check_finite_number(name, getattr(self, name)) < least:
                raise ValueError(f"{name}: wanted at least {least}, got {getattr(self, name)}")
        check_flag("tie_word_embeddings", self.tie_word_embeddings)

    def _fill(self, name: str, value: int) -> None:
        object.__setattr__(self, name, value)
