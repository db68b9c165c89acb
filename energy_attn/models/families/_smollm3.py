"""SmolLM3 (Hugging Face, 2025): no rotary embedding in every fourth layer."""

from collections.abc import Mapping
from typing import Any

from energy_attn.kernels.internal import check_integer

from ._variant import FULL, SLIDING, WINDOWS, Variant, flags, read_list, read_windows, write_windows

_BIASES = ("attention_bias", "mlp_bias")


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    rotated = read_list(values, "no_rope_layers")
    if rotated is None:
        interval = check_integer(
            "no_rope_layer_interval", values.get("no_rope_layer_interval", 4), 1
        )
        rotated = tuple(int((i + 1) % interval != 0) for i in range(values["num_hidden_layers"]))
    types = values.get("layer_types")
    if types is None:  # the window is that of the layers without a rotary embedding
        types = [FULL if x else SLIDING for x in rotated]
        types = types if values.get("use_sliding_window", False) else [FULL] * len(types)
    windows = read_windows({**values, "layer_types": types})
    return {"no_rope_layers": rotated, **windows, **flags(values, *_BIASES)}


def _write(values: Mapping[str, Any]) -> dict[str, Any]:
    rotated = values["no_rope_layers"]
    rotated = [1] * values["num_hidden_layers"] if rotated is None else list(rotated)
    windows = write_windows(values)
    del windows["max_window_layers"]
    return {"no_rope_layers": rotated, **windows, **flags(values, *_BIASES)}


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
    fields=(*WINDOWS, *_BIASES, "no_rope_layers", "no_rope_layer_interval"),
    read=_read,
    write=_write,
)
