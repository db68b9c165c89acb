"""The BERT encoder: its configuration, its `config.json`, and its layers."""

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from energy_attn import attention
from energy_attn.distributed import SequenceParallel
from energy_attn.distributed.internal import check_counts
from energy_attn.kernels.internal import checks, lse_dtype

from ..functional._tag import placed
from .checkpoint._config import check_activation, check_fields, check_only
from .checkpoint._save import save
from .decoder._config import (
    AbstractModel,
    AbstractModelConfig,
    StoredWeight,
    check_numbers,
    check_that,
    check_type,
)
from .decoder._decoder import Family
from .decoder._read import check_tokens
from .llama._layers import Embedding, Linear

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
# Tensors of a checkpoint without effect on hidden states.
_IGNORED = re.compile(r"pooler\.dense\.(weight|bias)|embeddings\.position_ids")
_ACTIVATION = "gelu"
# Fields with the only value that is supported.
_ONLY: Mapping[str, Any] = {"position_embedding_type": "absolute", "is_decoder": False}
# Fields without effect on hidden states.
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
        type_vocab_size: number of token types; a single text has type 0.
        layer_norm_eps: added to the variance before the square root.

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
        heads = self.num_attention_heads
        fits = self.hidden_size % heads == 0
        check_that(self, "hidden_size", fits, f"a multiple of the {heads} heads")
        check_that(self, "layer_norm_eps", self.layer_norm_eps >= 0, "at least 0")

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
        for ours, theirs in _RENAMED:
            name = re.sub(ours, theirs, name)
        return StoredWeight((name,))

    def ignores(self, name: str, names: Collection[str]) -> bool:
        """Whether a checkpoint with tensors of these `names` may have this one, which holds none of its weights."""
        return _IGNORED.fullmatch(name) is not None


def read_config(entries: Mapping[str, Any]) -> EncoderConfig:
    check_activation("hidden_act", entries, _ACTIVATION)
    check_only(entries, _ONLY)
    names = {field.name for field in dataclasses.fields(EncoderConfig)}
    check_fields(entries, {*names, *_ONLY, *_OF_NO_EFFECT, "hidden_act", "model_type"})
    return EncoderConfig(**{name: x for name, x in entries.items() if name in names})


class EncoderOutput(NamedTuple):
    """The result of calling an encoder: see `Encoder.__call__`."""

    hidden: Float[Array, "batch time width"]
    energies: Float[Array, "layers batch time heads"] | None


class LayerNorm(eqx.Module):
    r"""$y = w \circ (x - \mathrm{mean}(x)) / \sqrt{\mathrm{var}(x) + \epsilon} + b$, in float32 or wider.

    Source: Ba et al. (arXiv 1607.06450), equation 4.
    """

    weight: Float[Array, " width"]
    bias: Float[Array, " width"]
    eps: float = eqx.field(static=True)

    def __init__(self, width: int, eps: float, dtype: DTypeLike):
        self.weight, self.bias, self.eps = jnp.ones(width, dtype), jnp.zeros(width, dtype), eps

    def __call__(self, x: Float[Array, "batch time width"]) -> Float[Array, "batch time width"]:
        wide = lse_dtype(x.dtype)
        y = x.astype(wide)
        y -= y.mean(-1, keepdims=True)
        y *= lax.rsqrt((y**2).mean(-1, keepdims=True) + self.eps)
        weight, bias = (part.astype(wide)[None, None] for part in (self.weight, self.bias))
        return (y * weight + bias).astype(x.dtype)


class Embeddings(eqx.Module):
    """The normed sum of the embeddings of a token, its position and its type."""

    word_embeddings: Embedding
    position_embeddings: Embedding
    token_type_embeddings: Embedding
    norm: LayerNorm

    def __init__(self, config: EncoderConfig, dtype: DTypeLike, *, key: PRNGKeyArray):
        keys, width = jax.random.split(key, 3), config.hidden_size
        counts = config.vocab_size, config.max_position_embeddings, config.type_vocab_size
        self.word_embeddings, self.position_embeddings, self.token_type_embeddings = (
            Embedding(count, width, dtype, key=key) for count, key in zip(counts, keys, strict=True)
        )
        self.norm = LayerNorm(width, config.layer_norm_eps, dtype)

    def __call__(
        self, tokens: Int[Array, "batch time"], kinds: Int[Array, "#batch time"]
    ) -> Float[Array, "batch time width"]:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        x = self.word_embeddings(tokens) + self.position_embeddings(positions)
        return self.norm(x + self.token_type_embeddings(kinds))


