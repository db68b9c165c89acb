"""Small Llamas, those that write texts and their drafters, and a NumPy Llama that judges them."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from energy_attn.models import (
    AbstractDrafter,
    ExpertsConfig,
    LatentConfig,
    Llama,
    LlamaConfig,
    ModelDrafter,
    PromptLookup,
    Rope,
)
from tests.support.arrays import drawn

CONFIG = LlamaConfig(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=36,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=100.0,
)

SIGMOID = ExpertsConfig(
    num_experts=8,
    num_experts_per_tok=3,
    intermediate_size=20,
    scoring="sigmoid",
    routed_scaling_factor=1.7,
    n_group=4,
    topk_group=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
)
LATENT = LatentConfig(
    kv_lora_rank=10, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=5, q_lora_rank=7
)
DEEPSEEK = replace(
    CONFIG,
    model_type="deepseek_v3",
    num_key_value_heads=4,
    head_dim=10,
    latent=LATENT,
    experts=SIGMOID,
    rope_scaling=Rope.yarn(4.0, 8, mscale=1.0, mscale_all_dim=0.6),
)
CUT = ExpertsConfig(4, 2, 36, bias=True, swiglu_limit=0.6)
GPT_OSS = replace(
    CONFIG,
    model_type="gpt_oss",
    attention_bias=True,
    attention_sinks=True,
    wide_norms=True,
    sliding_window=5,
    layer_types=("sliding_attention", "full_attention"),
    experts=CUT,
)


@functools.cache
def build(config=CONFIG, dtype=jnp.float64, seed=0, scale=0.4):
    """A model whose weights are all of order one, including norms, so that each of them matters."""
    return drawn(functools.partial(Llama, config, dtype), scale, seed)


# Of a few tokens: a model that writes, prompts, and a smaller model that drafts.
WRITER = LlamaConfig(13, 16, 24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
PROMPTS = [[1, 2, 3, 4, 1, 2], [5, 6, 7, 8, 9, 5, 6, 7], [12]]
SMALL = LlamaConfig(13, 8, 12, num_hidden_layers=1, num_attention_heads=2)


def drafter_of(name, model) -> AbstractDrafter | None:
    if name == "lookup":
        return PromptLookup(ngram=2, candidates=2, length=3)
    if name == "itself":
        return ModelDrafter(model, length=2, nodes=4)
    if name == "another model":
        return ModelDrafter(build(SMALL, seed=5, scale=0.5), length=3, nodes=6)
    return None


def whole_of(model):
    """Logits after each token of some texts, without a cache; padded to one size, so compiled once."""
    read = jax.jit(lambda tokens: model(tokens).logits)

    def logits(*rows):
        padded = np.zeros((3, 20), np.int32)
        for i, row in enumerate(rows):
            padded[i, : len(row)] = row
        found = np.asarray(read(jnp.asarray(padded)))
        each = [x[: len(row)] for x, row in zip(found, rows, strict=False)]
        return each[0] if len(rows) == 1 else each

    return logits


def log_softmax(logits):
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def leaves_of(model):
    """Weights under the names of a checkpoint."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        found[name if name == "lm_head.weight" else f"model.{name}"] = leaf
    return found


def numpy_llama(model, tokens, positions=None):
    """Logits and energies by definition, row by row: of any flags, but for routed MLPs and latent attention."""
    c = model.config
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), model)
    batch, time = tokens.shape
    heads, half = c.num_attention_heads, c.head_dim // 2

    def norm(x, part):
        if part is None:
            return x
        size = np.sqrt((x**2).mean(-1, keepdims=True) + c.rms_norm_eps)
        return x / size * (part.weight + c.unit_offset)

    def normed(x, part):  # of heads
        return (
            norm(x.reshape(time, -1), part).reshape(x.shape)
            if c.qk_norm_over_heads
            else norm(x, part)
        )

    def linear(x, part):
        return x @ part.weight.T + (0 if part.bias is None else part.bias)

    def turned(x, place, theta, factor):
        angle = place[:, None, None] / theta ** (np.arange(half) / half) / factor
        cos, sin, a, b = np.cos(angle), np.sin(angle), x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def activated(x):
        if c.hidden_act == "silu":
            return x / (1 + np.exp(-x))
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def capped(x, cap):
        return x if cap is None else cap * np.tanh(x / cap)

    def attended(x, w, i, place):
        window = c.window(i)
        theta, factor = c.rope_theta, 1 if c.rope_scaling is None else c.rope_scaling.factor
        if window is not None and c.rope_local_base_freq is not None:
            theta, factor = c.rope_local_base_freq, 1
        q, k, v = (
            linear(x, part).reshape(time, -1, c.head_dim) for part in (w.q_proj, w.k_proj, w.v_proj)
        )
        q, k = normed(q, w.q_norm), normed(k, w.k_norm)
        if c.rotates(i):
            q, k = turned(q, place, theta, factor), turned(k, place, theta, factor)
        k, v = (np.repeat(x, heads // c.num_key_value_heads, 1) for x in (k, v))
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(c.query_pre_attn_scalar or c.head_dim)
        scores = capped(scores, c.attn_logit_softcapping)
        apart = place[:, None] - place
        seen = (place >= 0) & (apart >= 0) & (apart < (window or np.inf))
        with np.errstate(divide="ignore"):
            energy = np.log(np.where(seen, np.exp(scores), 0).sum(-1, keepdims=True))
        weights = np.where(seen, np.exp(scores - energy), 0)
        out = np.einsum("nts,snh->tnh", weights, v).reshape(time, -1)
        return linear(out, w.o_proj), energy[..., 0].T

    logits = np.zeros((batch, time, c.vocab_size))
    energies = np.zeros((c.num_hidden_layers, batch, time, heads))
    for b in range(batch):
        place = np.arange(time) if positions is None else positions[b]
        x = weights.embed_tokens.weight[tokens[b]]
        x = x * np.sqrt(c.hidden_size) if c.scaled_embeddings else x
        for i, w in enumerate(weights.layers):
            out, energies[i, b] = attended(norm(x, w.input_layernorm), w.self_attn, i, place)
            before, after = w.post_attention_layernorm, None
            if c.post_norms:
                out, before = norm(out, before), w.pre_feedforward_layernorm
                after = w.post_feedforward_layernorm
            x, mlp = x + out, w.mlp
            y = norm(x, before)
            inner = activated(linear(y, mlp.gate_proj)) * linear(y, mlp.up_proj)
            x = x + norm(linear(inner, mlp.down_proj), after)
        head = weights.embed_tokens if c.tie_word_embeddings else weights.lm_head
        logits[b] = capped(norm(x, weights.norm) @ head.weight.T, c.final_logit_softcapping)
    return logits, energies
