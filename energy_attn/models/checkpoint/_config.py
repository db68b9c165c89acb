"""The JSON files of a checkpoint that describe its decoder."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from energy_attn.distributed.internal import check_file
from energy_attn.kernels.internal import received

from ..decoder._config import AbstractDecoderConfig, AbstractModelConfig
from ..decoder._decoder import Family


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


def family_of(entries: Mapping[str, Any], families: Mapping[str, Family]) -> Family:
    """The family that a `config.json` names; raises `ValueError` for one that is not known."""
    kind = entries.get("model_type")
    if not isinstance(kind, str) or kind not in families:
        names = " or ".join(map(repr, families))
        raise ValueError(f"model_type: wanted {names}, got {received(kind)}")
    return families[kind]


def end_tokens(entries: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: one, a list, or none."""
    tokens = entries.get("eos_token_id")
    return tuple(tokens) if isinstance(tokens, list) else () if tokens is None else (tokens,)


def with_end_tokens(config: AbstractModelConfig, folder: Path) -> AbstractModelConfig:
    """The configuration with the end tokens of a folder's generation_config.json, if it has any.

    transformers stops at these tokens, whatever config.json says. Raises `TypeError` or `ValueError`.
    """
    path = folder / "generation_config.json"
    if not isinstance(config, AbstractDecoderConfig) or not path.is_file():
        return config
    entries = read_json(path, path.name)
    if "eos_token_id" not in entries:
        return config
    with naming(path):
        own: Any = config
        return dataclasses.replace(own, eos_token_id=end_tokens(entries))
