"""The files of a checkpoint: its folder, the identity of the save that wrote them, and its `config.json`.

`save` writes files under new names, then replaces the file of weights (or the index of several), and then
`config.json`. Until the last step, the new `config.json` has a name with the identity of its save, which is in the
weights as well. A reader prefers that file to the old one, so that a save killed between the two steps is complete.
"""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from energy_attn.distributed.internal import files as saved_files
from energy_attn.distributed.internal import safetensors
from energy_attn.kernels.internal import checks

from ..decoder._config import AbstractDecoderConfig, AbstractModelConfig, check_type
from ..decoder._decoder import Family

Kind = TypeVar("Kind")


def read_json(path: str | os.PathLike[str], kind: str) -> Mapping[str, Any]:
    """Returns the object in a JSON file; `kind` names the file in a `ValueError`."""
    try:
        saved_files.check_file(Path(path))
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"path: wanted a {kind}, got {path}: {error}") from error
    if not isinstance(entries, Mapping):
        raise ValueError(f"{path}: wanted a JSON object, got {checks.received(entries)}")
    return entries


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts the path of a file before the message of a `TypeError` or `ValueError`."""
    try:
        yield
    except (TypeError, ValueError) as error:
        # some subclasses, such as `UnicodeError`, take more than a message
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{path}: {error}") from error


@contextlib.contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Replaces our name of a field by the file's name in a `TypeError` or `ValueError`."""
    try:
        yield
    except (TypeError, ValueError) as error:
        name, _, message = str(error).partition(":")
        raise type(error)(f"{names.get(name, name)}:{message}") from error


def family_of(entries: Mapping[str, Any], families: Mapping[str, Kind]) -> Kind:
    kind = entries.get("model_type")
    if not isinstance(kind, str) or kind not in families:
        names = " or ".join(map(repr, families))
        raise ValueError(f"model_type: wanted {names}, got {checks.received(kind)}")
    return families[kind]


def end_tokens(entries: Mapping[str, Any]) -> tuple[int, ...]:
    tokens = entries.get("eos_token_id")
    return tuple(tokens) if isinstance(tokens, list) else () if tokens is None else (tokens,)


