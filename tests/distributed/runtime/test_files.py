"""Files that replace others: what is on disk, and when; tests/distributed/cache tests saves that end anywhere."""

import errno
import os
import re
import subprocess
import sys

import pytest

from energy_attn.distributed.internal import files
from tests.support.disk import contents, failing


def test_what_is_written_is_on_disk(tmp_path):
    """A file that is named before its bytes are synced, or whose name is not: after a crash it would be empty."""
    with failing() as disk:
        files.write(tmp_path / "new", [b"a", b"bc"])
        files.replace(tmp_path / "new", tmp_path / "old")
    synced = ["fsync folder", "replace", "fsync folder"]
    assert disk.log == ["open", "write", "write", "fsync", *synced]
    disk.check_synced()
    assert contents(tmp_path) == {"old": b"abc"}
    with pytest.raises(FileExistsError):
        files.write(tmp_path / "old", [b"d"])
    files.remove(tmp_path / "new")  # is not there


def test_folders_that_cannot_be_synced(tmp_path, monkeypatch):
    """A file system that syncs no folders, for which nothing can be done; an error of the disk that is ignored."""

    def fails(number):
        def sync(_):
            raise OSError(number, "no")

        monkeypatch.setattr(os, "fsync", sync)

    fails(errno.EINVAL)
    files.sync(tmp_path)
    fails(errno.EIO)
    with pytest.raises(OSError, match=rf"no: '{tmp_path}'"):
        files.sync(tmp_path)


def test_a_full_disk_names_the_file(tmp_path):
    """An error of a write or a sync, which the system gives without a name."""
    for step in (2, 3):
        file = tmp_path / f"new{step}"
        with failing(step, OSError), pytest.raises(OSError, match=f"no space left: '{file}'"):
            files.write(file, [b"abc"])


# Another process that saves, as far as its lock goes.
HOLDER = """
import fcntl, sys, time
with open(sys.argv[1], "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("process 7 on there", file=file, end="", flush=True)
    print("held", flush=True)
    time.sleep(60)
"""


def save(folder):
    with files.saving(folder, re.compile("new-.*"), lambda _: set()) as identity:
        files.write(folder / f"new-{identity}", [b"abc"])
        assert f"process {os.getpid()} on " in (folder / files.LOCK).read_text()


@pytest.mark.skipif(sys.platform == "win32", reason="has no flock")
def test_a_killed_holder_locks_nobody_out(tmp_path):
    """A second save that goes ahead, an error that does not say whose the first is, a lock for ever, files left."""
    lock = tmp_path / files.LOCK
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, lock], stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout.readline() == b"held\n"
        said = rf"{tmp_path}: wanted no other save .* process 7 on there; .*initialize\(\)"
        with pytest.raises(OSError, match=said):
            save(tmp_path)
        holder.kill()
    assert lock.exists()
    save(tmp_path)
    assert contents(tmp_path) == {}


def test_folders_that_cannot_be_locked(tmp_path, monkeypatch):
    """A file system without locks, for which nothing can be done; an error of the disk that is ignored."""
    fcntl = pytest.importorskip("fcntl")
    for number in (errno.ENOLCK, errno.EIO):

        def fails(*_, number=number):
            raise OSError(number, "no")

        monkeypatch.setattr(fcntl, "flock", fails)
        if number == errno.ENOLCK:
            save(tmp_path)
        else:
            with pytest.raises(OSError, match=f"no: '{tmp_path / files.LOCK}'"):
                save(tmp_path)


def test_a_lock_that_goes_as_it_is_taken(tmp_path, monkeypatch):
    """The lock of a file that its last holder has just removed, which keeps nobody out."""
    fcntl = pytest.importorskip("fcntl")
    lock, real, told = tmp_path / files.LOCK, fcntl.flock, []

    def flock(opened, what):
        real(opened, what)
        if len(told) < 3:
            told.append(lock.unlink())

    monkeypatch.setattr(fcntl, "flock", flock)
    save(tmp_path)
    assert len(told) == 3 and contents(tmp_path) == {}
