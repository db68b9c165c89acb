"""`config.json` of all families: what fields mean, which are missing, without effect or refused, and what is lost."""

import json
import re

import numpy as np
import pytest

from energy_attn.models import LlamaConfig, Rope
from energy_attn.models.llama._rope import frequencies
from tests.support.complaints import refused

SIZES = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 32}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture
def read(tmp_path):
    """The configuration in a file with these fields."""
    path = tmp_path / "config.json"

    def run(**fields):
        path.write_text(json.dumps(fields))
        return LlamaConfig.from_json(path)

    return run


L3 = '"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16'
SCALING = Rope.llama3(8.0, original_max_position_embeddings=16)
ROPES = {  # the rotary embedding as config.json says it: theta, and how positions are scaled
    f'"rope_theta": 5e5, "rope_scaling": {{"rope_type": "llama3", {L3}}}': (5e5, SCALING),
    f'"rope_parameters": {{"rope_theta": 5e5, "rope_type": "llama3", {L3}}}': (5e5, SCALING),
    """"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2},
    "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2}""": (
        5e5,
        Rope.linear(2),
    ),
    '"rope_theta": 100, "rope_scaling": {"type": "linear", "factor": 4.0}': (100, Rope.linear(4.0)),
    """"max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3", "factor": 2.0,
    "low_freq_factor": 1.0, "high_freq_factor": 2.0}""": (1e4, Rope.llama3(2.0, 1.0, 2.0, 64)),
    """"rope_scaling": {"type": "linear", "factor": 2},
    "rope_parameters": {"rope_theta": 5e5}""": (5e5, Rope.linear(2)),
    '"rope_scaling": {"rope_type": null, "type": "linear", "factor": 2}': (1e4, Rope.linear(2)),
    """"hidden_act": "swish",
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}""": (1e4, None),
    """"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 16,
    "attn_factor": 1.0, "extrapolation_factor": 1}""": (1e4, Rope.yarn(2, 16)),
    """"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
    "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": false}""": (
        1e4,
        Rope.yarn(4.0, 64, 16.0, 2.0, mscale=0.7, mscale_all_dim=0.9, truncate=False),
    ),
    """"max_position_embeddings": 96,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}""": (
        1e4,
        Rope.yarn(2.0, 96, scale=1.5),
    ),
}


@pytest.mark.parametrize("said", ROPES)
def test_rotary_embedding(said, read):
    """Both spellings of the rotary embedding; a wrong one is a model that is wrong only far away."""
    (theta, scaling), fields = ROPES[said], json.loads(f"{{{said}}}")
    config = read(**SIZES, model_type="llama", **fields)
    context = fields.get("max_position_embeddings", 2048)
    wanted = {"rope_theta": theta, "rope_scaling": scaling, "max_position_embeddings": context}
    assert config == LlamaConfig(**SIZES, **wanted) and hash(config) == hash(
        LlamaConfig(**SIZES, **wanted)
    )
    assert read(**config.to_json()) == config


# What published files of Llamas say beside sizes and rotary embedding.
WITHOUT_EFFECT = """{
"_name_or_path": "somewhere", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "hidden_act": "silu",
"initializer_range": 0.02, "pretraining_tp": 2, "rope_scaling": null, "tie_word_embeddings": false,
"torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "use_cache": true, "do_sample": true,
"temperature": 0.9, "top_p": 0.6, "max_length": 4096, "quantization_config": null
} {
"attention_bias": false, "attention_dropout": 0.0, "is_llama_config": true, "mlp_bias": false, "pad_token_id": 2,
"rope_interleaved": false, "transformers.js_config": {"dtype": "q4"}, "unsloth_fixed": true,
"_attn_implementation_autoset": false
} {
"return_dict": true, "output_hidden_states": false, "chunk_size_feed_forward": 0, "is_encoder_decoder": false,
"is_decoder": false, "add_cross_attention": false, "pruned_heads": {}, "torchscript": false,
"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": null, "dtype": "float32",
"task_specific_params": null, "sliding_window": null, "use_sliding_window": false,
"layer_types": ["full_attention", "full_attention"], "no_rope_layers": [1, 1], "logits_scaling": null,
"rope_scaling": {"rope_type": "default", "attention_factor": null}, "partial_rotary_factor": 1.0
}"""


