"""A cache on disk: the old one or the new one whenever a save ends, and no file that is believed unread.

The judge of what is loaded is what was saved, bit for bit.
"""

import functools
import json
import os
import re
import shutil
import threading
from types import SimpleNamespace

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings

from energy_attn.distributed import KVCache
from energy_attn.distributed.cache._files import write
from energy_attn.distributed.internal import files
from tests.support.caches import B, started, tokens
from tests.support.disk import Killed, contents, failing, meanwhile
from tests.support.meshes import mesh_of, parallel_of

INDEX = "kv_cache.index.json"


def bits(cache):
    arrays = cache._arrays()._asdict()
    return {name: np.asarray(x).tobytes() for name, x in arrays.items() if x is not None}


@functools.cache
def filled(seed):
    """A cache on one device that shares no number with one of another seed."""
    return started(*tokens(seed, 3), [1 + seed] * B, parallel=None, capacity=4)


class Processes:
    """Threads that take themselves for the processes of a job; one that dies takes the others with it."""

    def __init__(self, count, monkeypatch):
        self.count, self.here = count, threading.local()
        self.barrier, self.told = threading.Barrier(count, timeout=60), [None] * count
        monkeypatch.setattr(jax, "process_count", lambda: count)
        monkeypatch.setattr(jax, "process_index", lambda: self.here.index)
        utils = SimpleNamespace(
            broadcast_one_to_all=lambda x: self.gather(x)[0],
            process_allgather=lambda x, tiled: np.concatenate(self.gather(x)),
        )
        monkeypatch.setattr(files, "multihost_utils", utils)

    def gather(self, x):
        self.told[self.here.index] = x
        try:
            self.barrier.wait()
            told = list(self.told)
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise Killed from None
        return told

    def run(self, call):
        """What each raised, or None."""
        ends = [None] * self.count

        def body(index):
            self.here.index = index
            try:
                call(index)
            except BaseException as error:
                ends[index] = error
                if isinstance(error, Killed):
                    self.barrier.abort()

        threads = [threading.Thread(target=body, args=[i]) for i in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.barrier.reset()
        return ends


def part(x, index, count):
    """An array as the process `index` has it: with the shards of its own devices."""
    mine = [s for s in x.addressable_shards if s.device.id * count // 8 == index]
    return SimpleNamespace(shape=x.shape, addressable_shards=mine)


@pytest.mark.product
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("error", [Killed, OSError])
def test_a_save_that_ends_anywhere(count, error, tmp_path, monkeypatch, unchecked):
    """Half of a save loaded, or beside halves of another; files that a full disk or a killed save left for ever."""
    with jax.set_mesh(mesh_of("8")):
        pair = [started(*tokens(i, 2), [i, 1, 2], capacity=16) for i in (1, 2)]
    processes = Processes(count, monkeypatch)

    def save(cache, folder):
        about = {"slots": cache.slots, "window": None, "dtype": "float64", "stored": "float64"}
        arrays = cache._arrays()._asdict()

        def one(index):
            mine = {n: part(x, index, count) for n, x in arrays.items() if x is not None}
            write(folder, mine, about)

        return processes.run(one)

    first, folder = tmp_path / "first", tmp_path / "folder"
    old, new = (bits(cache) for cache in pair)
    assert save(pair[0], first) == [None] * count
    made, seen = set(contents(first)), []
    assert len(made) == count + 1
    for step in range(1, 100):
        shutil.copytree(first, folder)
        with failing(step, error) as disk:
            ends = save(pair[1], folder)
        if not disk.failed:
            break
        with jax.set_mesh(mesh_of("8")):
            found = bits(KVCache.load(folder, parallel=parallel_of("8")))
        assert found in (old, new)
        if None in ends:  # what failed could wait for the next save
            assert found == new and (error is Killed or ends == [None] * count)
        else:
            seen.append(found == new)
        if error is OSError and found == old:
            assert all(isinstance(end, OSError) for end in ends)
            assert contents(folder) == contents(first)
        # a second one killed adds nothing, and one that ends leaves its own files alone
        with failing(step):
            save(pair[1], folder)
        assert len(contents(folder)) <= 2 * len(made) + 1
        with failing():
            assert save(pair[1], folder) == [None] * count
        assert len(contents(folder)) == count + 1
        shutil.rmtree(folder)
    assert seen == sorted(seen) and {*seen} == {False, True}  # one step decides
    assert ends == [None] * count
    disk.check_synced()


def test_a_load_while_another_saves(tmp_path):
    """An error for a cache that is there; half of it."""
    old, new = filled(1), filled(2)
    for at in range(1, 100):
        folder = tmp_path / str(at)
        with failing():
            old.save(folder)
        with meanwhile(lambda folder=folder: new.save(folder), at) as other, failing():
            found = KVCache.load(folder)
        assert bits(found) in (bits(old), bits(new))
        if not other.acted:
            break
    assert other.count > 5 and bits(found) == bits(old)


def test_old_saves(tmp_path):
    """What safetensors' own library wrote before there was an index: read as it is, replaced by a newer save."""
    old, new = filled(1), filled(2)
    old.save(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    with safetensors.safe_open(file, "np") as opened:
        about = json.loads(opened.metadata()["energy_attn"])
    del about["save"]
    for name, folder in (
        ("00000-of-00001", tmp_path / "whole"),
        ("00001-of-00002", tmp_path / "half"),
    ):
        folder.mkdir()
        pieces, said = safetensors.numpy.load_file(file), {"energy_attn": json.dumps(about)}
        safetensors.numpy.save_file(pieces, folder / f"{name}.safetensors", said)
    assert bits(KVCache.load(tmp_path / "whole")) == bits(old)
    with pytest.raises(ValueError, match="path: wanted a folder with all files .* 1 of 2"):
        KVCache.load(tmp_path / "half")
    for folder in (tmp_path / "whole", tmp_path / "half"):
        new.save(folder)
        assert bits(KVCache.load(folder)) == bits(new)
        assert len(contents(folder)) == 2


def changed(text, change):
    """A file whose header says otherwise."""
    length = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + length])
    about = json.loads(header["__metadata__"]["energy_attn"])
    change(header, about)
    if isinstance(header["__metadata__"].get("energy_attn"), str):
        header["__metadata__"]["energy_attn"] = json.dumps(about)
    new = json.dumps(header).encode()
    return len(new).to_bytes(8, "little") + new + text[8 + length :]


def renamed(header, old, new):
    header[new] = header.pop(old)


KEY = "key@0,0,0,0"
CORRUPT = {
    "terabytes in what is said": lambda h, a: a.update(
        slots=[2**42, 2, 1],
        shapes={n: [s[0], 2**42, *s[2:]][: len(s)] for n, s in a["shapes"].items()},
    ),
    "rows by the billion": lambda h, a: a.update(
        shapes={n: [2**40, *s[1:]] for n, s in a["shapes"].items()}
    ),
    "terabytes in a header": lambda h, a: h[KEY].update(shape=[2**40, 4, 2, 3]),
    "blocks that are terabytes": lambda h, a: a.update(slots=[4, 2**45, 1]),
    "bytes of another's": lambda h, a: h[KEY].update(
        data_offsets=h["value@0,0,0,0"]["data_offsets"]
    ),
    "another type": lambda h, a: h[KEY].update(dtype="I32", shape=[3, 4, 2, 6]),
    "another array": lambda h, a: renamed(h, KEY, "keys@0,0,0,0"),
    "no place": lambda h, a: renamed(h, KEY, "key"),
    "a place of words": lambda h, a: renamed(h, KEY, "key@a,b,c,d"),
    "a place outside": lambda h, a: renamed(h, KEY, "key@0,4,0,0"),
    "a place below": lambda h, a: renamed(h, KEY, "key@0,-4,0,0"),
    "too few axes": lambda h, a: renamed(h, KEY, "key@0"),
    "no keys": lambda h, a: h.pop(KEY),
    "nothing said": lambda h, a: h.update(__metadata__={}),
    "numbers said": lambda h, a: h.update(__metadata__={"energy_attn": 7}),
    "no slots": lambda h, a: a.pop("slots"),
    "slots of text": lambda h, a: a.update(slots="444"),
    "four slots": lambda h, a: a.update(slots=[4, 2, 1, 1]),
    "negative slots": lambda h, a: a.update(slots=[-4, -2, 1]),
    "no dtype": lambda h, a: a.update(dtype="void"),
    "a dtype of digits": lambda h, a: a.update(dtype="9" * 5000),
    "stored otherwise": lambda h, a: a.update(stored="int8"),
    "a window as text": lambda h, a: a.update(window="wide"),
    "a window without room": lambda h, a: a.update(window=4),
    "shapes as a list": lambda h, a: a.update(shapes=[3, 4]),
    "a flat shape": lambda h, a: a["shapes"].update(key=[3]),
    "of another save": lambda h, a: a.update(save="0" * 16),
}


@pytest.fixture
def saved(tmp_path):
    filled(1).save(tmp_path)
    return next(tmp_path.glob("*.safetensors"))


def test_files_that_are_wrong(saved):
    """Any error but one that names the file; memory asked for by a number that nothing stands behind."""
    text = saved.read_bytes()
    for what, change in CORRUPT.items():
        saved.write_bytes(changed(text, change))
        try:
            KVCache.load(saved.parent)
        except ValueError as error:
            assert str(saved.parent) in str(error) and len(str(error)) < 1000, what
        else:
            raise AssertionError(what)
    saved.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(ValueError, match=rf"{saved}: .* Git LFS pointer: git lfs pull"):
        KVCache.load(saved.parent)
    saved.unlink()
    with pytest.raises(ValueError, match=rf"{saved}: wanted .*No such file"):
        KVCache.load(saved.parent)
    os.mkfifo(saved)
    with pytest.raises(ValueError, match=f"{saved}: wanted a file, got a folder, a pipe or"):
        KVCache.load(saved.parent)
    file = saved.parent / INDEX
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match=f"{file}: wanted the index .*{file}: wanted a file"):
        KVCache.load(saved.parent)
    file.unlink()
    for index in (
        b"[" * 10**5,
        b"{}",
        b"\xff",
        b'{"save": "0", "files": ["../a"]}',
        b'{"files": 1e999}',
    ):
        file.write_bytes(index)
        with pytest.raises(ValueError, match=re.escape(f"{file}: wanted the index")):
            KVCache.load(saved.parent)


