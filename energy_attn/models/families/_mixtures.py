"""Families with routed MLPs, and all families by the `model_type` of their checkpoints."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from energy_attn.kernels.internal import received

from ..decoder._config import StoredWeight
from ._parts import LatentConfig
from ._plain import GEMMA2, GEMMA3, LLAMA, MISTRAL, OLMO2, PHI3, QWEN2, QWEN3, SMOLLM3
from ._variant import ExpertFields, Variant, each_expert, read_types, read_windows, write_types

# Mixtral (arXiv 2401.04088): a routed MLP in every layer of a Mistral.
_MIXTRAL = Variant(
    "MixtralForCausalLM",
    defaults={**MISTRAL.defaults, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0},
    own={"sliding_window": None},
    experts=ExpertFields(
        {"num_experts": ("num_local_experts", 8), "num_experts_per_tok": ("num_experts_per_tok", 2)}
    ),
    stored=each_expert(
        {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
        lambda name: name.replace(".mlp", ".block_sparse_moe"),
    ),
)


# Qwen3 (arXiv 2505.09388) in its form with routed MLPs.
def _read_qwen3_moe(values: Mapping[str, Any]) -> dict[str, Any]:
    if values.get("decoder_sparse_step", 1) != 1 or values.get("mlp_only_layers"):
        name = "mlp_only_layers" if values.get("mlp_only_layers") else "decoder_sparse_step"
        raise ValueError(
            f"{name}: wanted a routed MLP in every layer, got {received(values[name])}"
        )
    return read_windows(values)


_QWEN3_MOE = QWEN3._replace(
    architecture="Qwen3MoeForCausalLM",
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
    experts=ExpertFields(
        {
            "num_experts": ("num_experts", 128),
            "num_experts_per_tok": ("num_experts_per_tok", 8),
            "intermediate_size": ("moe_intermediate_size", 768),
            "norm_topk_prob": ("norm_topk_prob", False),
        },
        newer={"num_experts": "num_local_experts"},
    ),
    fields=(*QWEN3.fields, "decoder_sparse_step", "mlp_only_layers"),
    read=_read_qwen3_moe,
    stored=each_expert({}),
)

# gpt-oss (arXiv 2508.10925): sinks, alternate windows, biases, and routed MLPs whose inner values are cut off.
_EXPERT = re.compile(r"(.*\.experts)\.(gate_proj|up_proj|down_proj)(_bias)?")


def _stored_in_turns(config: Any, name: str, shape: tuple[int, ...]) -> StoredWeight:
    """The experts' weights are `(in, out)`, with gate and up in turns."""
    del config
    name = name.replace(".mlp.gate.", ".mlp.router.")
    match = _EXPERT.fullmatch(name)
    if match is None:
        return StoredWeight((name,))
    path, part, bias = match[1], match[2], match[3] or ""
    if part == "down_proj":
        return StoredWeight((name,), swapped=not bias)
    return StoredWeight(
        (f"{path}.gate_up_proj{bias}",),
        swapped=not bias,
        axis=1,
        start=int(part == "up_proj"),
        step=2,
        total=2 * shape[1],
    )


_GPT_OSS = Variant(
    "GptOssForCausalLM",
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
    },
    fixed={"attention_sinks": True, "wide_norms": True},
    own={"attention_bias": True, "sliding_window": 128},
    experts=ExpertFields(
        {
            "num_experts": ("num_local_experts", 128),
            "num_experts_per_tok": ("num_experts_per_tok", 4),
            "swiglu_limit": ("swiglu_limit", 7.0),
            "swiglu_alpha": ("swiglu_alpha", 1.702),
        },
        fixed={"bias": True},
    ),
    fields=("layer_types", "experts_per_token", "initial_context_length"),
    read=lambda values: read_types(values, 2),
    write=write_types,
    rope={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    quantized="mxfp4",
    stored=_stored_in_turns,
)

# DeepSeek-V3 (arXiv 2412.19437): latent attention, and routed MLPs of grouped experts beside a shared one.
_LATENT: Mapping[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
    "rope_interleave": True,
}


def _read_latent(values: Mapping[str, Any]) -> dict[str, Any]:
    latent = LatentConfig(**{name: values.get(name, x) for name, x in _LATENT.items()})
    return {"latent": latent, "head_dim": latent.head_dim}


def _write_latent(values: Mapping[str, Any]) -> dict[str, Any]:
    latent = values["latent"]
    if latent is None:
        return {}
    entries = {name: getattr(latent, name) for name in _LATENT}
    return entries | {"head_dim": latent.qk_rope_head_dim, "qk_head_dim": latent.head_dim}


_DEEPSEEK_V3 = Variant(
    "DeepseekV3ForCausalLM",
    defaults={
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
    },
    own={"attention_bias": False},
    only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    experts=ExpertFields(
        {
            "num_experts": ("n_routed_experts", 256),
            "num_experts_per_tok": ("num_experts_per_tok", 8),
            "intermediate_size": ("moe_intermediate_size", 2048),
            "norm_topk_prob": ("norm_topk_prob", True),
            "routed_scaling_factor": ("routed_scaling_factor", 2.5),
            "n_group": ("n_group", 8),
            "topk_group": ("topk_group", 4),
            "n_shared_experts": ("n_shared_experts", 1),
            "first_k_dense_replace": ("first_k_dense_replace", 3),
        },
        fixed={"scoring": "sigmoid"},
    ),
    fields=(
        *(*_LATENT, "qk_head_dim", "num_nextn_predict_layers"),
        *("aux_loss_alpha", "seq_aux", "ep_size"),
    ),
    read=_read_latent,
    write=_write_latent,
    has_drafting_layers=True,
    stored=each_expert({}),
)

VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "llama": LLAMA,
        "mistral": MISTRAL,
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "qwen3_moe": _QWEN3_MOE,
        "smollm3": SMOLLM3,
        "gemma2": GEMMA2,
        "gemma3_text": GEMMA3,
        "olmo2": OLMO2,
        "phi3": PHI3,
        "mixtral": _MIXTRAL,
        "gpt_oss": _GPT_OSS,
        "deepseek_v3": _DEEPSEEK_V3,
    }
)
