"""Qwen2 (arXiv 2407.10671), with biases before attention; Qwen3 (arXiv 2505.09388), with norms of queries and keys,
and its form with routed MLPs.
"""

from collections.abc import Mapping
from typing import Any

from energy_attn.kernels.internal import received

from ._routed import TRAINING, ExpertFields, each_expert
from ._variant import WINDOWS, Variant, flags, read_windows, write_windows

_SIZES: Mapping[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
QWEN2 = Variant(
    "Qwen2ForCausalLM",
    defaults=_SIZES,
    fixed={"attention_bias": True, "output_bias": False},
    fields=WINDOWS,
    read=read_windows,
    write=write_windows,
)
QWEN3 = Variant(
    "Qwen3ForCausalLM",
    defaults={**_SIZES, "head_dim": 128},
    fixed={"qk_norm": True},
    fields=(*WINDOWS, "attention_bias"),
    read=lambda values: read_windows(values) | flags(values, "attention_bias"),
    write=lambda values: write_windows(values) | flags(values, "attention_bias"),
)
_EXPERTS = ExpertFields(
    {
        "num_experts": ("num_experts", 128),
        "num_experts_per_tok": ("num_experts_per_tok", 8),
        "intermediate_size": ("moe_intermediate_size", 768),
        "norm_topk_prob": ("norm_topk_prob", False),
    }
)


def _read_routed(values: Mapping[str, Any]) -> dict[str, Any]:
    # files of transformers 5 have the other name
    values = {
        **values,
        "num_experts": values.get("num_local_experts", values.get("num_experts", 128)),
    }
    if values.get("decoder_sparse_step", 1) != 1 or values.get("mlp_only_layers"):
        name = "mlp_only_layers" if values.get("mlp_only_layers") else "decoder_sparse_step"
        raise ValueError(
            f"{name}: wanted a routed MLP in every layer, got {received(values[name])}"
        )
    windows = read_windows(values) | flags(values, "attention_bias")
    return {**windows, "experts": _EXPERTS.read(values)}


def _write_routed(values: Mapping[str, Any]) -> dict[str, Any]:
    return write_windows(values) | flags(values, "attention_bias") | _EXPERTS.write(values)


QWEN3_MOE = Variant(
    "Qwen3MoeForCausalLM",
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
    fixed={"qk_norm": True},
    fields=(
        *(*WINDOWS, *_EXPERTS.names, *TRAINING),
        *("attention_bias", "num_local_experts", "decoder_sparse_step", "mlp_only_layers"),
    ),
    read=_read_routed,
    write=_write_routed,
    stored=each_expert({}),
)
