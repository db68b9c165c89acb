"""The files of a cache in a folder: each process writes its own, and an index names them all."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.core
import numpy as np
from jaxtyping import Array

from energy_attn.kernels.internal import received

from ..runtime import _files, _safetensors

KEY = "energy_attn"  # of the metadata in a file's header

INDEX = "kv_cache.index.json"
_PART = re.compile(rf"\d{{5}}-of-\d{{5}}-{_files.IDENTITY}\.safetensors")
_OLD = re.compile(r"\d{5}-of-(\d{5})\.safetensors")  # of saves without an index
_OURS = re.compile(
    rf"({_PART.pattern}|{_OLD.pattern}(\.unfinished)?"
    rf"|{re.escape(INDEX)}\.{_files.IDENTITY}\.unfinished)"
)


def check_path(path: object) -> Path:
    """Returns a path; raises `TypeError` for anything else."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: wanted the path of a folder, got {received(path)}")
    return Path(os.fsdecode(path))


def write(path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> None:
    """Writes `arrays` into the folder `path`, one file per process, in place of an older save.

    Every block of an array is written once, by the process that holds its first copy. All processes
    call it, and when it returns all have written.

    Raises `TypeError` for traced arrays, and `OSError` where a process cannot write or the first one
    does not see its file; the folder then holds the older save.
    """
    pieces: dict[str, np.ndarray] = {}
    for name, x in arrays.items():
        if isinstance(x, jax.core.Tracer):
            raise TypeError(f"{name}: wanted an array that has been computed, got {received(x)}")
        for shard in x.addressable_shards:
            if shard.replica_id == 0:
                begins = (
                    part.indices(size)[0] for part, size in zip(shard.index, x.shape, strict=True)
                )
                label = f"{name}@{','.join(map(str, begins))}"
                pieces[label] = np.ascontiguousarray(shard.data)
    metadata = dict(metadata) | {"shapes": {name: x.shape for name, x in arrays.items()}}
    rank, processes = jax.process_index(), jax.process_count()
    with _files.saving(path, _OURS, named) as save:
        files = [f"{i:05d}-of-{processes:05d}-{save}.safetensors" for i in range(processes)]
        file_metadata = {KEY: json.dumps(metadata | {"save": save})}
        shapes = {label: (piece.shape, piece.dtype) for label, piece in pieces.items()}
        with _files.together(path):
            _safetensors.write(path / files[rank], file_metadata, shapes, pieces.values())
            _files.sync(path)
        with _files.together(path):
            if rank == 0:
                _write_index(path, files, save)


def _write_index(path: Path, files: list[str], save: str) -> None:
    """Writes the index, by which readers find these files."""
    for name in files:
        if not (path / name).is_file():
            raise OSError(f"{path}: wanted a folder that all processes see, got one without {name}")
    unfinished = path / f"{INDEX}.{save}{_files.UNFINISHED}"
    _files.write(unfinished, [json.dumps({"save": save, "files": files}).encode()])
    _files.replace(unfinished, path / INDEX)


def index(path: Path) -> tuple[list[str], str | None]:
    """The files of the cache in a folder, none if there is none, and the identity of its save.

    Raises `ValueError` for an index that cannot be read.
    """
    file = path / INDEX
    if not file.exists():
        names = sorted(os.listdir(path)) if path.is_dir() else []
        unindexed = [match for name in names if (match := _OLD.fullmatch(name))]
        if any(int(match[1]) != len(unindexed) for match in unindexed):
            raise ValueError(
                f"path: wanted a folder with all files of one KVCache.save, got {path} with "
                f"{len(unindexed)} of {int(unindexed[0][1])}"
            )
        return [match[0] for match in unindexed], None
    try:
        _files.check_file(file)
        match json.loads(file.read_bytes()):
            case {"save": str(save), "files": [str(), *_] as files} if all(
                isinstance(name, str) and _PART.fullmatch(name) and save in name for name in files
            ):
                return list(files), save
            case other:
                raise ValueError(received(other))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: wanted the index of a KVCache.save, got {error}") from error


def named(path: Path) -> set[str]:
    """The files in the index of a folder. Raises `ValueError` as `index`."""
    return set(index(path)[0])
