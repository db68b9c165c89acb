"""The folder of a checkpoint: which of its files are read, and which save they are of.

`save` writes under new names, and the folder changes when the weights' one file or their index is
replaced. As no two files change at once, the new `config.json` waits beside the old one under a
name with the identity of its save, which the weights have as well: a reader who finds it there
prefers it, and a save killed between the two has still taken place.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from energy_attn.distributed.internal import IDENTITY, UNFINISHED, check_pulled, safetensors
from energy_attn.kernels.internal import received

from ..llama._config import LlamaConfig

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SAVE = "energy_attn_save"  # the key of the identity, in metadata and config.json


def checked(directory: Any) -> Path:
    """Returns the path of a folder; raises `TypeError` for what is no path."""
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"directory: wanted the path of a folder, got {received(directory)}")
    return Path(os.fsdecode(directory))


def inside(folder: Path, name: str) -> Path:
    """A file of the folder; `ValueError` for a name or a link that leads out of it."""
    root = folder.resolve()
    homes = [root]
    if root.parent.name == "snapshots":  # Hugging Face's cache: links to the blobs beside
        homes.append(root.parent.parent / "blobs")
    file = folder / name
    if not any(file.resolve().is_relative_to(home) for home in homes):
        raise ValueError(f"directory: wanted files inside {folder}, got {name!r}, which is not")
    return file


def unfinished(name: str, save: str) -> str:
    """How a file is named until it takes the place of the one of that name."""
    return f"{name}.{save}{UNFINISHED}"


def config(folder: Path) -> LlamaConfig:
    """What the `config.json` of the weights says; raises `ValueError` as `Llama.load`."""
    save = identity(folder)
    if save is not None:
        waiting = inside(folder, unfinished(CONFIG, save))
        if waiting.exists():
            return LlamaConfig.from_json(waiting)
    file = inside(folder, CONFIG)
    found = LlamaConfig.from_json(file)
    other = identity_of(json.loads(file.read_text(encoding="utf-8")))
    if None not in (save, other) and save != other:
        raise ValueError(
            f"{file}: wanted the one of the weights, whose {SAVE} is {save}, got {other}: "
            f"it is of another save; without {SAVE} it is taken for any weights"
        )
    return found


def identity(folder: Path) -> str | None:
    """The save that the weights of a folder are of; None where they do not say, or cannot."""
    try:
        if (whole := inside(folder, WHOLE)).exists():
            return identity_of(safetensors.header(whole).about)
        return index(folder)[1]
    except ValueError:
        return None


def identity_of(about: Mapping[str, Any]) -> str | None:
    """The save that is named in what a file says; None if there is none."""
    save = about.get(SAVE)
    return save if isinstance(save, str) and re.fullmatch(IDENTITY, save) else None


def index(folder: Path) -> tuple[dict[str, str], str | None]:
    """In which file each tensor is, and the identity of its save; raises `ValueError`."""
    file = inside(folder, INDEX)
    try:
        check_pulled(file)
        said = json.loads(file.read_text(encoding="utf-8"))
        where, about = said["weight_map"], said.get("metadata") or {}
        if not all(isinstance(name, str) for name in where.values()):
            raise ValueError("file names that are no strings")
        return dict(where), identity_of(about)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: wanted the weight_map of a checkpoint, got {error!r}") from error


def in_use(folder: Path) -> set[str]:
    """The files that a reader needs, but for `config.json`; raises `ValueError` as `index`."""
    save = identity(folder)
    waiting = set() if save is None else {unfinished(CONFIG, save)}
    if (folder / WHOLE).exists():
        return {WHOLE, *waiting}
    return {INDEX, *waiting, *index(folder)[0].values()} if (folder / INDEX).exists() else set()
