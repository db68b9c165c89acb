"""Mixtral (arXiv 2401.04088): a routed MLP in every layer of a Mistral."""

from collections.abc import Mapping
from typing import Any

from ._routed import TRAINING, ExpertFields, each_expert
from ._variant import Variant

_EXPERTS = ExpertFields(
    {"num_experts": ("num_local_experts", 8), "num_experts_per_tok": ("num_experts_per_tok", 2)}
)


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    experts = _EXPERTS.read(values, intermediate_size=values["intermediate_size"])
    return {"sliding_window": values.get("sliding_window"), "experts": experts}


def _write(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": values["sliding_window"], **_EXPERTS.write(values)}


MIXTRAL = Variant(
    "MixtralForCausalLM",
    defaults={
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
    fields=("sliding_window", *_EXPERTS.names, *TRAINING),
    read=_read,
    write=_write,
    stored=each_expert(
        {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
        lambda name: name.replace(".mlp", ".block_sparse_moe"),
    ),
)
