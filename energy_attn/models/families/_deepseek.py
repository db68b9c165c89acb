"""DeepSeek-V3 (arXiv 2412.19437): latent attention, and routed MLPs of grouped experts beside a shared one."""

from collections.abc import Mapping
from typing import Any

from energy_attn.kernels.internal import received

from ._latent import LatentConfig
from ._routed import TRAINING, ExpertFields, each_expert
from ._variant import Variant, flags

_LATENT: Mapping[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
    "rope_interleave": True,
}
_EXPERTS = ExpertFields(
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
    }
)
# Fields of the family's own code, with the only value that transformers computes.
_ONLY: Mapping[str, Any] = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    for name, only in _ONLY.items():
        if values.get(name, only) != only:
            raise ValueError(f"{name}: wanted {only!r}, got {received(values[name])}")
    latent = LatentConfig(**{name: values.get(name, x) for name, x in _LATENT.items()})
    return {
        "latent": latent,
        "head_dim": latent.head_dim,
        "experts": _EXPERTS.read(values, scoring="sigmoid"),
        **flags(values, "attention_bias"),
    }


def _write(values: Mapping[str, Any]) -> dict[str, Any]:
    latent = values["latent"]
    entries = flags(values, "attention_bias") | _EXPERTS.write(values)
    if latent is not None:
        entries |= {name: getattr(latent, name) for name in _LATENT}
        entries |= {"head_dim": latent.qk_rope_head_dim, "qk_head_dim": latent.head_dim}
    return entries


DEEPSEEK_V3 = Variant(
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
    fields=(
        *(*_LATENT, *_EXPERTS.names, *_ONLY, *TRAINING),
        *("attention_bias", "qk_head_dim", "num_nextn_predict_layers"),
        *("aux_loss_alpha", "seq_aux", "ep_size"),
    ),
    read=_read,
    write=_write,
    has_drafting_layers=True,
    stored=each_expert({}),
)