SAVE = "energy_attn_save"  # the key of the identity of a save, in metadata and config.json
# Fields that do not change the logits.
_OF_NO_EFFECT = frozenset(
    {
        SAVE,
        # provenance of the file
        *("_name_or_path", "name_or_path", "_commit_hash", "architectures", "license"),
        *("transformers_version", "transformers.js_config", "is_llama_config"),
        *("unsloth_fixed", "unsloth_version", "auto_map"),
        # the text and its tokens
        *("bos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id"),
        *("mask_token_id", "decoder_start_token_id", "tokenizer_class", "prefix"),
        *("model_max_length", "max_sequence_length"),
        # training
        *("initializer_range", "attention_dropout", "gradient_checkpointing"),
        # classification heads
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
        "task_specific_params",
        # how transformers computes and returns
        *("dtype", "torch_dtype", "use_bfloat16", "torchscript", "tf_legacy_loss"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
        *("_flash_attn_2_enabled", "use_cache", "pretraining_tp", "chunk_size_feed_forward"),
        *("return_dict", "output_attentions", "output_hidden_states", "is_decoder"),
        "keys_to_ignore_at_inference",
        # how transformers generates
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
# Fields of other families, with the value that describes Llama (in every layer, for lists).
_ABSENT = (
    *("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "rope_interleaved"),
    *("lm_head_bias", "attention_bias", "mlp_bias", "use_sliding_window"),
)
# transformers ignores `attn_factor` and `extrapolation_factor`, which are from YaRN's first code
_FACTORS = "full_attn_mod", "interpolate_factor", "attn_factor", "extrapolation_factor"
_ELSEWHERE: Mapping[str, Any] = {
    **dict.fromkeys(_ABSENT, False),
    **dict.fromkeys(_FACTORS, 1),
    **{"is_causal": True, "pruned_heads": {}, "layer_types": "full_attention", "no_rope_layers": 1},
}
# Other names of activations in transformers.
_TANH = "gelu_pytorch_tanh"
_SAME = {"swish": "silu", "gelu_python": "gelu", "gelu_new": _TANH, "gelu_python_tanh": _TANH}


def check_activation(name: str, entries: Mapping[str, Any], wanted: str) -> None:
    value = entries.get(name, wanted)
    if not isinstance(value, str) or _SAME.get(value, value) != wanted:
        raise ValueError(f"{name}: wanted {wanted!r}, got {checks.received(value)}")


def check_only(entries: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    for name, x in only.items():
        if entries.get(name, x) != x:
            raise ValueError(f"{name}: wanted {x!r}, got {checks.received(entries[name])}")


def check_fields(entries: Mapping[str, Any], read: Collection[str]) -> None:
    """Raises `ValueError` for fields that are not in `read` and may change the logits."""
    unknown = {
        name: value
        for name, value in entries.items()
        if not (name in read or name in _OF_NO_EFFECT or _is_llama(name, value))
    }
    if unknown:
        first, more = list(unknown)[:3], ", ..." if len(unknown) > 3 else ""
        raise ValueError(
            f"{', '.join(first)}{more}: wanted only fields and values that its family has, got "
            f"{checks.received(unknown)}; delete from the file any field without effect"
        )


def _is_llama(name: str, value: object) -> bool:
    if value is None:
        return True
    return name in _ELSEWHERE and all(
        x == _ELSEWHERE[name] for x in (value if isinstance(value, list) else [value])
    )


CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# The checkpoint that comes with the library, named "demo".
DEMO = Path(__file__).parents[2] / "cli" / "demo" / "model"


def checked(directory: Any) -> Path:
    check_type("directory", directory, str | os.PathLike, "the path of a folder")
    return Path(os.fsdecode(directory))


def located(directory: object) -> Path:
    """Returns the folder to read: for "demo" the library's own, unless a file or folder has that name."""
    folder = checked(directory)
    return DEMO if folder == Path("demo") and not folder.exists() else folder


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file in the folder; raises `ValueError` if its name is invalid or leads outside."""
    root = folder.resolve()
    roots = [root]
    if root.parent.name == "snapshots":  # Hugging Face's cache: links to the folder of blobs
        roots.append(root.parent.parent / "blobs")
    file = folder / name
    usable = "\0" not in name and max(map(len, file.parts)) < 256  # limits of file systems
    # `os.path.realpath`: `Path.resolve` raises for a link to itself
    if not usable or not any(
        Path(os.path.realpath(file)).is_relative_to(allowed) for allowed in roots
    ):
        raise ValueError(
            f"directory: wanted files inside {folder}, got {checks.received(name)}, which is not"
        )
    return file


def unfinished(name: str, save: str) -> str:
    return f"{name}.{save}{saved_files.UNFINISHED}"


def read_config(
    folder: Path, families: Mapping[str, Family], save: str | None
) -> tuple[AbstractModelConfig, Family]:
    """Returns the configuration that belongs to the weights of a save, and its family; raises as `models.load`."""
    file = inside(folder, CONFIG)
    if save is not None and (waiting := inside(folder, unfinished(CONFIG, save))).exists():
        file, save = waiting, None  # its name has the identity
    entries = read_json(file, CONFIG)
    with naming(file):
        family = family_of(entries, families)
        config = family.read(entries)
    config_save = identity_of(entries)
    if None not in (save, config_save) and save != config_save:
        raise ValueError(
            f"{file}: wanted {SAVE} {save}, as in the weights, got {config_save}; if it does belong to "
            f"them, delete {SAVE} from it"
        )
    path = folder / "generation_config.json"
    if isinstance(config, AbstractDecoderConfig) and path.is_file():
        options = read_json(path, path.name)
        if "eos_token_id" in options:
            with naming(path):
                config = dataclasses.replace(config, eos_token_id=end_tokens(options))
    return config, family


def identity(folder: Path) -> str | None:
    """Returns the identity of the save that wrote the weights of a folder, or None if they have none."""
    try:
        if os.path.lexists(file := inside(folder, WHOLE)):
            return identity_of(safetensors.header(file).metadata)
        return read_index(folder)[1]
    except ValueError:
        return None


def identity_of(metadata: Mapping[str, Any]) -> str | None:
    save = metadata.get(SAVE)
    return save if isinstance(save, str) and re.fullmatch(saved_files.IDENTITY, save) else None


def read_index(folder: Path) -> tuple[dict[str, str], str | None]:
    """Returns the file of each tensor, and the identity of the save that wrote the index; raises `ValueError`."""
    file = inside(folder, INDEX)
    try:
        saved_files.check_file(file)
        entries = json.loads(file.read_text(encoding="utf-8"))
        files, metadata = entries["weight_map"], entries.get("metadata") or {}
        if not all(isinstance(name, str) for name in files.values()):
            raise ValueError("file names that are not strings")
        return dict(files), identity_of(metadata)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: wanted the weight_map of a checkpoint, got {error!r}") from error


def in_use(folder: Path) -> set[str]:
    """Returns the files of weights that a reader needs; raises `ValueError` as `read_index`."""
    save = identity(folder)
    waiting = set() if save is None else {unfinished(CONFIG, save)}
    if os.path.lexists(folder / WHOLE):
        return {WHOLE, *waiting}
    return (
        {INDEX, *waiting, *read_index(folder)[0].values()} if (folder / INDEX).exists() else set()
    )
