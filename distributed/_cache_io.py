"""Sharded arrays in safetensors files: each process writes what it holds, any mesh reads it back."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from energy_attn.kernels._errors import received

from ._cache_slots import Slots
from ._cache_write import Stored, sharding_of
from ._parallel import SequenceParallel

_NAME = re.compile(r"\d{5}-of-(\d{5})\.safetensors")
_KEY = "energy_attn"

# Where the block of an array begins on each axis, and the block.
Piece = tuple[tuple[int, ...], np.ndarray]


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "caches are kept in files by the library safetensors, which is not installed: "
            "pip install safetensors"
        ) from error
    return safetensors


def check_path(path: Any) -> Path:
    """Returns `path` as one; raises `TypeError` for what is no path."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: wanted the path of a folder, got {received(path)}")
    return Path(os.fsdecode(path))


def write(path: Path, arrays: Mapping[str, Array], about: Mapping[str, Any]) -> None:
    """Writes this process's part of `arrays` into the folder `path`, one file per process.

    Every block of an array is written once, by the process that holds its first copy.

    Raises `TypeError` for traced arrays, `ValueError` if the folder holds the files of another
    number of processes, and `ImportError` without safetensors.
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
    path.mkdir(parents=True, exist_ok=True)
    processes = jax.process_count()
    others = {count for count in _counts(path) if count != processes}
    if others:
        raise ValueError(
            f"path: wanted a folder without the files of another number of processes than "
            f"{processes}, got {path} with those of {min(others)}"
        )
    about = dict(about) | {"shapes": {name: x.shape for name, x in arrays.items()}}
    name = f"{jax.process_index():05d}-of-{processes:05d}.safetensors"
    unfinished = path / f"{name}.unfinished"
    _safetensors().numpy.save_file(pieces, unfinished, {_KEY: json.dumps(about)})
    unfinished.replace(path / name)  # a file is there whole or not at all


def _counts(path: Path) -> list[int]:
    return [int(found[1]) for file in path.iterdir() if (found := _NAME.fullmatch(file.name))]


class Saved:
    """What a folder written by `write` holds. Raises `ValueError` if that is not all of it.

    Attributes:
        about: what was said about the arrays.
        shapes: the shape of each array.
    """

    about: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    def __init__(self, path: Path) -> None:
        counts = _counts(path) if path.is_dir() else []
        if not counts or set(counts) != {len(counts)}:
            raise ValueError(
                f"path: wanted a folder with all files of one KVCache.save, got {path} with "
                f"{len(counts)} of {max(counts, default=1)}"
            )
        open_file = _safetensors().safe_open
        self._files = [
            open_file(path / f"{i:05d}-of-{len(counts):05d}.safetensors", "np")
            for i in range(len(counts))
        ]
        told = [(file.metadata() or {}).get(_KEY) for file in self._files]
        if told[0] is None or any(text != told[0] for text in told):
            raise ValueError(f"path: wanted files of one KVCache.save, got others in {path}")
        self.about = json.loads(told[0])
        self.shapes = {name: tuple(shape) for name, shape in self.about.pop("shapes").items()}

    def pieces(self, name: str) -> Iterator[Piece]:
        """The blocks that an array was saved in, read one at a time.

        Raises `ValueError` if they are not all of the array.
        """
        seen = 0
        for file in self._files:
            for label in file.keys():
                mine, begins = label.split("@")
                if mine == name:
                    piece = file.get_tensor(label)
                    seen += piece.size
                    yield tuple(int(i) for i in begins.split(",")), piece
        if seen != math.prod(self.shapes[name]):
            raise ValueError(
                f"path: wanted all {math.prod(self.shapes[name])} numbers of {name}, got {seen}"
            )

    def whole(self, name: str) -> np.ndarray:
        """An array put together, on this process's host; raises as `pieces`."""
        whole = None
        for begins, piece in self.pieces(name):
            if whole is None:
                whole = np.zeros(self.shapes[name], piece.dtype)
            whole[_block(begins, piece.shape)] = piece
        assert whole is not None
        return whole


def _block(begins: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(i, i + size) for i, size in zip(begins, shape, strict=True))


def restore(
    saved: Saved,
    old: Slots,
    new: Slots,
    starts: np.ndarray,
    lengths: np.ndarray,
    parallel: SequenceParallel | None,
) -> Stored:
    """The saved arrays `[B, S, K, ...]` with their tokens in other slots, each part on its device.

    Of each row the tokens from `starts` up to `lengths` are kept; slots without one are zero.
    Raises as `Saved.pieces` does.
    """

    def to(rows: slice, slots: slice) -> np.ndarray:
        tokens = old.held(np.arange(slots.start, slots.stop)[None], lengths[rows, None])
        return np.where(tokens < starts[rows, None], -1, new.slot(tokens))

    def read(name: str) -> Array | None:
        if name not in saved.shapes:
            return None
        rows, _, *rest = saved.shapes[name]
        shape = rows, new.capacity, *rest
        return _moved(saved.pieces(name), shape, sharding_of(parallel, len(shape)), to)

    return Stored(*map(read, Stored._fields))


def _moved(
    pieces: Iterator[Piece],
    shape: tuple[int, ...],
    sharding: NamedSharding | None,
    to: Callable[[slice, slice], np.ndarray],
) -> Array:
    parts = [tuple(slice(0, size) for size in shape)]
    if sharding is not None:
        parts = list(sharding.addressable_devices_indices_map(shape).values())
    bounds = {_slots_of(part, shape) for part in parts}
    found: dict[tuple[int, int], np.ndarray] = {}
    for begins, piece in pieces:
        rows, slots, *rest = _block(begins, piece.shape)
        new = to(rows, slots)
        for first, last in bounds:
            if (first, last) not in found:
                found[first, last] = np.zeros((shape[0], last - first, *shape[2:]), piece.dtype)
            row, slot = np.nonzero((new >= first) & (new < last))
            place = (rows.start + row, new[row, slot] - first, *rest)
            found[first, last][place] = piece[row, slot]
    if sharding is None:
        return jnp.asarray(found[0, shape[1]])

    def part(at: Any) -> np.ndarray:
        return found[_slots_of(at, shape)][at[0], :, *at[2:]]

    return jax.make_array_from_callback(shape, sharding, part)


def _slots_of(index: Any, shape: tuple[int, ...]) -> tuple[int, int]:
    first, last, _ = index[1].indices(shape[1])
    return first, last
