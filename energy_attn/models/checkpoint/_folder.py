"""The folder of a checkpoint: which of its files are read, and which save they belong to.

`save` writes under new names, and the checkpoint changes when the one file of weights, or the index
of several, is replaced. Two files cannot be replaced at once, so the new `config.json` first waits
beside the old one, under a name with the identity of its save, which the weights contain as well: a
reader prefers it where it finds it, so that a save killed between the two replacements is complete.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from energy_attn.distributed.internal import IDENTITY, UNFINISHED, check_file, safetensors
from energy_attn.kernels.internal import received

from ..decoder._config import AbstractDecoderConfig
from ..decoder._family import Family
from ._config import family_of, naming, read_json

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SAVE = "energy_attn_save"  # the key of the identity, in metadata and config.json


def checked(directory: object) -> Path:
    """Returns the path of a folder; raises `TypeError` for anything else."""
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"directory: wanted the path of a folder, got {received(directory)}")
    return Path(os.fsdecode(directory))


def inside(folder: Path, name: str) -> Path:
    """A file of the folder; raises `ValueError` for what cannot be one, and what leads out of it."""
    root = folder.resolve()
    homes = [root]
    if root.parent.name == "snapshots":  # Hugging Face's cache: links to the folder of blobs
        homes.append(root.parent.parent / "blobs")
    file = folder / name
    usable = "\0" not in name and max(map(len, file.parts)) < 256  # as systems have it
    # by `os`, which takes a link to itself as it is
    if not usable or not any(Path(os.path.realpath(file)).is_relative_to(home) for home in homes):
        raise ValueError(
            f"directory: wanted files inside {folder}, got {received(name)}, which is not"
        )
    return file


def unfinished(name: str, save: str) -> str:
    """The name of a file until it replaces the one called `name`."""
    return f"{name}.{save}{UNFINISHED}"


def config(
    folder: Path, families: Mapping[str, Family], save: str | None
) -> tuple[AbstractDecoderConfig, Family]:
    """The configuration that belongs to the weights of a save, and its family; raises as `Llama.load`."""
    if save is not None:
        waiting = inside(folder, unfinished(CONFIG, save))
        if waiting.exists():
            return _read(read_json(waiting, CONFIG), waiting, families)
    file = inside(folder, CONFIG)
    entries = read_json(file, CONFIG)
    found = _read(entries, file, families)
    other = identity_of(entries)
    if None not in (save, other) and save != other:
        raise ValueError(
            f"{file}: wanted the one of the weights, whose {SAVE} is {save}, got {other}: "
            f"it is of another save; without {SAVE} it is taken for any weights"
        )
    return found


def _read(
    entries: Mapping[str, Any], file: Path, families: Mapping[str, Family]
) -> tuple[AbstractDecoderConfig, Family]:
    """The configuration in a file, and its family."""
    with naming(file):
        family = family_of(entries, families)
        return family.read(entries), family


def identity(folder: Path) -> str | None:
    """The save that the weights of a folder belong to; None where they do not name one."""
    try:
        if os.path.lexists(whole := inside(folder, WHOLE)):
            return identity_of(safetensors.header(whole).metadata)
        return index(folder)[1]
    except ValueError:
        return None


def identity_of(about: Mapping[str, Any]) -> str | None:
    """The save that the metadata of a file names; None if there is none."""
    save = about.get(SAVE)
    return save if isinstance(save, str) and re.fullmatch(IDENTITY, save) else None


def index(folder: Path) -> tuple[dict[str, str], str | None]:
    """The file of each tensor, and the save that the index belongs to; raises `ValueError`."""
    file = inside(folder, INDEX)
    try:
        check_file(file)
        entries = json.loads(file.read_text(encoding="utf-8"))
        where, about = entries["weight_map"], entries.get("metadata") or {}
        if not all(isinstance(name, str) for name in where.values()):
            raise ValueError("file names that are not strings")
        return dict(where), identity_of(about)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: wanted the weight_map of a checkpoint, got {error!r}") from error


def in_use(folder: Path) -> set[str]:
    """The files that a reader needs beside `config.json`; raises `ValueError` as `index`."""
    save = identity(folder)
    waiting = set() if save is None else {unfinished(CONFIG, save)}
    if os.path.lexists(folder / WHOLE):
        return {WHOLE, *waiting}
    return {INDEX, *waiting, *index(folder)[0].values()} if (folder / INDEX).exists() else set()