@pytest.mark.parametrize("fields", WITHOUT_EFFECT.replace("} {", "}\0{").split("\0"))
def test_fields_without_effect(fields, read):
    """Bookkeeping, and fields of other families with the value that is Llama's, refused or taken for something."""
    assert read(**SIZES, model_type="llama", **json.loads(fields)) == LlamaConfig(**SIZES)


# Files of published models, without their lists.
PUBLISHED = """
gpt-oss-20b {
"architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "eos_token_id": 200002,
"experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
"initializer_range": 0.02, "intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "gpt_oss",
"num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
"num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199999,
"quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
"rms_norm_eps": 1e-05,
"rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
"rope_type": "yarn", "truncate": false},
"rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
"tie_word_embeddings": false, "transformers_version": "4.55.0.dev0", "use_cache": true, "vocab_size": 201088
}
mixtral {
"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
"hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
"max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
"num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
"rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": true,
"vocab_size": 32000
}
phi-3-mini-4k {
"_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"], "attention_bias": false,
"attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "bos_token_id": 1,
"embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
"intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32,
"num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "pad_token_id": 32000,
"resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0, "sliding_window": 2047,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 32064
}
phi-4-mini {
"architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "auto_map": {},
"bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu",
"hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192, "interpolate_factor": 1,
"lm_head_bias": false, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "phi3",
"num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
"pad_token_id": 199999, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
"rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
"use_cache": true, "vocab_size": 200064
}
moonlight {
"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "auto_map": {},
"aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1,
"hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11264, "kv_lora_rank": 512,
"max_position_embeddings": 8192, "model_type": "deepseek_v3", "moe_intermediate_size": 1408, "moe_layer_freq": 1,
"n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": true, "num_attention_heads": 16,
"num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0,
"pretraining_tp": 1, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
"rope_scaling": null, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "scoring_func": "sigmoid",
"seq_aux": true, "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
"transformers_version": "4.48.3", "use_cache": true, "v_head_dim": 128, "vocab_size": 163840
}
qwen3-30b-a3b {
"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
"decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
"initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
"mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
"num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
"num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_scaling": null,
"rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": false,
"torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936
}
"""
LISTS = {
    "gpt-oss-20b": {"layer_types": [SLIDING, FULL] * 12},
    "phi-4-mini": {
        "rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"}
    },
}
FOUND = {  # rotary width, experts, window of the first layer
    "gpt-oss-20b": (64, 32, 128),
    "mixtral": (128, 8, None),
    "phi-3-mini-4k": (96, None, 2047),
    "phi-4-mini": (96, None, 262144),
    "moonlight": (64, 64, None),
    "qwen3-30b-a3b": (128, 128, None),
}


@pytest.mark.parametrize("name", FOUND)
def test_published(name, read):
    """A field that says nothing of the logits and is refused; a field that is read and not written."""
    fields = PUBLISHED.partition(f"\n{name} ")[2].partition("\n}")[0] + "}"
    config = read(**json.loads(fields), **LISTS.get(name, {}))
    experts = None if config.experts is None else config.experts.num_experts
    assert (config.rotary_dim, experts, config.window(0)) == FOUND[name]
    assert read(**config.to_json()) == config


FIRST = json.dumps([SLIDING, FULL, FULL, FULL])
ALL = [1] * 4
READ = {  # by model_type and fields: windows, and which layers have a rotary embedding
    "llama {}": ([None] * 4, ALL),
    "mistral {}": ([4096] * 4, ALL),  # transformers' default, and null
    'mistral {"sliding_window": null}': ([None] * 4, ALL),
    'mistral {"sliding_window": 7}': ([7] * 4, ALL),
    # a size without the flag
    'qwen2 {"sliding_window": 7, "max_window_layers": 2}': ([None] * 4, ALL),
    """qwen2 {"use_sliding_window": true, "sliding_window": 7,
    "max_window_layers": 2}""": ([None, None, 7, 7], ALL),
    'qwen3 {"use_sliding_window": true, "max_window_layers": 3}': ([None, None, None, 4096], ALL),
    f"""qwen3 {{"use_sliding_window": true, "sliding_window": 5,
    "layer_types": {FIRST}}}""": ([5, None, None, None], ALL),
    "smollm3 {}": ([None] * 4, [1, 1, 1, 0]),
    """smollm3 {"no_rope_layer_interval": 2, "use_sliding_window": true,
    "sliding_window": 9}""": ([None, 9, None, 9], [1, 0, 1, 0]),
    'smollm3 {"no_rope_layers": [0, 1, 1, 1]}': ([None] * 4, [0, 1, 1, 1]),
    'gemma2 {"sliding_window": 6}': ([6, None, 6, None], ALL),
    "gemma3_text {}": ([4096] * 4, ALL),
    'gemma3_text {"sliding_window_pattern": 3}': ([4096, 4096, None, 4096], ALL),
}


