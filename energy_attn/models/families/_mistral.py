"""Mistral (arXiv 2310.06825): a window in every layer, or none."""

from ._variant import Variant

MISTRAL = Variant(
    "MistralForCausalLM",
    defaults={
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
    },
    fields=("sliding_window",),
    read=lambda values: {"sliding_window": values.get("sliding_window", 4096)},
    write=lambda values: {"sliding_window": values["sliding_window"]},
)
