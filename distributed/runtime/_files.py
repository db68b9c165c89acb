"""Files that appear in a folder all at once: written under new names, synced, then named by an index.

A save writes files whose names nobody reads yet, and last replaces the index, which names them. A
save that is killed before that has changed nothing, and one that is killed after it is complete; the
next save removes files that no index names.
"""

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

UNFINISHED = ".unfinished"
IDENTITY = "[0-9a-f]{16}"  # of a save, in the names of its files

_POINTER = b"version https://git-lfs"
_NO_SYNC = errno.EINVAL, errno.ENOTSUP  # from file systems whose folders cannot be synced


@contextlib.contextmanager
def saving(folder: Path, ours: re.Pattern, named: Callable[[Path], set[str]]) -> Iterator[str]:
    """The identity of a save, equal on all processes, whose files the block writes into `folder`.

    Before and after the block, process 0 removes files whose names match `ours` and are not in
    `named(folder)`, the files that a reader looks for; if the block fails, it removes those with the
    identity in their names. `named` raises `ValueError` where it cannot tell: then no older file is
    removed.
    """
    drawn = np.frombuffer(secrets.token_bytes(8), np.uint8)
    if jax.process_count() > 1:
        drawn = np.asarray(multihost_utils.broadcast_one_to_all(drawn))
    identity, first = drawn.tobytes().hex(), jax.process_index() == 0
    with together(folder):
        if first:
            _make(folder)
            clean(folder, ours, named)
    try:
        yield identity
    except BaseException:
        if first:
            clean(folder, ours, named, identity)
        raise
    if first:
        clean(folder, ours, named)


@contextlib.contextmanager
def together(folder: Path) -> Iterator[None]:
    """Waits at the end of the block for all processes; where one has failed, all raise `OSError`."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed = np.asarray([error is not None], np.int32)
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(failed, tiled=True)
    if error is not None:
        raise error
    if failed.any():
        raise OSError(f"{folder}: nothing is saved: process {failed.argmax()} failed, and says why")


def write(file: Path, pieces: Iterable[Any]) -> None:
    """Writes a new file, which is on disk when this returns."""
    with open(file, "xb") as stream:
        for piece in pieces:
            stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())


def replace(file: Path, place: Path) -> None:
    """Replaces a file by another of its folder, and syncs the folder."""
    sync(place.parent)
    os.replace(file, place)
    sync(place.parent)


def remove(file: Path) -> None:
    """Removes a file, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file)


def sync(folder: Path) -> None:
    """Syncs the names in a folder to disk, where its file system supports it."""
    if os.name != "posix":
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(opened)


def check_pulled(file: Path) -> None:
    """Raises `ValueError` for a pointer of Git LFS in place of a file, `OSError` for a missing file."""
    with open(file, "rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise ValueError(f"{file}: wanted the file itself, got a Git LFS pointer: git lfs pull")


def _make(folder: Path) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def clean(
    folder: Path, ours: re.Pattern, named: Callable[[Path], set[str]], save: str = ""
) -> None:
    """Removes files of all saves, or of one, that are not `named`; ignores files it cannot remove."""
    try:
        kept = named(folder)
    except ValueError:
        if not save:
            return
        kept = set()  # what cannot be read is not of this save
    for file in list(folder.iterdir()) if folder.is_dir() else []:
        if ours.fullmatch(file.name) and save in file.name and file.name not in kept:
            with contextlib.suppress(OSError):
                remove(file)
