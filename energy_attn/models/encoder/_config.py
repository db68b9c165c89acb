"""The sizes of an encoder, and the `config.json` that holds them."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint._config import check_activation, check_fields, check_only
from ..decoder._config import AbstractModelConfig, StoredWeight, check_numbers

# Names of weights here, and in a checkpoint.
_RENAMED = (
    (r"^model\.", ""),
    (r"^layers\.", "encoder.layer."),
    (r"\bq_proj\b", "attention.self.query"),
    (r"\bk_proj\b", "attention.self.key"),
    (r"\bv_proj\b", "attention.self.value"),
    (r"\bo_proj\b", "attention.output.dense"),
    (r"\battention_norm\b", "attention.output.LayerNorm"),
    (r"\bup_proj\b", "intermediate.dense"),
    (r"\bdown_proj\b", "output.dense"),
    (r"^embeddings\.norm\b", "embeddings.LayerNorm"),
    (r"\bmlp_norm\b", "output.LayerNorm"),
)
# What a checkpoint has and hidden states do not depend on.
_IGNORED = re.compile(r"pooler\.dense\.(weight|bias)|embeddings\.position_ids")
_ACTIVATION = "gelu"
# Fields with the only value that is computed.
_ONLY: Mapping[str, Any] = {"position_embedding_type": "absolute", "is_decoder": False}
# Fields of training, of the pooler, of heads, and of how others lay out their work.
_OF_NO_EFFECT = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type", "directionality"),
    *("tie_word_embeddings", "eos_token_id"),
)


@dataclass(frozen=True)
class EncoderConfig(AbstractModelConfig):
    """The sizes of a BERT, under Hugging Face's names.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream, a multiple of the heads.
        num_hidden_layers: number of layers.
        num_attention_heads: number of heads.
        intermediate_size: width inside the MLP.
        max_position_embeddings: the most tokens of a text.
        type_vocab_size: number of kinds of tokens, of which the first is that of a single text.
        layer_norm_eps: added to the variance before its root.

    Raises:
        TypeError: a size is not an integer, or the constant not a number.
        ValueError: a size is not positive, or the heads do not divide the width.

    Examples:
        >>> from energy_attn.models import EncoderConfig
        >>> EncoderConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536).head_dim
        32
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size: wanted a multiple of the {self.num_attention_heads} heads, "
                f"got {self.hidden_size}"
            )
        if self.layer_norm_eps < 0:
            raise ValueError(f"layer_norm_eps: wanted at least 0, got {self.layer_norm_eps}")

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """Returns `num_attention_heads`, as heads share no keys."""
        return self.num_attention_heads

    def to_json(self) -> dict[str, Any]:
        """The fields of a `config.json` that transformers reads."""
        entries = {"architectures": ["BertModel"], "model_type": "bert", "hidden_act": _ACTIVATION}
        return {**entries, **_ONLY, **vars(self)}

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        """Returns the place in a checkpoint of the weight of this name and shape."""
        del shape
        for ours, theirs in _RENAMED:
            name = re.sub(ours, theirs, name)
        return StoredWeight((name,))

    def ignores(self, name: str, names: Collection[str]) -> bool:
        """Whether a tensor of a checkpoint with these `names` has no weight of the encoder, and may be there."""
        del names
        return _IGNORED.fullmatch(name) is not None


def read_config(entries: Mapping[str, Any]) -> EncoderConfig:
    check_activation("hidden_act", entries, _ACTIVATION)
    check_only(entries, _ONLY)
    names = {field.name for field in dataclasses.fields(EncoderConfig)}
    check_fields(entries, {*names, *_ONLY, *_OF_NO_EFFECT, "hidden_act", "model_type"})
    return EncoderConfig(**{name: x for name, x in entries.items() if name in names})
