"""Phi-3 (arXiv 2404.14219): projections that are one tensor, and LongRoPE."""

from collections.abc import Mapping
from typing import Any

from ..decoder._stored import Stored
from ._variant import Variant

_ORIGINAL = "original_max_position_embeddings"


def _write(values: Mapping[str, Any]) -> dict[str, Any]:
    original = getattr(values["rope_scaling"], _ORIGINAL, values["max_position_embeddings"])
    return {"sliding_window": values["sliding_window"], _ORIGINAL: original}


def _stored(config: Any, name: str, shape: tuple[int, ...]) -> Stored:
    heads, shared = (
        count * config.head_dim
        for count in (config.num_attention_heads, config.num_key_value_heads)
    )
    inner = config.intermediate_size
    starts = {
        "q_proj": ("qkv_proj", 0, heads + 2 * shared),
        "k_proj": ("qkv_proj", heads, heads + 2 * shared),
        "v_proj": ("qkv_proj", heads + shared, heads + 2 * shared),
        "gate_proj": ("gate_up_proj", 0, 2 * inner),
        "up_proj": ("gate_up_proj", inner, 2 * inner),
    }
    *path, owner, field = ("", *name.split("."))
    if owner not in starts:
        return Stored((name,))
    whole, start, total = starts[owner]
    return Stored((".".join([*path[1:], whole, field]),), axis=0, start=start, total=total)


PHI3 = Variant(
    "Phi3ForCausalLM",
    defaults={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    fields=("sliding_window", _ORIGINAL, "partial_rotary_factor", "embd_pdrop", "resid_pdrop"),
    read=lambda values: {"sliding_window": values.get("sliding_window")},
    write=_write,
    rope_types={"su": "longrope", "yarn": "longrope"},
    original=_ORIGINAL,
    stored=_stored,
)
