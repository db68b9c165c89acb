"""Atomic saves into a folder: files are written under new names, synced, then listed by an index."""

# A save that is killed before it replaces the index changes nothing; the next save removes files that are not in the
# index. A lock excludes other saves into the folder, as each would remove the files of the other. Readers take no lock,
# and start over if files are replaced.

import contextlib
import errno
import os
import platform
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")

UNFINISHED = ".unfinished"
IDENTITY = "[0-9a-f]{16}"  # of a save, in the names of its files

_TRIES = 20  # attempts of a reader; each ends before a save writes much
_POINTER = b"version https://git-lfs"
LOCK = ".energy_attn.lock"  # the file that a save locks and removes; the lock ends with its process
_NO_LOCK = errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP  # from file systems without locks
_NO_SYNC = errno.EINVAL, errno.ENOTSUP  # from file systems whose folders cannot be synced


@contextlib.contextmanager
def saving(folder: Path, ours: re.Pattern, named: Callable[[Path], set[str]]) -> Iterator[str]:
    """A context that saves into `folder`, and yields the identity of the save, equal on all processes.

    Before and after the block, process 0 removes files that match `ours` and are not in `named(folder)`, the files of
    the current index. If the block fails, it removes the files with the identity in their names. If `named` raises
    `ValueError`, no older file is removed. Raises `OSError` while another save into the folder is running.
    """
    drawn = np.frombuffer(secrets.token_bytes(8), np.uint8)
    if jax.process_count() > 1:
        drawn = np.asarray(multihost_utils.broadcast_one_to_all(drawn))
    identity, first = drawn.tobytes().hex(), jax.process_index() == 0
    with contextlib.ExitStack() as locks:
        with together(folder):
            if first:
                missing = [path for path in (folder, *folder.parents) if not path.exists()]
                folder.mkdir(parents=True, exist_ok=True)
                for path in missing:
                    sync(path.parent)
                with _naming(folder / LOCK):
                    locks.enter_context(_alone(folder))
                clean(folder, ours, named)
        failed = identity
        try:
            yield identity
            failed = ""
        finally:
            if first:
                clean(folder, ours, named, failed)


def steady(folder: Path, names: Sequence[str], read: Callable[[], T]) -> T:
    """Returns `read()`, repeated while a save replaces one of the files `names`."""
    for _ in range(_TRIES):
        old_state = _file_states(folder, names)
        try:
            result = read()
        except ValueError:
            if _file_states(folder, names) == old_state:
                raise
        else:
            if _file_states(folder, names) == old_state:
                return result
    raise ValueError(
        f"{folder}: wanted files that stay while they are looked at, got new ones {_TRIES} times: "
        "others save there again and again"
    )


def _file_states(folder: Path, names: Sequence[str]) -> list[tuple[int, ...] | None]:
    # the identity of each file, which changes when it is replaced; None if there is no file
    states = []
    for name in names:
        try:
            x = os.stat(folder / name)
        except OSError:
            states.append(None)
        else:
            states.append((x.st_dev, x.st_ino, x.st_size, x.st_mtime_ns))
    return states


@contextlib.contextmanager
def together(folder: Path) -> Iterator[None]:
    """A context that waits at its end for all processes; if the block of one fails, all raise `OSError`."""
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
    """Writes a new file, and syncs it to disk; an `OSError` names it."""
    with _naming(file), open(file, "xb") as stream:
        for piece in pieces:
            stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())


def replace(file: Path, place: Path) -> None:
    sync(place.parent)
    os.replace(file, place)
    sync(place.parent)


def remove(file: Path) -> None:
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
    """Adds a file's name to an error of the operating system without one, such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error


def check_file(file: Path) -> None:
    """Raises `ValueError` for a pipe, a folder or a pointer of Git LFS in place of a file."""
    if not stat.S_ISREG(os.stat(file).st_mode):  # opening a pipe would wait for its writer
        raise ValueError(f"{file}: wanted a file, got a folder, a pipe or a device")
    with open(file, "rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise ValueError(f"{file}: wanted the file itself, got a Git LFS pointer: git lfs pull")


def clean(
    folder: Path, ours: re.Pattern, named: Callable[[Path], set[str]], save: str = ""
) -> None:
    """Removes files of all saves, or of one save, that are not `named`; ignores files that it cannot remove."""
    try:
        listed = named(folder)
    except ValueError:
        if not save:
            return
        listed = set()  # an index that cannot be read is not of this save
    for file in list(folder.iterdir()) if folder.is_dir() else []:
        if ours.fullmatch(file.name) and save in file.name and file.name not in listed:
            with contextlib.suppress(OSError):
                remove(file)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A context that holds the lock of a folder, where the system has locks."""
    if os.name != "posix":
        yield
        return
    lock = _locked(folder / LOCK)
    try:
        yield
    finally:
        try:
            # while locked, so that waiting processes notice that it is gone
            with contextlib.suppress(OSError):
                remove(folder / LOCK)
        finally:
            os.close(lock)


def _locked(file: Path) -> int:
    while True:
        opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(file, opened)
            if _is_at(file, opened):  # not removed by its last holder in between
                os.ftruncate(opened, 0)
                os.write(opened, f"process {os.getpid()} on {platform.node()}".encode())
                return opened
        except BaseException:
            os.close(opened)
            raise
        os.close(opened)


def _is_at(file: Path, opened: int) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), os.stat(file))
    except FileNotFoundError:
        return False


def _lock(file: Path, opened: int) -> None:
    import fcntl  # Windows has none

    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(opened, 200).decode(errors="replace") or "another process"
        raise OSError(
            f"{file.parent}: wanted no other save into this folder at the same time, got one by "
            f"{holder}; nothing is saved. Processes of one job save as one: "
            "energy_attn.distributed.initialize() tells them that they are"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCK:
            raise
