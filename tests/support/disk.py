"""A disk that fails at its n-th operation, and one that another process changes before the n-th.

It fails for good, as where a process is killed, or once, as where it is full.
"""

import builtins
import contextlib
import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors

from energy_attn.distributed.internal import safetensors as library

_CHANGES = "replace", "rename", "unlink", "remove", "mkdir", "rmdir"


class Killed(BaseException):
    """The end of a process: the disk refuses all that a handler does afterwards."""


class Disk:
    """Counts what changes a file; the operation `fails_at`, from 1, is not done, half done if it is a write."""

    def __init__(self, fails_at: int, error: type[BaseException]):
        self.fails_at, self.error, self.log = fails_at, error, []

    @property
    def failed(self) -> bool:
        return len(self.log) >= self.fails_at

    def step(self, what: str) -> None:
        self.log.append(what)
        if len(self.log) == self.fails_at or (self.failed and self.error is Killed):
            raise Killed() if self.error is Killed else OSError(errno.ENOSPC, "no space left")

    def check_synced(self) -> None:
        """Checks that a file is on disk before it replaces another, and its name before the other is removed."""
        assert self.log.count("fsync") == self.log.count("open"), self.log
        for i in (i for i, what in enumerate(self.log) if what == "replace"):
            before, behind = self.log[:i][::-1], self.log[i:]
            written = before.index("write")
            assert "fsync" in before[:written] and "fsync folder" in before[:written]
            assert "unlink" not in behind[: behind.index("fsync folder")]


class _Stream:
    def __init__(self, stream, disk: Disk):
        self._stream, self._disk = stream, disk

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stream.close()

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, data):
        try:
            self._disk.step("write")
        except BaseException:
            self._stream.write(data[: len(data) // 2])
            raise
        return self._stream.write(data)


@contextlib.contextmanager
def failing(fails_at: int = 10**9, error: type[BaseException] = Killed) -> Iterator[Disk]:
    """Replaces Python's file operations by those of a `Disk`; without a number, of one that never fails."""
    disk, opened = Disk(fails_at, error), io.open

    def change(name, real):
        def changed(*args, **options):
            disk.step(name)
            return real(*args, **options)

        return changed

    def sync(descriptor):  # no power is cut here, and it is slow
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        disk.step("fsync folder" if is_folder else "fsync")

    def open_file(file, mode="r", *args, **options):
        if set(mode) & set("wxa+") and isinstance(file, (str, Path)):
            disk.step("open")
            return _Stream(opened(file, mode, *args, **options), disk)
        return opened(file, mode, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        for name in _CHANGES:
            patch.setattr(os, name, change(name, getattr(os, name)))
        patch.setattr(os, "fsync", sync)
        patch.setattr(builtins, "open", open_file)
        patch.setattr(io, "open", open_file)
        yield disk


class Meanwhile:
    """Counts the operations of one process before which another may do something."""

    def __init__(self, action: Callable[[], object], at: int | None):
        self.action, self.at, self.count, self.acts = action, at, 0, False

    @property
    def acted(self) -> bool:
        return self.at is not None and self.count >= self.at

    def step(self) -> None:
        if self.acts:
            return
        self.count += 1
        if self.at in (None, self.count):
            self.acts = True
            try:
                self.action()
            finally:
                self.acts = False


@contextlib.contextmanager
def meanwhile(action: Callable[[], object], at: int | None = None) -> Iterator[Meanwhile]:
    """Does `action` before the operation `at`, from 1, on a file, or before each."""
    other = Meanwhile(action, at)

    def also(real):
        def call(*args, **options):
            other.step()
            return real(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (builtins, "open"),
            (io, "open"),
            (os, "stat"),
            (os, "replace"),
            (os, "unlink"),
            (safetensors, "safe_open"),
            (library, "read"),
        ):
            patch.setattr(owner, name, also(getattr(owner, name)))
        yield other


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
