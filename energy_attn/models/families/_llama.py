"""Llama."""

from ._variant import Variant, flags

_BIASES = ("attention_bias", "mlp_bias")
LLAMA = Variant(
    "LlamaForCausalLM",
    fields=_BIASES,
    read=lambda values: flags(values, *_BIASES),
    write=lambda values: flags(values, *_BIASES),
)
