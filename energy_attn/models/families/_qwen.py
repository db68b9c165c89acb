"""Qwen2 (arXiv 2407.10671), with biases before attention; Qwen3 (arXiv 2505.09388), with norms of queries and keys."""

from collections.abc import Mapping
from typing import Any

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
