"""Mixtral (arXiv 2401.04088): a routed MLP in every layer of a Mistral."""

from collections.abc import Mapping
from typing import Any

from ._experts import ExpertsConfig
from ._routed import TRAINING, each_expert
from ._variant import Variant


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    experts = ExpertsConfig(
        num_experts=values.get("num_local_experts", 8),
        num_experts_per_tok=values.get("num_experts_per_tok", 2),
        intermediate_size=values["intermediate_size"],
    )
    return {"sliding_window": values.get("sliding_window"), "experts": experts}


def _write(values: Mapping[str, Any]) -> dict[str, Any]:
    experts = values["experts"]
    sizes = (
        {}
        if experts is None
        else {
            "num_local_experts": experts.num_experts,
            "num_experts_per_tok": experts.num_experts_per_tok,
        }
    )
    return {"sliding_window": values["sliding_window"], **sizes}


MIXTRAL = Variant(
    "MixtralForCausalLM",
    defaults={
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
    fields=("sliding_window", "num_local_experts", "num_experts_per_tok", *TRAINING),
    read=_read,
    write=_write,
    stored=each_expert(
        {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
        lambda name: name.replace(".mlp", ".block_sparse_moe"),
    ),
)
