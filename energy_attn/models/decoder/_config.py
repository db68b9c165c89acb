"""The configurations of models of any family."""

import abc
from collections.abc import Collection
from typing import Any

from ._stored import Stored


class AbstractModelConfig(abc.ABC):
    """The sizes of a model that its checkpoints need, and its sharding, under Hugging Face's names.

    A configuration is hashable, as it is a static field of its model: a frozen dataclass.

    Attributes:
        vocab_size: number of tokens.
        intermediate_size: width inside the MLP.
        num_hidden_layers: number of layers.
        num_attention_heads: number of query heads.
    """

    vocab_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int

    @abc.abstractmethod
    def stored(self, name: str, shape: tuple[int, ...]) -> Stored:
        """Where a checkpoint has the weight of this name and shape."""

    @abc.abstractmethod
    def ignores(self, name: str, names: Collection[str]) -> bool:
        """Whether a tensor of a checkpoint with these `names` has no weight of the model, and may be there."""

    @abc.abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The `config.json` of a checkpoint."""


class AbstractDecoderConfig(AbstractModelConfig):
    """The sizes of a decoder that generation and caches need beside those.

    Attributes:
        num_key_value_heads: number of key/value heads, a divisor of the query heads.
        head_dim: width of queries and keys.
        tie_word_embeddings: whether the output projection is the embedding.
        eos_token_id: the tokens that end a text.
    """

    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    eos_token_id: tuple[int, ...]

    @property
    @abc.abstractmethod
    def value_dim(self) -> int:
        """The width of a value."""

    @property
    @abc.abstractmethod
    def context_length(self) -> int:
        """The number of positions that the model is meant for."""
