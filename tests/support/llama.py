"""Small Llamas, and a NumPy Llama that judges them."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from energy_attn.models import ExpertsConfig, LatentConfig, Llama, LlamaConfig, Rope
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


def numpy_llama(model, tokens, positions):
    """Logits and energies by definition, one position, head and key at a time."""
    c = model.config
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), model)

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.rms_norm_eps) * weight

    def linear(x, map):
        return x @ map.weight.T + (0 if map.bias is None else map.bias)

    def turn(x, position):
        # As in Hugging Face: cos and sin of both halves, and the halves swapped with a sign.
        angle = position / c.rope_theta ** (np.arange(0, c.head_dim, 2) / c.head_dim)
        angle = angle if c.rope_scaling is None else angle / c.rope_scaling.factor
        cos, sin = (np.concatenate([f(angle), f(angle)]) for f in (np.cos, np.sin))
        first, second = x[: c.head_dim // 2], x[c.head_dim // 2 :]
        return x * cos + np.concatenate([-second, first]) * sin

    batch, time = tokens.shape
    logits = np.zeros((batch, time, c.vocab_size))
    energies = np.full((c.num_hidden_layers, batch, time, c.num_attention_heads), -np.inf)
    group = c.num_attention_heads // c.num_key_value_heads
    for b in range(batch):
        x = weights.embed_tokens.weight[tokens[b]]
        for layer in range(c.num_hidden_layers):
            w = weights.layers[layer]
            y = norm(x, w.input_layernorm.weight)
            q, k, v = (
                linear(y, proj).reshape(time, -1, c.head_dim)
                for proj in (w.self_attn.q_proj, w.self_attn.k_proj, w.self_attn.v_proj)
            )
            mixed = np.zeros_like(q)
            for t in range(time):
                for n in range(c.num_attention_heads):
                    query = turn(q[t, n], positions[b, t])
                    seen = [s for s in range(time) if 0 <= positions[b, s] <= positions[b, t]]
                    if positions[b, t] < 0 or not seen:
                        continue
                    scores = np.array(
                        [query @ turn(k[s, n // group], positions[b, s]) for s in seen]
                    ) / np.sqrt(c.head_dim)
                    energy = np.log(np.exp(scores).sum())
                    energies[layer, b, t, n] = energy
                    mixed[t, n] = np.exp(scores - energy) @ v[seen, n // group]
            x = x + linear(mixed.reshape(time, -1), w.self_attn.o_proj)
            y = norm(x, w.post_attention_layernorm.weight)
            gate = linear(y, w.mlp.gate_proj)
            inner = gate / (1 + np.exp(-gate)) * linear(y, w.mlp.up_proj)
            x = x + linear(inner, w.mlp.down_proj)
        head = weights.embed_tokens if c.tie_word_embeddings else weights.lm_head
        logits[b] = norm(x, weights.norm.weight) @ head.weight.T
    return logits, energies
