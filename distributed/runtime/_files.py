"""Files that appear in a folder all at once: written under new names, synced, then named by an index.

A save writes files whose names nobody reads yet, and last replaces the index, which names them. A
save that is killed before that has changed nothing, and one that is killed after it is complete; the
next save removes files that no index names. A lock keeps two saves into one folder apart: each would
remove what the other has just written. A reader takes none, and starts over if files are replaced.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from . import _lock

Found = TypeVar("Found")

UNFINISHED = ".unfinished"
IDENTITY = "[0-9a-f]{16}"  # of a save, in the names of its files

_TRIES = 20  # of a reader, each of which ends before a save writes much
_POINTER = b"version https://git-lfs"
_NO_SYNC = errno.EINVAL, errno.ENOTSUP  # from file systems whose folders cannot be synced


@contextlib.contextmanager
def saving(folder: Path, ours: re.Pattern, named: Callable[[Path], set[str]]) -> Iterator[str]:
    """The identity of a save, equal on all processes, whose files the block writes into `folder`.

    Before and after the block, process 0 removes files whose names match `ours` and are not in
    `named(folder)`, the files that a reader looks for; if the block fails, it removes those with the
    identity in their names. `named` raises `ValueError` where it cannot tell: then no older file is
    removed. Raises `OSError` while another save into the folder is not over.
    """
    drawn = np.frombuffer(secrets.token_bytes(8), np.uint8)
    if jax.process_count() > 1:
        drawn = np.asarray(multihost_utils.broadcast_one_to_all(drawn))
    identity, first = drawn.tobytes().hex(), jax.process_index() == 0
    with contextlib.ExitStack() as held:
        with together(folder):
            if first:
                _make(folder)
                with _naming(folder / _lock.NAME):
                    held.enter_context(_lock.alone(folder))
                clean(folder, ours, named)
        try:
            yield identity
        except BaseException:
            if first:
                clean(folder, ours, named, identity)
            raise
        if first:
            clean(folder, ours, named)


def steady(folder: Path, names: Sequence[str], read: Callable[[], Found]) -> Found:
    """Returns `read()`, repeated where a save replaced one of the files `names` meanwhile.

    Raises as `read`, and `ValueError` where files are replaced whenever it is tried.
    """
    for _ in range(_TRIES):
        before = _seen(folder, names)
        try:
            found = read()
        except ValueError:
            if _seen(folder, names) == before:
                raise
        else:
            if _seen(folder, names) == before:
                return found
    raise ValueError(
        f"{folder}: wanted files that stay while they are looked at, got new ones {_TRIES} times: "
        "others save there again and again"
    )


def _seen(folder: Path, names: Sequence[str]) -> list[tuple[int, ...] | None]:
    """The identity of each file, which changes when it is replaced; None if it does not exist."""
    seen = []
    for name in names:
        try:
            found = os.stat(folder / name)
        except OSError:
            seen.append(None)
        else:
            seen.append((found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))
    return seen


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
    """Writes a new file, which is on disk when this returns; an `OSError` names it."""
    with _naming(file), open(file, "xb") as stream:
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
            with _naming(folder):
                raise
    finally:
        os.close(opened)


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Names a file in an error of the system that names none, as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error


def check_file(file: Path) -> None:
    """Raises `ValueError` for a pipe, a folder or a pointer of Git LFS in place of a file.

    Raises `OSError` for a missing file.
    """
    if not stat.S_ISREG(os.stat(file).st_mode):  # opening a pipe would wait for its writer
        raise ValueError(f"{file}: wanted a file, got a folder, a pipe or a device")
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
