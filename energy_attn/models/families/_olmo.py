"""OLMo 2 (arXiv 2501.00656): what attention and the MLP add is normed, and so are all queries and all keys together."""

from ._variant import Variant, flags

OLMO2 = Variant(
    "Olmo2ForCausalLM",
    defaults={"vocab_size": 50304, "rms_norm_eps": 1e-5},
    fixed={
        **{"qk_norm": True, "qk_norm_over_heads": True, "wide_norms": True},
        **{"pre_norms": False, "post_norms": True},
    },
    fields=("attention_bias",),
    read=lambda values: flags(values, "attention_bias"),
    write=lambda values: flags(values, "attention_bias"),
)