def test_rows_that_cannot_be(saved):
    """Lengths that are no lengths: of these, tokens would be read where none is."""
    text = saved.read_bytes()
    length = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + length])
    begin = 8 + length + header["lengths@0"]["data_offsets"][0]
    for wrong in (-1, 6, 2**31 - 1):
        number = wrong.to_bytes(4, "little", signed=True)
        saved.write_bytes(text[:begin] + number + text[begin + 4 :])
        with pytest.raises(ValueError, match=f"{saved.parent}: wanted rows of 0 to 4 tokens"):
            KVCache.load(saved.parent)


@settings(max_examples=100)
@given(
    st.sampled_from(["part", "index"]),
    st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=3), st.integers(0, 9))
    ),
    st.floats(0, 2),
)
def test_files_of_any_bytes(tmp_path_factory, which, edits, end):
    """An error that is no ValueError with the folder's name in it, whatever becomes of a file's bytes."""
    folder = tmp_path_factory.mktemp("cache")
    with failing():
        filled(1).save(folder)
    file = next(folder.glob("*.safetensors")) if which == "part" else folder / INDEX
    text = file.read_bytes()
    for place, new, gone in edits:
        at = int(place**4 * len(text))  # most of them into the header
        text = text[:at] + new + text[at + gone :]
    file.write_bytes(text[: int(end * len(text))])
    try:
        KVCache.load(folder)
    except ValueError as error:
        assert str(folder) in str(error)


def test_64_bits(saved, user_settings):
    """A cache of float64 that is read as one of float32, and takes no token of either."""
    with pytest.raises(ValueError, match=rf"{saved}: .*64 bits on \(jax_enable_x64\), got float64"):
        KVCache.load(saved.parent)
