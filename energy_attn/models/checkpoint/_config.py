"""The JSON files of a checkpoint that describe its model, and checks of their fields."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from energy_attn.distributed.internal import check_file
from energy_attn.kernels.internal import received

from ..decoder._config import AbstractDecoderConfig, AbstractModelConfig

Kind = TypeVar("Kind")


def read_json(path: str | os.PathLike[str], kind: str) -> Mapping[str, Any]:
    """The object in a JSON file; `kind` names the file in a `ValueError`."""
    try:
        check_file(Path(path))
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"path: wanted a {kind}, got {path}: {error}") from error
    if not isinstance(entries, Mapping):
        raise ValueError(f"{path}: wanted a JSON object, got {received(entries)}")
    return entries


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts the path of a file before the message of a `TypeError` or `ValueError`."""
    try:
        yield
    except (TypeError, ValueError) as error:
        # some of their subclasses, such as `UnicodeError`s, cannot be made of a message
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{path}: {error}") from error


@contextlib.contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Puts a file's name of a field in the place of ours in front of a `TypeError` or `ValueError`."""
    try:
        yield
    except (TypeError, ValueError) as error:
        name, _, said = str(error).partition(":")
        raise type(error)(f"{names.get(name, name)}:{said}") from error


def family_of(entries: Mapping[str, Any], families: Mapping[str, Kind]) -> Kind:
    """The entry of the family that a `config.json` names; raises `ValueError` for one that is not known."""
    kind = entries.get("model_type")
    if not isinstance(kind, str) or kind not in families:
        names = " or ".join(map(repr, families))
        raise ValueError(f"model_type: wanted {names}, got {received(kind)}")
    return families[kind]


def end_tokens(entries: Mapping[str, Any]) -> tuple[int, ...]:
    tokens = entries.get("eos_token_id")
    return tuple(tokens) if isinstance(tokens, list) else () if tokens is None else (tokens,)


def with_end_tokens(config: AbstractModelConfig, folder: Path) -> AbstractModelConfig:
    """The configuration with the end tokens of a folder's generation_config.json, if it has any."""
    path = folder / "generation_config.json"
    if not isinstance(config, AbstractDecoderConfig) or not path.is_file():
        return config
    entries = read_json(path, path.name)
    if "eos_token_id" not in entries:
        return config
    with naming(path):
        own: Any = config
        return dataclasses.replace(own, eos_token_id=end_tokens(entries))


SAVE = "energy_attn_save"  # the key of the identity of a save, in metadata and config.json
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
        *("do_sample", "temperature", "top_k", "top_p", "typical_p", "epsilon_cutoff"),
        *("eta_cutoff", "num_beams", "num_beam_groups", "diversity_penalty", "length_penalty"),
        *("max_length", "min_length", "max_new_tokens", "early_stopping", "num_return_sequences"),
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
    """Raises `ValueError` for a field that names another activation than `wanted`."""
    given = entries.get(name, wanted)
    if not isinstance(given, str) or _SAME.get(given, given) != wanted:
        raise ValueError(f"{name}: wanted {wanted!r}, got {received(given)}")


def check_only(entries: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    for name, x in only.items():
        if entries.get(name, x) != x:
            raise ValueError(f"{name}: wanted {x!r}, got {received(entries[name])}")


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
