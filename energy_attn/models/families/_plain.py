"""Families of plain MLPs, and how they differ from a Llama."""

from collections.abc import Mapping
from typing import Any

from energy_attn.kernels.internal import check_integer, received

from ..decoder._config import StoredWeight
from ._variant import (
    FULL,
    SLIDING,
    WINDOWS,
    Variant,
    read_list,
    read_types,
    read_windows,
    write_types,
    write_windows,
)

_BIASES: Mapping[str, Any] = {"attention_bias": False, "mlp_bias": False}

LLAMA = Variant("LlamaForCausalLM", own=_BIASES)

# Mistral (arXiv 2310.06825): a window in every layer, or none.
MISTRAL = Variant(
    "MistralForCausalLM",
    defaults={
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
    },
    own={"sliding_window": 4096},
)

# OLMo 2 (arXiv 2501.00656): what attention and the MLP add is normed, and so are all queries and all keys together.
OLMO2 = Variant(
    "Olmo2ForCausalLM",
    defaults={"vocab_size": 50304, "rms_norm_eps": 1e-5},
    fixed={
        **{"qk_norm": True, "qk_norm_over_heads": True, "wide_norms": True},
        **{"pre_norms": False, "post_norms": True},
    },
    own={"attention_bias": False},
)

# Phi-3 (arXiv 2404.14219): projections that are one tensor, and LongRoPE.
_ORIGINAL = "original_max_position_embeddings"


def _write_original(values: Mapping[str, Any]) -> dict[str, Any]:
    limit = values["max_position_embeddings"]
    return {_ORIGINAL: getattr(values["rope_scaling"], _ORIGINAL, limit)}


def _stored_together(config: Any, name: str, shape: tuple[int, ...]) -> StoredWeight:
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
        return StoredWeight((name,))
    whole, start, total = starts[owner]
    return StoredWeight((".".join([*path[1:], whole, field]),), axis=0, start=start, total=total)


PHI3 = Variant(
    "Phi3ForCausalLM",
    defaults={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    own={"sliding_window": None},
    fields=(_ORIGINAL, "partial_rotary_factor", "embd_pdrop", "resid_pdrop"),
    write=_write_original,
    rope_types={"su": "longrope", "yarn": "longrope"},
    original=_ORIGINAL,
    stored=_stored_together,
)

# Qwen2 (arXiv 2407.10671), with biases before attention; Qwen3 (arXiv 2505.09388), with norms of queries and keys.
# --8<-- [start:qwen]
QWEN2 = Variant(
    "Qwen2ForCausalLM",
    defaults={
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
    fixed={"attention_bias": True, "output_bias": False},
    fields=WINDOWS,
    read=read_windows,
    write=write_windows,
)
QWEN3 = QWEN2._replace(
    architecture="Qwen3ForCausalLM",
    defaults={**QWEN2.defaults, "head_dim": 128},
    fixed={"qk_norm": True},
    own={"attention_bias": False},
)
# --8<-- [end:qwen]


# SmolLM3 (Hugging Face, 2025): no rotary embedding in every fourth layer.
def _read_rotated(values: Mapping[str, Any]) -> dict[str, Any]:
    rotated = read_list(values, "no_rope_layers")
    if rotated is None:
        name = "no_rope_layer_interval"
        interval = check_integer(name, values.get(name, 4), 1)
        rotated = tuple(int((i + 1) % interval != 0) for i in range(values["num_hidden_layers"]))
    types = values.get("layer_types")
    if types is None:  # the window is that of the layers without a rotary embedding
        types = [FULL if x else SLIDING for x in rotated]
        types = types if values.get("use_sliding_window", False) else [FULL] * len(types)
    return {"no_rope_layers": rotated, **read_windows({**values, "layer_types": types})}


def _write_rotated(values: Mapping[str, Any]) -> dict[str, Any]:
    rotated, windows = values["no_rope_layers"], write_windows(values)
    rotated = [1] * values["num_hidden_layers"] if rotated is None else list(rotated)
    del windows["max_window_layers"]
    return {"no_rope_layers": rotated, **windows}


SMOLLM3 = Variant(
    "SmolLM3ForCausalLM",
    defaults={
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    },
    own=_BIASES,
    fields=(*WINDOWS, "no_rope_layers", "no_rope_layer_interval"),
    read=_read_rotated,
    write=_write_rotated,
)


# Gemma 2 (arXiv 2408.00118) and the text of Gemma 3 (arXiv 2503.19786): soft caps, alternate windows, four norms.
def _read_gemma(values: Mapping[str, Any], pattern: int) -> dict[str, Any]:
    if values.get("use_bidirectional_attention"):
        raise ValueError(
            f"use_bidirectional_attention: wanted false, got {received(values['use_bidirectional_attention'])}"
        )
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        pattern = check_integer(name, values.get(name, pattern), 1)
    return read_types(values, pattern)


def _read_gemma3(values: Mapping[str, Any]) -> dict[str, Any]:
    cap = values.get("attn_logit_softcapping")
    if cap is not None:  # transformers has the field, and no cap
        raise ValueError(f"attn_logit_softcapping: wanted null in this family, got {received(cap)}")
    return _read_gemma(values, 6)


GEMMA2 = Variant(
    "Gemma2ForCausalLM",
    activation="gelu_pytorch_tanh",
    defaults={
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    fixed={"unit_offset": True, "post_norms": True, "scaled_embeddings": True},
    own={
        **{"attention_bias": False, "query_pre_attn_scalar": 256, "sliding_window": 4096},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    },
    fields=(
        *("layer_types", "sliding_window_pattern", "_sliding_window_pattern"),
        "use_bidirectional_attention",
    ),
    read=lambda values: _read_gemma(values, 2),
    write=write_types,
)
GEMMA3 = GEMMA2._replace(
    architecture="Gemma3ForCausalLM",
    local_theta=10000.0,
    defaults={
        **GEMMA2.defaults,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
    },
    fixed={**GEMMA2.fixed, "qk_norm": True},
    own={**GEMMA2.own, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    read=_read_gemma3,
)
