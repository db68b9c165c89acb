"""Files that take another's place: what is on disk, and when. That a save ends anywhere: tests/distributed/cache."""

import errno
import os

import pytest

from energy_attn.distributed.runtime import _files
from tests.support.disk import contents, failing


def test_what_is_written_is_on_disk(tmp_path):
    """A file that is named before its bytes are synced, or whose name is not: after a crash it would be empty."""
    with failing() as disk:
        _files.write(tmp_path / "new", [b"a", b"bc"])
        _files.replace(tmp_path / "new", tmp_path / "old")
    synced = ["fsync folder", "replace", "fsync folder"]
    assert disk.log == ["open", "write", "write", "fsync", *synced]
    disk.check_synced()
    assert contents(tmp_path) == {"old": b"abc"}
    with pytest.raises(FileExistsError):
        _files.write(tmp_path / "old", [b"d"])
    _files.remove(tmp_path / "new")  # is not there


def test_folders_that_cannot_be_synced(tmp_path, monkeypatch):
    """A file system that syncs no folders, for which nothing can be done; an error of the disk that is ignored."""

    def fails(number):
        def sync(_):
            raise OSError(number, "no")

        monkeypatch.setattr(os, "fsync", sync)

    fails(errno.EINVAL)
    _files.sync(tmp_path)
    fails(errno.EIO)
    with pytest.raises(OSError, match="no"):
        _files.sync(tmp_path)
