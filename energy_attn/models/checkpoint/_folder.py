"""The folder of a checkpoint: the files that are read, and the save that they belong to.

`save` writes files under new names, then replaces the file of weights, or the index of several, and then
`config.json`. Until then the new `config.json` has a name with the identity of its save, which the weights contain as
well. Readers prefer it to the old one, so that a save that is killed between the two replacements is complete.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from energy_attn.distributed.internal import IDENTITY, UNFINISHED, check_file, safetensors
from energy_attn.kernels.internal import received

from ..decoder._config import AbstractModelConfig
from ..decoder._decoder import Family
from ._config import SAVE, family_of, naming, read_json

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# The checkpoint that comes with the library, and its name.
DEMO = Path(__file__).parents[2] / "cli" / "demo" / "model"


def checked(directory: object) -> Path:
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"directory: wanted the path of a folder, got {received(directory)}")
    return Path(os.fsdecode(directory))


def located(directory: object) -> Path:
    """The folder to read: "demo" is the library's own checkpoint where no file has that name; raises `TypeError`."""
    folder = checked(directory)
    return DEMO if folder == Path("demo") and not folder.exists() else folder


def inside(folder: Path, name: str) -> Path:
    """A file of the folder; raises `ValueError` for an invalid name, and for a path outside of it."""
    root = folder.resolve()
    roots = [root]
    if root.parent.name == "snapshots":  # Hugging Face's cache: links to the folder of blobs
        roots.append(root.parent.parent / "blobs")
    file = folder / name
    usable = "\0" not in name and max(map(len, file.parts)) < 256  # limits of file systems
    # `os.path.realpath`, as `Path.resolve` raises for a link to itself
    if not usable or not any(
        Path(os.path.realpath(file)).is_relative_to(allowed) for allowed in roots
    ):
        raise ValueError(
            f"directory: wanted files inside {folder}, got {received(name)}, which is not"
        )
    return file


def unfinished(name: str, save: str) -> str:
    """The name of a file until it replaces the one called `name`."""
    return f"{name}.{save}{UNFINISHED}"


def config(
    folder: Path, families: Mapping[str, Family], save: str | None
) -> tuple[AbstractModelConfig, Family]:
    """The configuration that belongs to the weights of a save, and its family; raises as `models.load`."""
    if save is not None:
        waiting = inside(folder, unfinished(CONFIG, save))
        if waiting.exists():
            return _read(read_json(waiting, CONFIG), waiting, families)
    file = inside(folder, CONFIG)
    entries = read_json(file, CONFIG)
    loaded = _read(entries, file, families)
    config_save = identity_of(entries)
    if None not in (save, config_save) and save != config_save:
        raise ValueError(
            f"{file}: wanted the one of the weights, whose {SAVE} is {save}, got {config_save}: "
            f"it is of another save; without {SAVE} it is taken for any weights"
        )
    return loaded


def _read(
    entries: Mapping[str, Any], file: Path, families: Mapping[str, Family]
) -> tuple[AbstractModelConfig, Family]:
    with naming(file):
        family = family_of(entries, families)
        return family.read(entries), family


def identity(folder: Path) -> str | None:
    """The save that the weights of a folder belong to; None where they do not name one."""
    try:
        if os.path.lexists(file := inside(folder, WHOLE)):
            return identity_of(safetensors.header(file).metadata)
        return index(folder)[1]
    except ValueError:
        return None


def identity_of(metadata: Mapping[str, Any]) -> str | None:
    save = metadata.get(SAVE)
    return save if isinstance(save, str) and re.fullmatch(IDENTITY, save) else None


def index(folder: Path) -> tuple[dict[str, str], str | None]:
    """The file of each tensor, and the save that the index belongs to; raises `ValueError`."""
    file = inside(folder, INDEX)
    try:
        check_file(file)
        entries = json.loads(file.read_text(encoding="utf-8"))
        files, metadata = entries["weight_map"], entries.get("metadata") or {}
        if not all(isinstance(name, str) for name in files.values()):
            raise ValueError("file names that are not strings")
        return dict(files), identity_of(metadata)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: wanted the weight_map of a checkpoint, got {error!r}") from error


def in_use(folder: Path) -> set[str]:
    """The files of weights that a reader needs; raises `ValueError` as `index`."""
    save = identity(folder)
    waiting = set() if save is None else {unfinished(CONFIG, save)}
    if os.path.lexists(folder / WHOLE):
        return {WHOLE, *waiting}
    return {INDEX, *waiting, *index(folder)[0].values()} if (folder / INDEX).exists() else set()
