"""The Llama decoder in its standard form, with attention by this library.

Names of fields and parameters are those of Hugging Face's `LlamaConfig` and `LlamaForCausalLM`, and
so are the conventions: weights `(out, in)`, rotary embedding of the two halves of a head.
"""

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from energy_attn import Categorical, VocabularyParallel
from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.internal import checks, lse_dtype
from energy_attn.kernels.scores import SoftCap

from ...functional._citation import cite
from ..checkpoint._load import load
from ..checkpoint._save import save
from ..decoder._config import check_type
from ..decoder._decoder import AbstractDecoder, Family
from ..decoder._read import See
from ._config import LlamaConfig
from ._experts import RoutedMLP
from ._json import read_fields
from ._layers import (
    Embedding,
    LatentAttention,
    Linear,
    LlamaAttention,
    LlamaMLP,
    RMSNorm,
    attention_scale,
    dot,
    norm_of,
)
from ._rope import frequencies, rotary


class LlamaLayer(eqx.Module):
    """Attention and MLP, each after a norm and added to the residual stream; with `post_norms`, normed before that.

    With `post_norms`, `post_attention_layernorm` is the norm after attention, else the norm before the MLP: names are
    Hugging Face's.
    """

    input_layernorm: RMSNorm | None
    self_attn: LlamaAttention | LatentAttention
    post_attention_layernorm: RMSNorm
    pre_feedforward_layernorm: RMSNorm | None
    post_feedforward_layernorm: RMSNorm | None
    mlp: LlamaMLP | RoutedMLP
    options: tuple[tuple[str, Any], ...] = eqx.field(static=True)  # of its attention
    rope: int | None = eqx.field(static=True)  # the index of its rotary embedding, or None

    def __init__(self, config: LlamaConfig, index: int, dtype: DTypeLike, *, key: PRNGKeyArray):
        window, cap = config.window(index), config.attn_logit_softcapping
        options = {
            "scale": attention_scale(config),
            "local_window_size": None if window is None else (window - 1, 0),
            "score": None if cap is None else SoftCap(cap),
        }
        self.options = tuple((name, x) for name, x in options.items() if x is not None)
        local = window is not None and config.rope_local_base_freq is not None
        self.rope = int(local) if config.rotates(index) else None
        attend, mlp = jax.random.split(key)
        norm = partial(norm_of, config, config.hidden_size, dtype)
        before, after = config.pre_norms, config.post_norms
        self.input_layernorm = norm() if before else None
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm() if before and after else None
        self.post_feedforward_layernorm = norm() if after else None
        projections = LlamaAttention if config.latent is None else LatentAttention
        self.self_attn = projections(config, dtype, key=attend)
        routed = config.routed(index) is not None
        self.mlp = (RoutedMLP if routed else LlamaMLP)(config, dtype, key=mlp)

    def __call__(
        self, x: Float[Array, "batch time width"], ropes: tuple[tuple[Array, Array], ...], see: See
    ) -> tuple[Float[Array, "batch time width"], Any]:
        """The residual stream after the layer, and the second result of `see(query, key, value, **options)`."""
        rope = None if self.rope is None else ropes[self.rope]
        heads = see.rows(self._heads, x, rope)
        options = dict(self.options)
        if self.self_attn.sinks is not None:
            options["sink"] = self.self_attn.sinks
        out, extra = see(*heads, **options)
        return see.rows(partial(self._after, parallel=see.parallel), x, out), extra

    def _heads(self, x: Array, rope: tuple[Array, Array] | None) -> tuple:
        return self.self_attn.project(_of(self.input_layernorm, x), rope)

    def _after(self, x: Array, out: Array, parallel: SequenceParallel | None) -> Array:
        out = self.self_attn.o_proj(lax.collapse(out, 2))
        before, after = self.post_attention_layernorm, self.post_feedforward_layernorm
        if after is not None:
            out, before = self.post_attention_layernorm(out), self.pre_feedforward_layernorm
        x = x + out
        routed = isinstance(self.mlp, RoutedMLP)
        mlp = partial(self.mlp, parallel=parallel) if routed else self.mlp
        return x + _of(after, mlp(_of(before, x)))


