"""Checks of fields of a `config.json`: the activation, and those that change nothing."""

from collections.abc import Collection, Mapping
from typing import Any

from energy_attn.kernels.internal import received

from ._folder import SAVE

# The logits do not depend on these.
_OF_NO_EFFECT = frozenset(
    {
        SAVE,
        # where the file comes from
        *("_name_or_path", "name_or_path", "_commit_hash", "architectures", "license"),
        *("transformers_version", "transformers.js_config", "is_llama_config"),
        *("unsloth_fixed", "unsloth_version", "auto_map"),
        # the text and its tokens
        *("bos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id"),
        *("mask_token_id", "decoder_start_token_id", "tokenizer_class", "prefix"),
        *("model_max_length", "max_sequence_length"),
        # training
        *("initializer_range", "attention_dropout", "gradient_checkpointing"),
        # heads that are not the decoder's
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
        "task_specific_params",
        # how others compute and return the same
        *("dtype", "torch_dtype", "use_bfloat16", "torchscript", "tf_legacy_loss"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
        *("_flash_attn_2_enabled", "use_cache", "pretraining_tp", "chunk_size_feed_forward"),
        *("return_dict", "output_attentions", "output_hidden_states", "is_decoder"),
        "keys_to_ignore_at_inference",
        # how others generate
        *(
            "do_sample",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
            "epsilon_cutoff",
            "eta_cutoff",
        ),
        *("max_length", "min_length", "max_new_tokens", "early_stopping", "num_return_sequences"),
        *("num_beams", "num_beam_groups", "diversity_penalty", "length_penalty"),
        *("repetition_penalty", "encoder_repetition_penalty", "exponential_decay_length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
        *("remove_invalid_values", "return_dict_in_generate", "output_scores"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
    }
)
# Fields of other families, with the value that Llama has, or has in every layer.
_ELSEWHERE: Mapping[str, Any] = {
    "is_causal": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "rope_interleaved": False,
    "lm_head_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    # of YaRN's first code, which transformers does not read
    "attn_factor": 1,
    "extrapolation_factor": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "layer_types": "full_attention",
    "no_rope_layers": 1,
}


# transformers' other names of the same functions.
_SAME = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
}


def check_activation(name: str, entries: Mapping[str, Any], wanted: str) -> None:
    """Raises `ValueError` for a field that names another activation than this one."""
    given = entries.get(name, wanted)
    if not isinstance(given, str) or _SAME.get(given, given) != wanted:
        raise ValueError(f"{name}: wanted {wanted!r}, got {received(given)}")


def check_fields(entries: Mapping[str, Any], read: Collection[str]) -> None:
    """Raises `ValueError` for fields other than those in `read` that may change the logits."""
    unknown = {
        name: value
        for name, value in entries.items()
        if not (name in read or name in _OF_NO_EFFECT or _is_llama(name, value))
    }
    if unknown:
        first, more = list(unknown)[:3], ", ..." if len(unknown) > 3 else ""
        raise ValueError(
            f"{', '.join(first)}{more}: wanted only fields and values that its family has, got "
            f"{received(unknown)}; delete from the file what changes nothing"
        )


def _is_llama(name: str, value: object) -> bool:
    if value is None:
        return True
    return name in _ELSEWHERE and all(
        x == _ELSEWHERE[name] for x in (value if isinstance(value, list) else [value])
    )
