"""The lock of a folder into which one process saves at a time.

It is a lock of the operating system on a file, which is removed afterwards; it ends with its process.
"""

import contextlib
import errno
import os
import platform
from collections.abc import Iterator
from pathlib import Path

NAME = ".energy_attn.lock"
_NO_LOCK = errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP  # from file systems without locks


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder; does nothing where the system has no locks.

    Raises `OSError`, with the name of the holder, if it is held.
    """
    if os.name != "posix":
        yield
        return
    file = folder / NAME
    lock = _locked(file)
    try:
        yield
    finally:
        try:
            with contextlib.suppress(OSError):
                os.unlink(file)  # while locked, so that waiting processes notice that it is gone
        finally:
            os.close(lock)


def _locked(file: Path) -> int:
    while True:
        opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(file, opened)
            if _is_at(file, opened):  # and not removed by its last holder in between
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
