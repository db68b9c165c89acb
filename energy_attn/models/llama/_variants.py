"""The families of decoders: how each differs from a Llama."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from energy_attn.kernels.internal import checks

from ..decoder._config import StoredWeight
from ._variant import (
    FULL,
    SLIDING,
    WINDOWS,
    ExpertFields,
    LatentConfig,
    Variant,
    each_expert,
    read_list,
    read_types,
    read_windows,
    write_types,
    write_windows,
)

# transformers' values of missing sizes, where they are not Llama's.
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)
_MISSING: Mapping[str, tuple[int | None, ...]] = {
    "mistral": (None, None, 14336, None, None, 8, None, 131072),
    "phi3": (32064, 3072, 8192, None, None, None, None, 4096),
    "qwen2": (151936, None, 22016, None, None, 32, None, 32768),
    "qwen3": (151936, None, 22016, None, None, 32, 128, 32768),
    "qwen3_moe": (151936, 2048, 6144, 24, None, 4, None, 32768),
    "smollm3": (128256, 2048, None, 36, 16, 4, None, 32768),
    "gemma2": (256000, 2304, 9216, 26, 8, 4, 256, 8192),
    "gemma3_text": (262208, 2304, 9216, 26, 8, 4, 256, 131072),
    "gpt_oss": (201088, 2880, 2880, 36, 64, 8, 64, 131072),
    "deepseek_v3": (129280, 7168, 18432, 61, 128, 128, None, 4096),
}


def _missing(family: str, **others: Any) -> dict[str, Any]:
    row = zip(_SIZES, _MISSING[family], strict=True)
    return {name: x for name, x in row if x is not None} | others


_BIASES: Mapping[str, Any] = {"attention_bias": False, "mlp_bias": False}

_LLAMA = Variant("LlamaForCausalLM", own=_BIASES)

# Mistral (arXiv 2310.06825): a window in every layer, or none.
_MISTRAL = Variant("MistralForCausalLM", defaults=_missing("mistral"), own={"sliding_window": 4096})

# OLMo 2 (arXiv 2501.00656): norms of the outputs of attention and MLP, and of all heads of queries or keys together.
_OLMO2 = Variant(
    "Olmo2ForCausalLM",
    defaults={"vocab_size": 50304, "rms_norm_eps": 1e-5},
    fixed={
        **{"qk_norm": True, "qk_norm_over_heads": True, "wide_norms": True},
        **{"pre_norms": False, "post_norms": True},
    },
    own={"attention_bias": False},
)

# Phi-3 (arXiv 2404.14219): fused projections, and LongRoPE.
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


_PHI3 = Variant(
    "Phi3ForCausalLM",
    defaults=_missing("phi3", rms_norm_eps=1e-5),
    own={"sliding_window": None},
    fields=(_ORIGINAL, "partial_rotary_factor", "embd_pdrop", "resid_pdrop"),
    write=_write_original,
    rope_types={"su": "longrope", "yarn": "longrope"},
    original=_ORIGINAL,
    stored=_stored_together,
)

# Qwen2 (arXiv 2407.10671), with biases before attention; Qwen3 (arXiv 2505.09388), with norms of queries and keys.
# --8<-- [start:qwen]
_QWEN2 = Variant(
    "Qwen2ForCausalLM",
    defaults=_missing("qwen2"),
    fixed={"attention_bias": True, "output_bias": False},
    fields=WINDOWS,
    read=read_windows,
    write=write_windows,
)
_QWEN3 = _QWEN2._replace(
    architecture="Qwen3ForCausalLM",
    defaults=_missing("qwen3"),
    fixed={"qk_norm": True},
    own={"attention_bias": False},
)
# --8<-- [end:qwen]


# SmolLM3 (Hugging Face, 2025): no rotary embedding in every fourth layer.
def _read_rotated(values: Mapping[str, Any]) -> dict[str, Any]:
    rotated = read_list(values, "no_rope_layers")
    if rotated is None:
        name = "no_rope_layer_interval"
        interval = checks.check_integer(name, values.get(name, 4), 1)
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


_SMOLLM3 = Variant(
    "SmolLM3ForCausalLM",
    defaults=_missing("smollm3", rope_theta=2000000.0, tie_word_embeddings=True),
    own=_BIASES,
    fields=(*WINDOWS, "no_rope_layers", "no_rope_layer_interval"),
    read=_read_rotated,
    write=_write_rotated,
)


# Gemma 2 (arXiv 2408.00118) and the text of Gemma 3 (arXiv 2503.19786): soft caps, alternate windows, four norms.
def _read_gemma(values: Mapping[str, Any], pattern: int) -> dict[str, Any]:
    if values.get("use_bidirectional_attention"):
        raise ValueError(
            f"use_bidirectional_attention: wanted false, got {checks.received(values['use_bidirectional_attention'])}"
        )
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        pattern = checks.check_integer(name, values.get(name, pattern), 1)
    return read_types(values, pattern)


def _read_gemma3(values: Mapping[str, Any]) -> dict[str, Any]:
    cap = values.get("attn_logit_softcapping")
    if cap is not None:  # transformers has the field, and no cap
        raise ValueError(
            f"attn_logit_softcapping: wanted null in this family, got {checks.received(cap)}"
        )
    return _read_gemma(values, 6)


_GEMMA2 = Variant(
    "Gemma2ForCausalLM",
    activation="gelu_pytorch_tanh",
    defaults=_missing("gemma2", tie_word_embeddings=True),
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
_GEMMA3 = _GEMMA2._replace(
    architecture="Gemma3ForCausalLM",
    local_theta=10000.0,
    defaults=_missing("gemma3_text", rope_theta=1000000.0, tie_word_embeddings=True),
    fixed={**_GEMMA2.fixed, "qk_norm": True},
    own={**_GEMMA2.own, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    read=_read_gemma3,
)

# Mixtral (arXiv 2401.04088): a routed MLP in every layer of a Mistral.
_MIXTRAL = Variant(
    "MixtralForCausalLM",
    defaults=_missing("mistral", rms_norm_eps=1e-5, rope_theta=1000000.0),
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
            f"{name}: wanted a routed MLP in every layer, got {checks.received(values[name])}"
        )
    return read_windows(values)


_QWEN3_MOE = _QWEN3._replace(
    architecture="Qwen3MoeForCausalLM",
    defaults=_missing("qwen3_moe"),
    experts=ExpertFields(
        {
            "num_experts": ("num_experts", 128),
            "num_experts_per_tok": ("num_experts_per_tok", 8),
            "intermediate_size": ("moe_intermediate_size", 768),
            "norm_topk_prob": ("norm_topk_prob", False),
        },
        newer={"num_experts": "num_local_experts"},
    ),
    fields=(*_QWEN3.fields, "decoder_sparse_step", "mlp_only_layers"),
    read=_read_qwen3_moe,
    stored=each_expert({}),
)

# gpt-oss (arXiv 2508.10925): sinks, alternate windows, biases, and routed MLPs with clipped activations.
_EXPERT = re.compile(r"(.*\.experts)\.(gate_proj|up_proj|down_proj)(_bias)?")


# The experts' weights are `(in, out)`, with gate and up interleaved.
def _stored_in_turns(config: Any, name: str, shape: tuple[int, ...]) -> StoredWeight:
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
    defaults=_missing("gpt_oss", rms_norm_eps=1e-5, rope_theta=150000.0),
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

# DeepSeek-V3 (arXiv 2412.19437): latent attention, and routed MLPs of grouped experts with a shared one.
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
    defaults=_missing("deepseek_v3"),
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
        "llama": _LLAMA,
        "mistral": _MISTRAL,
        "qwen2": _QWEN2,
        "qwen3": _QWEN3,
        "qwen3_moe": _QWEN3_MOE,
        "smollm3": _SMOLLM3,
        "gemma2": _GEMMA2,
        "gemma3_text": _GEMMA3,
        "olmo2": _OLMO2,
        "phi3": _PHI3,
        "mixtral": _MIXTRAL,
        "gpt_oss": _GPT_OSS,
        "deepseek_v3": _DEEPSEEK_V3,
    }
)