@pytest.mark.parametrize("said", READ)
def test_layers(said, read):
    """A layer in a window that it has not, or rotated where it is not; and the same when it is written and read."""
    kind, _, fields = said.partition(" ")
    config = read(**SIZES, model_type=kind, **json.loads(fields))
    again = read(**config.to_json())
    for x in config, again:
        assert [x.window(i) for i in range(4)] == READ[said][0]
        assert [int(x.rotates(i)) for i in range(4)] == READ[said][1]
    assert again.to_json() == config.to_json()


GEMMA = {"unit_offset": True, "post_norms": True, "scaled_embeddings": True, "head_dim": 256}
DEFAULTS = {
    "mistral {}": {"num_key_value_heads": 8, "head_dim": 16, "rope_theta": 1e4, "qk_norm": False},
    "qwen2 {}": {"num_key_value_heads": 32, "attention_bias": True, "output_bias": False},
    "qwen3 {}": {"head_dim": 128, "qk_norm": True, "tie_word_embeddings": False},
    "smollm3 {}": {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    "olmo2 {}": {
        **{"rms_norm_eps": 1e-5, "pre_norms": False, "post_norms": True},
        **{"qk_norm": True, "qk_norm_over_heads": True},
    },
    "gemma2 {}": {
        **{
            "attn_logit_softcapping": 50,
            "final_logit_softcapping": 30,
            "query_pre_attn_scalar": 256,
        },
        **{"rope_theta": 1e4, "rope_local_base_freq": None, **GEMMA},
    },
    "gemma3_text {}": {
        **{"attn_logit_softcapping": None, "final_logit_softcapping": None},
        **{"query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4, **GEMMA},
    },
    """gemma3_text {"rope_theta": 7e5, "rope_local_base_freq": 5e3,
    "rope_scaling": {"type": "linear", "factor": 8.0}}""": {
        **{"rope_theta": 7e5, "rope_local_base_freq": 5e3, "rope_scaling": Rope.linear(8.0)}
    },
}


@pytest.mark.parametrize("said", DEFAULTS)
def test_defaults(said, read):
    """A missing field with Llama's default where the family has another."""
    kind, _, fields = said.partition(" ")
    config = read(**SIZES, model_type=kind, **json.loads(fields))
    assert {name: getattr(config, name) for name in DEFAULTS[said]} == DEFAULTS[said]


# model_type, the error, and the fields.
REFUSED = r"""
llama ValueError window, no_rope_layers: .*got dict \{'sliding_window': 4, 'no_rope_layers' |
    {"sliding_window": 4, "no_rope_layers": [1, 0]}
llama ValueError layer_types: .*, got .*delete | {"layer_types": ["sliding_attention", "full"]}
llama ValueError rope_interleaved: wanted | {"rope_interleaved": true}
llama ValueError quantization: wanted only | {"quantization": {"bits": 4}}
llama ValueError full_attention: wanted only |
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}
llama ValueError model_type: wanted 'llama' or .*, got NoneType None | {"model_type": null}
llama ValueError hidden_act: wanted 'silu', got | {"hidden_act": "gelu"}
llama ValueError quantization_config: wanted | {"quantization_config": {"bits": 4}}
llama ValueError rope_type: .*'linear', 'llama3', 'yarn', .*, got str 'ntk' |
    {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}
llama ValueError rope_theta: wanted one value in .*, got float 500000.0 and float 10000.0 |
    {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}
llama ValueError rope_type: wanted one value in .*, got str 'linear' and str 'default' |
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5e5, "rope_type":
    "default"}}
llama ValueError attn_factor: wanted only | {"rope_scaling": {"rope_type": "yarn", "attn_factor": 2.0, "factor": 2.0}}
llama TypeError rope_type: wanted a string in rope_scaling, got list \[1\] | {"rope_scaling": {"rope_type": [1]}}
llama TypeError rope_parameters: wanted a JSON object, got list \[1\] | {"rope_parameters": [1]}
llama ValueError hidden_act: wanted 'silu', got list \[1\] | {"hidden_act": [1]}
llama ValueError rope_scaling: wanted its factor, got dict .*'dynamic' |
    {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}
llama ValueError factor: wanted at least 1, got 0.5 | {"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}
llama ValueError long_factor: wanted 2 numbers as in short_factor, got 1 |
    {"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 2], "long_factor": [1]}}
llama TypeError long_factor: wanted a list |
    {"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 2], "long_factor": 1}}
llama ValueError partial_rotary_factor: want | {"partial_rotary_factor": 0.5}
llama ValueError partial_rotary_factor: .* 1, got float 0.5 | {"rope_parameters": {"partial_rotary_factor": 0.5}}
llama ValueError rope_scaling: wanted its factor, got | {"rope_scaling": {"rope_type": "linear"}}
llama ValueError factor: wanted more than 0, got 0 | {"rope_scaling": {"rope_type": "linear", "factor": 0}}
llama ValueError high_freq_factor: .* low_freq_factor 1.0, got 0.5 |
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 0.5,
    "original_max_position_embeddings": 16}}
llama TypeError rope_scaling: wanted a JSON object | {"rope_scaling": [1]}
llama TypeError hidden_size: wanted an integer | {"hidden_size": "16"}
llama TypeError eos_token_id: wanted an integer | {"eos_token_id": "</s>"}
llama ValueError sliding_window: wanted only | {"sliding_window": 7}
llama ValueError rope_local_base_freq: wanted only | {"rope_local_base_freq": 5000.0}
llama ValueError eos_token_id: wanted an integer of 32 bits, got int 1099511627776 | {"eos_token_id": [1099511627776]}
llama ValueError vocab_size: wanted an integer of 32 bits | {"vocab_size": 2147483648}
llama ValueError num_attention_heads: wanted an integer of 32 bits | {"num_attention_heads": 1180591620717411303424}
llama TypeError attention_factor: wanted a real number, got list |
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": [1]}}
llama ValueError rope_scaling: wanted its factor | {"rope_scaling": {"rope_type": "yarn"}}
llama ValueError long_factor: wanted only | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "long_factor": [1.0]}}
gpt2 ValueError model_type: wanted 'llama' or 'mistral' | {}
mistral ValueError attention_bias: wanted only | {"attention_bias": true}
mistral ValueError no_rope_layers: wanted only | {"no_rope_layers": [1, 1, 0, 1]}
mistral ValueError sliding_window: wanted an integer of 32 bits | {"sliding_window": 1099511627776}
mixtral ValueError num_experts_per_tok: wanted at most the 2 experts |
    {"num_local_experts": 2, "num_experts_per_tok": 3}
mixtral ValueError num_local_experts: wanted an integer of 32 bits | {"num_local_experts": 2147483648}
phi3 ValueError rope_scaling: wanted its long_factor | {"rope_scaling": {"type": "su", "short_factor": [1.0]}}
phi3 TypeError original_max_position_embeddings: wanted an integer, got str 'x' |
    {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]},
    "original_max_position_embeddings": "x"}
qwen2 ValueError layer_types: wanted 'full_attention' without | {"layer_types": ["sliding_attention"]}
qwen2 ValueError layer_types: wanted .* for each of 4 layers |
    {"use_sliding_window": true, "layer_types": ["sliding_attention"]}
qwen2 ValueError hidden_act: wanted 'silu', got str 'gelu' | {"hidden_act": "gelu"}
qwen2 TypeError use_sliding_window: wanted True or False, got dict | {"use_sliding_window": {"a": 1}}
qwen3 ValueError layer_types: wanted .*'chunked' | {"use_sliding_window": true, "layer_types": ["chunked"]}
qwen3 ValueError sliding_window: wanted at least 1, got 0 | {"use_sliding_window": true, "sliding_window": 0}
qwen3 TypeError layer_types: wanted a list, got dict | {"layer_types": {"a": 1}}
qwen3_moe ValueError mlp_only_layers: wanted a routed MLP in every layer | {"mlp_only_layers": [0]}
qwen3_moe ValueError layer_types: wanted 'full_attention' without use_sliding_window, got \[\[1 |
    {"layer_types": [[1], 2, 3, 4]}
smollm3 ValueError no_rope_layers: wanted 0 or 1 | {"no_rope_layers": [1, 1, 2, 1]}
smollm3 TypeError no_rope_layers: wanted a list | {"no_rope_layers": 3}
smollm3 TypeError layer_types: wanted a list, got float 1.5 | {"layer_types": 1.5}
gemma2 ValueError hidden_activation: wanted 'gelu_pytorch_tanh', got str 'gelu' | {"hidden_activation": "gelu"}
gemma2 ValueError sliding_window_pattern: wanted an integer of 32 bits | {"sliding_window_pattern": 1099511627776}
gemma3_text ValueError use_bidirectional_attention: wanted false | {"use_bidirectional_attention": true}
gemma3_text ValueError rope_type: wanted 'default' in |
    {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}
gemma3_text ValueError rope_type: wanted 'default' in 'sliding_attention', got 'linear' |
    {"rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2.0}}}
gemma3_text ValueError rope_type: wanted 'default' in .*, partial_rotary_factor 0.5 |
    {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}}
gemma3_text ValueError rope_theta: wanted only | {"rope_parameters": {"full_attention": {}, "rope_theta": 1e4}}
gemma3_text ValueError rope_theta: wanted one value in .*, got float 300.0 and float 10000.0 |
    {"rope_parameters": {"sliding_attention": {"rope_theta": 300.0}}, "rope_local_base_freq": 1e4}
gemma3_text TypeError full_attention: wanted a JSON object, got list | {"rope_parameters": {"full_attention": [1]}}
gemma3_text ValueError attn_logit_softcapping: wanted null in this family, got float 50.0 |
    {"attn_logit_softcapping": 50.0}
gpt_oss ValueError quantization_config: wanted .* or by 'mxfp4', got str 'awq' |
    {"quantization_config": {"quant_method": "awq"}}
deepseek_v3 ValueError scoring_func: wanted 'sigmoid', got str 'softmax' | {"scoring_func": "softmax"}
deepseek_v3 ValueError n_group: wanted a divisor of the 10 experts | {"n_routed_experts": 10}
deepseek_v3 ValueError qk_rope_head_dim: wanted an even number | {"qk_rope_head_dim": 5}
deepseek_v3 ValueError num_key_value_heads: wanted 32 beside latent attention | {"num_key_value_heads": 8}
deepseek_v3 TypeError n_routed_experts: wanted an integer, got list | {"n_routed_experts": [1]}
deepseek_v3 ValueError kv_lora_rank: wanted an integer of 32 bits | {"kv_lora_rank": 1099511627776}
"""
ROWS = re.sub(r"\n {4}", " ", REFUSED).strip().splitlines()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.partition(" |")[0])
def test_refused(row, read, unchecked):
    """A setting that is ignored, or an error that names neither the setting nor the file."""
    said, _, fields = row.partition(" | ")
    kind, error, message = said.split(" ", 2)
    with refused(f"{error} config.json: .*{message}"):
        read(**{**SIZES, "model_type": kind, **json.loads(fields)})


LOST = {
    "llama sliding_window": {"sliding_window": 5},
    "qwen2 qk_norm": {"attention_bias": True, "output_bias": False, "qk_norm": True},
    "mistral mlp_bias": {"mlp_bias": True},
    "gemma2 no_rope_layers": {
        **dict.fromkeys(("unit_offset", "post_norms", "scaled_embeddings"), True),
        **{"hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 4, "sliding_window": 4},
        **{"no_rope_layers": (0, 1, 1, 1), "layer_types": (FULL,) * 4},
    },
}


@pytest.mark.parametrize("said", LOST)
def test_lost_in_a_file(said):
    """A checkpoint that is read as another decoder, as its family has no word for what this one has."""
    kind, name = said.split()
    config = LlamaConfig(**SIZES, model_type=kind, **LOST[said])
    with pytest.raises(ValueError, match=f"{name}: wanted what a checkpoint of {kind!r} can say"):
        config.to_json()


def test_frequencies():
    """Llama 3's scaling as a function of each pair's wavelength, one pair at a time."""
    scaling = Rope.llama3(8.0, 1.0, 4.0, 8192)
    plain = 5e5 ** (-np.arange(64) / 64)
    length = 2 * np.pi / plain
    part = np.clip((8192 / length - 1) / (4 - 1), 0, 1)
    got = frequencies(128, 5e5, scaling, np.dtype("float64"), 9000)
    np.testing.assert_allclose(got, (1 - part) * plain / 8 + part * plain, rtol=1e-14)
    assert {0, 1} < {*part}  # frequencies that are divided, kept, and in between
    half = frequencies(8, 100.0, Rope.linear(2.0), np.dtype("float64"), 9000)
    np.testing.assert_allclose(half, 100.0 ** (-np.arange(4) / 4) / 2, rtol=1e-14)