class EncoderLayer(eqx.Module):
    r"""$y = \mathrm{norm}(x + W_O \nabla F(x))$, then $\mathrm{norm}(y + \mathrm{MLP}(y))$."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    attention_norm: LayerNorm
    up_proj: Linear
    down_proj: Linear
    mlp_norm: LayerNorm
    heads: int = eqx.field(static=True)

    def __init__(self, config: EncoderConfig, dtype: DTypeLike, *, key: PRNGKeyArray):
        q, k, v, o, up, down = jax.random.split(key, 6)
        width, inner = config.hidden_size, config.intermediate_size
        linear = partial(Linear, dtype=dtype, bias=True)
        norm = partial(LayerNorm, width, config.layer_norm_eps, dtype)
        self.q_proj, self.k_proj = linear(width, width, key=q), linear(width, width, key=k)
        self.v_proj, self.o_proj = linear(width, width, key=v), linear(width, width, key=o)
        self.up_proj, self.down_proj = linear(width, inner, key=up), linear(inner, width, key=down)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.heads = config.num_attention_heads

    def __call__(
        self, x: Float[Array, "batch time width"], see: Callable[..., tuple[Array, Any]]
    ) -> tuple[Float[Array, "batch time width"], Any]:
        q, k, v = (
            proj(x).reshape(*x.shape[:2], self.heads, -1)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out, extra = see(q, k, v)
        x = self.attention_norm(x + self.o_proj(lax.collapse(out, 2)))
        inner = jax.nn.gelu(self.up_proj(x), approximate=False)
        return self.mlp_norm(x + self.down_proj(inner)), extra


class Encoder(AbstractModel):
    r"""A BERT: tokens in, hidden states out; every token sees all of its text.

    Args:
        config: its sizes.
        dtype: of all weights.
        key: for the initial weights: normal, of deviation 0.02; biases are 0.

    Computes the `last_hidden_state` of Hugging Face's `BertModel`, without the pooler.
    [`load`][energy_attn.models.load] reads checkpoints of BERT and of sentence encoders such as all-MiniLM-L6-v2.
    [`shard`][energy_attn.models.shard], [`ea.record`][energy_attn.record],
    [`ea.energy_report`][energy_attn.energy_report] and [`ea.weigh`][energy_attn.weigh] take an encoder.

    Raises:
        TypeError: `config` is not an `EncoderConfig`, `dtype` is not floating, or `key` is not a key.

    Source: Devlin et al. (arXiv 1810.04805), section 3.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.models import Encoder, EncoderConfig
        >>> config = EncoderConfig(16, 8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
        >>> model = Encoder(config, key=jax.random.key(0))
        >>> out = model(jnp.array([[3, 1, 4], [5, 9, 0]]), lengths=jnp.array([3, 2]), return_energies=True)
        >>> out.hidden.shape, out.energies.shape
        ((2, 3, 8), (1, 2, 3, 2))
        >>> model.embed(jnp.array([[3, 1, 4]])).shape
        (1, 8)
    """

    config: EncoderConfig = eqx.field(static=True)
    embeddings: Embeddings
    layers: tuple[EncoderLayer, ...]

    def __init__(self, config: EncoderConfig, dtype: DTypeLike = jnp.float32, *, key: PRNGKeyArray):
        check_type("config", config, EncoderConfig, "an EncoderConfig")
        checks.check_floating_dtype("dtype", dtype)
        self.config = config
        first, *keys = jax.random.split(checks.check_key("key", key), 1 + config.num_hidden_layers)
        self.embeddings = Embeddings(config, dtype, key=first)
        self.layers = tuple(EncoderLayer(config, dtype, key=key) for key in keys)

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        *,
        lengths: Int[Array, " batch"] | None = None,
        token_types: Int[Array, "#batch time"] | None = None,
        parallel: SequenceParallel | None = None,
        return_energies: bool = False,
        attend: Callable[..., Any] = attention,
    ) -> EncoderOutput:
        """Final hidden states; padding has undefined states and energies of minus infinity.

        Args:
            tokens: of any integer dtype, at most `max_position_embeddings` of them.
            lengths: `[batch]`, the number of tokens that each row really has, in front; None: all.
            token_types: the type of each token; None: 0, as for a single text.
            parallel: the mesh axes that the tokens are sharded over; None: none.
            return_energies: whether to return the free energies of all layers, or the second result of
                `attend`.
            attend: the function that computes attention, called as [`attention`][energy_attn.attention] is.

        Returns:
            A named tuple: `hidden`, the final hidden states `[batch, time, width]` in the dtype of the weights, and
            `energies`, the free energies `[layers, batch, time, heads]` in nats, or None unless asked for. With
            another `attend`, these are its second results, stacked over layers.

        Raises:
            TypeError: an array that is not of integers.
            ValueError: shapes do not fit, or more tokens than the model has positions.
        """
        batch, time = check_tokens("tokens", tokens).shape
        if time > self.config.max_position_embeddings:
            raise ValueError(
                f"tokens: wanted at most the {self.config.max_position_embeddings} positions of the "
                f"model (max_position_embeddings), got {time}"
            )
        options = {"parallel": parallel, "return_energy": True}
        if lengths is not None:
            counts = check_counts(lengths, batch, time)
            options |= {"query_seq_lengths": counts, "key_value_seq_lengths": counts}
        kinds = jnp.zeros((1, time), jnp.int32)
        if token_types is not None:
            kinds = check_tokens("token_types", token_types)
        x, energies = self.embeddings(tokens, kinds), []
        for i, layer in enumerate(self.layers):
            with placed(f"layers[{i}]"):
                x, energy = layer(x, partial(attend, **options))
            energies.append(energy)
        if not return_energies:
            return EncoderOutput(x, None)
        return EncoderOutput(x, jax.tree.map(lambda *each: jnp.stack(each), *energies))

    def embed(
        self,
        tokens: Int[Array, "batch time"],
        *,
        lengths: Int[Array, " batch"] | None = None,
        parallel: SequenceParallel | None = None,
    ) -> Float[Array, "batch width"]:
        """The embedding of each text: the mean of its hidden states, normalised to length one.

        Arguments and errors are those of a call. Source: Reimers and Gurevych (arXiv 1908.10084), section 3.
        """
        hidden = self(tokens, lengths=lengths, parallel=parallel).hidden
        hidden = hidden.astype(lse_dtype(hidden.dtype))
        if lengths is not None:
            exists = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
            hidden = jnp.where(exists[:, :, None], hidden, 0)
        total = hidden.sum(1)  # in the direction of the mean
        return total / jnp.linalg.norm(total, axis=1, keepdims=True)

    def save(self, directory: str | os.PathLike[str], *, max_shard_size: int = 5 * 10**9) -> None:
        """Writes a checkpoint that `load` and transformers read.

        Arguments and errors are those of [`Llama.save`][energy_attn.models.Llama.save].
        """
        save(self, directory, max_shard_size)


BERT = Family(read_config, Encoder)
