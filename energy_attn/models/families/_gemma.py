"""Gemma 2 (arXiv 2408.00118) and the text of Gemma 3 (arXiv 2503.19786): soft caps, alternate windows, four norms."""

from collections.abc import Mapping
from typing import Any

from energy_attn.kernels.internal import check_integer, received

from ._variant import FULL, SLIDING, Variant, flags, read_list

_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_FIELDS = (
    *_CAPS,
    *("attention_bias", "query_pre_attn_scalar", "sliding_window", "layer_types"),
    *("sliding_window_pattern", "_sliding_window_pattern", "use_bidirectional_attention"),
)
_SIZES: Mapping[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_FIXED = {"unit_offset": True, "post_norms": True, "scaled_embeddings": True}


def _read(
    values: Mapping[str, Any], caps: tuple[float | None, ...], pattern: int
) -> dict[str, Any]:
    """Layers of one in `pattern` see all tokens, unless `layer_types` says it."""
    if values.get("use_bidirectional_attention"):
        raise ValueError(
            f"use_bidirectional_attention: wanted false, got {received(values['use_bidirectional_attention'])}"
        )
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        pattern = check_integer(name, values.get(name, pattern), 1)
    types = read_list(values, "layer_types")
    if types is None:
        layers = range(1, values["num_hidden_layers"] + 1)
        types = tuple(FULL if i % pattern == 0 else SLIDING for i in layers)
    return {
        "query_pre_attn_scalar": values.get("query_pre_attn_scalar", 256),
        "sliding_window": values.get("sliding_window", 4096),
        "layer_types": types,
        **{name: values.get(name, cap) for name, cap in zip(_CAPS, caps, strict=True)},
        **flags(values, "attention_bias"),
    }


def _read_third(values: Mapping[str, Any]) -> dict[str, Any]:
    cap = values.get("attn_logit_softcapping")
    if cap is not None:  # transformers has the field, and no cap
        raise ValueError(f"attn_logit_softcapping: wanted null in this family, got {received(cap)}")
    return _read(values, (None, None), 6)


def _write(values: Mapping[str, Any]) -> dict[str, Any]:
    names = *_CAPS, "attention_bias", "query_pre_attn_scalar", "sliding_window"
    types = values["layer_types"] or [SLIDING] * values["num_hidden_layers"]
    return {"layer_types": list(types), **flags(values, *names)}


GEMMA2 = Variant(
    "Gemma2ForCausalLM",
    activation="gelu_pytorch_tanh",
    defaults=_SIZES,
    fixed=_FIXED,
    fields=_FIELDS,
    read=lambda values: _read(values, (50.0, 30.0), 2),
    write=_write,
)
GEMMA3 = Variant(
    "Gemma3ForCausalLM",
    activation="gelu_pytorch_tanh",
    local_theta=10000.0,
    defaults={
        **_SIZES,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
    },
    fixed={**_FIXED, "qk_norm": True},
    fields=_FIELDS,
    read=_read_third,
    write=_write,
)
