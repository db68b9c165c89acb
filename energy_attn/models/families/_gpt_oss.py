"""gpt-oss (arXiv 2508.10925): sinks, alternate windows, biases, and routed MLPs whose inner values are cut off."""

import re
from collections.abc import Mapping
from typing import Any

from ..decoder._stored import Stored
from ._routed import TRAINING, ExpertFields
from ._variant import FULL, SLIDING, Variant, flags, read_list

_EXPERT = re.compile(r"(.*\.experts)\.(gate_proj|up_proj|down_proj)(_bias)?")


_EXPERTS = ExpertFields(
    {
        "num_experts": ("num_local_experts", 128),
        "num_experts_per_tok": ("num_experts_per_tok", 4),
        "swiglu_limit": ("swiglu_limit", 7.0),
        "swiglu_alpha": ("swiglu_alpha", 1.702),
    }
)


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    experts = _EXPERTS.read(values, intermediate_size=values["intermediate_size"], bias=True)
    types = read_list(values, "layer_types")
    if types is None:
        types = tuple(FULL if i % 2 else SLIDING for i in range(values["num_hidden_layers"]))
    return {
        "attention_bias": values.get("attention_bias", True),
        "sliding_window": values.get("sliding_window", 128),
        "layer_types": types,
        "experts": experts,
    }


def _write(values: Mapping[str, Any]) -> dict[str, Any]:
    types = values["layer_types"]
    return {
        "layer_types": list(types or [SLIDING] * values["num_hidden_layers"]),
        **_EXPERTS.write(values),
        **flags(values, "sliding_window", "attention_bias"),
    }


def _stored(config: Any, name: str, shape: tuple[int, ...]) -> Stored:
    """The experts' weights are `(in, out)`, with gate and up in turns."""
    del config
    name = name.replace(".mlp.gate.", ".mlp.router.")
    match = _EXPERT.fullmatch(name)
    if match is None:
        return Stored((name,))
    path, part, bias = match[1], match[2], match[3] or ""
    if part == "down_proj":
        return Stored((name,), swapped=not bias)
    return Stored(
        (f"{path}.gate_up_proj{bias}",),
        swapped=not bias,
        axis=1,
        start=int(part == "up_proj"),
        step=2,
        total=2 * shape[1],
    )


GPT_OSS = Variant(
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
    fields=(
        *("sliding_window", "layer_types", "attention_bias", "experts_per_token"),
        *("initial_context_length", *_EXPERTS.names, *TRAINING),
    ),
    read=_read,
    write=_write,
    rope={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    quantized="mxfp4",
    stored=_stored,
)
