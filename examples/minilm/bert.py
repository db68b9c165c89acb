"""A BERT whose attention is `energy_attn.nn.MultiheadAttention`, and its weights from a safetensors file.

Source: Devlin et al. (arXiv 1810.04805); the weights are those of all-MiniLM-L6-v2, trained as in Wang et al. (arXiv
2002.10957) and Reimers and Gurevych (arXiv 1908.10084).
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray
from safetensors import safe_open
from tokenizers import Encoding, Tokenizer

import energy_attn as ea

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
# The only options that this model implements; a checkpoint with others is refused.
ASSUMED = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
# Tensors of checkpoints that a sentence's embedding does not use.
UNUSED = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids")
# Names here, and those in a checkpoint.
RENAMED = (
    (r"^layers\.", "encoder.layer."),
    (r"\b(query|key|value)_proj\b", r"self.\1"),
    (r"\boutput_proj\b", "output.dense"),
    (r"\battention_norm\b", "attention.output.LayerNorm"),
    (r"\bup\b", "intermediate.dense"),
    (r"\bdown\b", "output.dense"),
    (r"\bmlp_norm\b", "output.LayerNorm"),
)


class Embeddings(eqx.Module):
    """The normalised sum of embeddings of token, position and text."""

    word_embeddings: eqx.nn.Embedding
    position_embeddings: eqx.nn.Embedding
    token_type_embeddings: eqx.nn.Embedding
    LayerNorm: eqx.nn.LayerNorm

    def __init__(self, config: dict[str, Any], *, key: PRNGKeyArray) -> None:
        keys, width = jax.random.split(key, 3), config["hidden_size"]
        sizes = (config[f"{x}_size"] for x in ("vocab", "type_vocab"))
        vocab, kinds = sizes
        self.word_embeddings = eqx.nn.Embedding(vocab, width, key=keys[0])
        positions = config["max_position_embeddings"]
        self.position_embeddings = eqx.nn.Embedding(positions, width, key=keys[1])
        self.token_type_embeddings = eqx.nn.Embedding(kinds, width, key=keys[2])
        self.LayerNorm = eqx.nn.LayerNorm(width, config["layer_norm_eps"])

    def __call__(self, tokens: Int[Array, " T"]) -> Float[Array, "T width"]:
        """The input of the first layer; all tokens belong to the first text."""
        rows = self.word_embeddings.weight[tokens]
        rows = rows + self.position_embeddings.weight[: len(tokens)]
        return jax.vmap(self.LayerNorm)(rows + self.token_type_embeddings.weight[:1])


class Layer(eqx.Module):
    r"""$y = \mathrm{norm}(x + \mathrm{attention}(x))$, then $\mathrm{norm}(y + \mathrm{MLP}(y))$."""

    attention: ea.nn.MultiheadAttention
    attention_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    mlp_norm: eqx.nn.LayerNorm

    def __init__(self, config: dict[str, Any], *, key: PRNGKeyArray) -> None:
        keys, width = jax.random.split(key, 3), config["hidden_size"]
        inner, eps = config["intermediate_size"], config["layer_norm_eps"]
        self.attention = ea.nn.MultiheadAttention(
            config["num_attention_heads"],
            width,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            key=keys[0],
        )
        self.attention_norm = eqx.nn.LayerNorm(width, eps)
        self.up = eqx.nn.Linear(width, inner, key=keys[1])
        self.down = eqx.nn.Linear(inner, width, key=keys[2])
        self.mlp_norm = eqx.nn.LayerNorm(width, eps)

    def __call__(
        self, x: Float[Array, "T width"], length: Int[Array, ""]
    ) -> Float[Array, "T width"]:
        """The input of the next layer; keys from `length` on are padding."""
        mask = jnp.arange(len(x), dtype=jnp.int32)[None] < length
        y = jax.vmap(self.attention_norm)(x + self.attention(x, x, x, mask))
        inner = jax.nn.gelu(jax.vmap(self.up)(y), approximate=False)
        return jax.vmap(self.mlp_norm)(y + jax.vmap(self.down)(inner))


class Bert(eqx.Module):
    """An encoder of one sentence; use `jax.vmap` for a batch.

    Args:
        config: the entries of a checkpoint's config.json.
        key: a `jax.random.key` for the initial weights.

    Raises:
        KeyError: a missing entry.
    """

    embeddings: Embeddings
    layers: tuple[Layer, ...]

    def __init__(self, config: dict[str, Any], *, key: PRNGKeyArray) -> None:
        first, *others = jax.random.split(key, 1 + config["num_hidden_layers"])
        self.embeddings = Embeddings(config, key=first)
        self.layers = tuple(Layer(config, key=key) for key in others)

    def __call__(
        self, tokens: Int[Array, " T"], length: Int[Array, ""]
    ) -> Float[Array, "layers+1 T width"]:
        """The inputs of all layers and the output of the last; rows from `length` on are padding."""
        states = [self.embeddings(tokens)]
        for layer in self.layers:
            states.append(layer(states[-1], length))
        return jnp.stack(states)


def pooled(state: Float[Array, "T width"], length: Int[Array, ""]) -> Float[Array, " width"]:
    """The embedding of a sentence: the mean of its rows, normalised."""
    real = jnp.arange(len(state), dtype=jnp.int32)[:, None] < length
    mean = jnp.where(real, state, 0.0).sum(0) / length.astype(state.dtype)
    return mean / jnp.linalg.norm(mean)


def load(directory: Path) -> Bert:
    """The model of a checkpoint: config.json and model.safetensors, which contain data and no code.

    Raises:
        OSError: a missing file.
        ValueError: a config of another model; the name of a tensor that is missing, unexpected or of another shape.
    """
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    for name, wanted in ASSUMED.items():
        if config.get(name, wanted) != wanted:
            raise ValueError(f"{CONFIG}: {name}: wanted {wanted!r}, got {config[name]!r}")
    # only shapes: no weights are drawn
    empty = eqx.filter_eval_shape(lambda key: Bert(config, key=key), jax.random.key(0))
    slots, tree = jax.tree.flatten_with_path(empty)
    with safe_open(directory / WEIGHTS, "numpy") as file:
        left = set(file.keys()) - set(UNUSED)
        leaves = [_tensor(file, left, path, slot) for path, slot in slots]
    if left:
        raise ValueError(f"{WEIGHTS}: wanted no more tensors, got {', '.join(sorted(left))}")
    return jax.tree.unflatten(tree, leaves)


def _tensor(file: Any, left: set[str], path: Any, slot: Any) -> Any:
    """The float32 tensor of one leaf of the model; removes its name from `left`."""
    if not isinstance(slot, jax.ShapeDtypeStruct):
        return slot  # an option of a layer
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    for ours, theirs in RENAMED:
        name = re.sub(ours, theirs, name)
    if name not in left:
        raise ValueError(f"{WEIGHTS}: {name}: wanted a tensor of shape {slot.shape}, got none")
    left.remove(name)
    shape = tuple(file.get_slice(name).get_shape())
    if shape != slot.shape:
        raise ValueError(f"{WEIGHTS}: {name}: wanted shape {slot.shape}, got {shape}")
    return jnp.asarray(file.get_tensor(name), jnp.float32)


def tokenize(directory: Path, sentences: Sequence[str], longest: int = 256) -> list[Encoding]:
    """Sentences as tokens, padded to the longest and truncated to `longest` tokens.

    Raises `OSError` without tokenizer.json, and `ValueError` if a sentence is empty or there are no sentences.
    """
    if not sentences or not all(sentence.strip() for sentence in sentences):
        raise ValueError(f"sentences: wanted texts that are not empty, got {list(sentences)}")
    if not (directory / TOKENIZER).is_file():  # tokenizers' own error does not name it
        raise FileNotFoundError(f"{directory / TOKENIZER}: no such file")
    tokenizer = Tokenizer.from_file(str(directory / TOKENIZER))
    tokenizer.enable_truncation(longest)
    tokenizer.enable_padding()
    return tokenizer.encode_batch(list(sentences))