def _of(norm: RMSNorm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


class Llama(AbstractDecoder):
    r"""A Llama decoder: tokens in, logits out.

    $$x \mathrel{+}= W_O \nabla F(\mathrm{norm}(x)), \qquad
      x \mathrel{+}= \mathrm{SwiGLU}(\mathrm{norm}(x))$$

    An [`AbstractDecoder`][energy_attn.models.AbstractDecoder], which has its call and its methods for
    caches and trees.

    Args:
        config: its sizes.
        dtype: of all weights.
        key: for the initial weights: normal, of deviation 0.02; biases are 0.

    Paths of weights are Hugging Face's names: `layers[0].self_attn.q_proj.weight`. `lm_head` is None
    where the embedding is the output projection too.

    Raises:
        TypeError: `config` is not a `LlamaConfig`, `dtype` is not floating, or `key` is not a key.

    Computes what Hugging Face's `LlamaForCausalLM` does: norms, softmax and rotary embedding in float32,
    or in float64 where the weights are. Unlike there, cosines and sines stay in float32 for weights of
    16 bits.

    Source: Touvron et al. (arXiv 2302.13971), section 2.2.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from energy_attn.models import Llama, LlamaConfig
        >>> config = LlamaConfig(256, 32, 64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = Llama(config, key=jax.random.key(0))
        >>> model(jnp.zeros((1, 8), jnp.int32)).logits.shape
        (1, 8, 256)
    """

    config: LlamaConfig = eqx.field(static=True)
    embed_tokens: Embedding
    layers: tuple[LlamaLayer, ...]
    norm: RMSNorm
    lm_head: Linear | None

    def __init__(self, config: LlamaConfig, dtype: DTypeLike = jnp.float32, *, key: PRNGKeyArray):
        check_type("config", config, LlamaConfig, "a LlamaConfig")
        checks.check_floating_dtype("dtype", dtype)
        cite("llama")
        self.config = config
        embed, layers, head = jax.random.split(checks.check_key("key", key), 3)
        vocab, width = config.vocab_size, config.hidden_size
        scale = width**0.5 if config.scaled_embeddings else 1.0
        self.embed_tokens = Embedding(vocab, width, dtype, scale=scale, key=embed)
        keys = jax.random.split(layers, config.num_hidden_layers)
        self.layers = tuple(LlamaLayer(config, i, dtype, key=key) for i, key in enumerate(keys))
        self.norm = norm_of(config, width, dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(width, vocab, dtype, key=head)

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str],
        *,
        mesh: Mesh | None = None,
        dtype: DTypeLike | None = None,
        tensor: str = "tensor",
        progress: bool | Callable[[float, str], Any] | None = None,
    ) -> "Llama":
        """Reads a checkpoint whose `model_type` is `"llama"`.

        Arguments and errors are those of [`load`][energy_attn.models.load].

        Examples:
            >>> import jax, tempfile
            >>> from energy_attn.models import Llama, LlamaConfig
            >>> config = LlamaConfig(16, 8, 16, num_hidden_layers=1, num_attention_heads=2)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     Llama(config, key=jax.random.key(0)).save(folder)
            ...     model = Llama.load(folder)
            >>> model.config == config
            True
        """
        cite("llama")
        return load(
            directory, {"llama": LLAMA}, mesh=mesh, dtype=dtype, tensor=tensor, progress=progress
        )

    def save(self, directory: str | os.PathLike[str], *, max_shard_size: int = 5 * 10**9) -> None:
        """Writes a checkpoint that `load` and transformers read.

        All files are on disk before the weights' file, or the index of several, replaces the old one:
        a save that is killed leaves the old checkpoint or the new one, `load` refuses files of
        different saves, and the next save cleans up. The host gathers one weight at a time. With
        several processes, all of them call `save`, and the first one writes.

        Args:
            directory: the folder, created if needed; other files in it stay.
            max_shard_size: the most bytes of weights in a file; more weights go to several files.

        Raises:
            TypeError: an argument of another type, or a weight that is traced or abstract.
            ValueError: `max_shard_size` below 1.
            OSError: a file cannot be written, or another save into the folder is not over, as where the
                processes of a job save without [`initialize`][energy_attn.distributed.initialize];
                on all processes; the old checkpoint is still there.
        """
        save(self, directory, max_shard_size)

    def rope(
        self, positions: Int[Array, "batch time"], length: int
    ) -> tuple[tuple[Array, Array], ...]:
        """Cosine and sine `[batch, time, 1, rotary_dim / 2]` of the rotary embedding, and of layers with a window."""
        config, scaling = self.config, self.config.rope_scaling
        dtype = lse_dtype(self.embed_tokens.weight.dtype)
        turns = frequencies(config.rotary_dim, config.rope_theta, scaling, dtype, length)
        rope = rotary(positions, turns, 1.0 if scaling is None else scaling.attention_factor)
        if config.rope_local_base_freq is None:
            return (rope,)
        local = frequencies(config.rotary_dim, config.rope_local_base_freq, None, dtype, length)
        return rope, rotary(positions, local, 1.0)

    def logits(self, x: Float[Array, "batch time width"]) -> Float[Array, "batch time vocab"]:
        """The output projection of final hidden states, in float32 or wider."""
        logits = dot(x, (self.lm_head or self.embed_tokens).weight)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def output(
        self,
        x: Float[Array, "batch time width"],
        parallel: VocabularyParallel | None = None,
        reproducible: bool = False,
    ) -> Categorical:
        """The distribution of the next token, without its logits."""
        weight = (self.lm_head or self.embed_tokens).weight
        cap = self.config.final_logit_softcapping
        options: Any = {"parallel": parallel, "reproducible": reproducible}
        return Categorical(x, weight, soft_cap=cap, **options)


LLAMA = Family(lambda entries: LlamaConfig(**read_fields(entries)), Llama)


def _text_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    text = entries.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config: wanted a JSON object, got {checks.received(text)}")
    # fields of the whole model, which generation and the output projection follow
    outside = {x: entries[x] for x in ("eos_token_id", "tie_word_embeddings") if x in entries}
    return {**text, **outside, "model_type": "gemma3_text"}


def _text_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of the text model alone, by the names that transformers 4 and 5 give them."""
    renamed = {_TEXT.sub(r"\1\2", name): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in renamed.items() if not _VISION.match(name)}


_TEXT = re.compile(r"^(?:language_model\.(model\.|lm_head\.)|(model\.)language_model\.)")
_VISION = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\.")
# The text model of a Gemma 3 with images (arXiv 2503.19786), whose vision tower is not read.
GEMMA3 = Family(
    lambda entries: LlamaConfig(**read_fields(_text_entries(entries))), Llama, _text_tensors
)
