"""The files of a cache in a folder: each process writes one, and an index names them all."""

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from energy_attn.kernels.internal import checks

from ..methods._parallel import SequenceParallel
from ..runtime import _files, _safetensors
from ..runtime._safetensors import Tensor
from ._arguments import check_room
from ._layout import CacheArrays, Slots, sharding_of, slots_for

KEY = "energy_attn"  # of the metadata in a file's header

INDEX = "kv_cache.index.json"
_PART = re.compile(rf"\d{{5}}-of-\d{{5}}-{_files.IDENTITY}\.safetensors")
_OLD = re.compile(r"\d{5}-of-(\d{5})\.safetensors")  # of saves without an index
_OURS = re.compile(
    rf"({_PART.pattern}|{_OLD.pattern}(\.unfinished)?"
    rf"|{re.escape(INDEX)}\.{_files.IDENTITY}\.unfinished)"
)


def check_path(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: wanted the path of a folder, got {checks.received(path)}")
    return Path(os.fsdecode(path))


def write(path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> None:
    """Writes one file per process, in place of an older save, and waits until all processes have written.

    Raises `TypeError` for traced arrays, and `OSError` where a process cannot write or process 0
    does not see its file; the folder then holds the older save.
    """
    # every block of an array is written once, by the process that holds its first replica
    pieces: dict[str, np.ndarray] = {}
    for name, x in arrays.items():
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                f"{name}: wanted an array that has been computed, got {checks.received(x)}"
            )
        for shard in x.addressable_shards:
            if shard.replica_id == 0:
                begins = (
                    part.indices(size)[0] for part, size in zip(shard.index, x.shape, strict=True)
                )
                label = f"{name}@{','.join(map(str, begins))}"
                pieces[label] = np.ascontiguousarray(shard.data)
    metadata = dict(metadata) | {"shapes": {name: x.shape for name, x in arrays.items()}}
    rank, processes = jax.process_index(), jax.process_count()
    with _files.saving(path, _OURS, lambda path: set(index(path)[0])) as save:
        files = [f"{i:05d}-of-{processes:05d}-{save}.safetensors" for i in range(processes)]
        file_metadata = {KEY: json.dumps(metadata | {"save": save})}
        shapes = {label: (piece.shape, piece.dtype) for label, piece in pieces.items()}
        with _files.together(path):
            _safetensors.write(path / files[rank], file_metadata, shapes, pieces.values())
            _files.sync(path)
        # the index is replaced last: a save that is killed before leaves the older one
        with _files.together(path):
            if rank == 0:
                for name in files:
                    if not (path / name).is_file():
                        raise OSError(
                            f"{path}: wanted a folder that all processes see, got one without {name}"
                        )
                unfinished = path / f"{INDEX}.{save}{_files.UNFINISHED}"
                _files.write(unfinished, [json.dumps({"save": save, "files": files}).encode()])
                _files.replace(unfinished, path / INDEX)


def index(path: Path) -> tuple[list[str], str | None]:
    """The files of the cache in a folder, or none, and the identity of its save."""
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
                raise ValueError(checks.received(other))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: wanted the index of a KVCache.save, got {error}") from error


# The start of a block of an array on each axis, and the block.
Piece = tuple[tuple[int, ...], np.ndarray]
Block = tuple[tuple[int, ...], Tensor]


class Metadata(NamedTuple):
    """The metadata of a saved cache; `arrays` has the shape and dtype of each array."""

    save: str | None
    slots: Slots
    window: int | None
    dtype: np.dtype
    arrays: dict[str, tuple[tuple[int, ...], np.dtype]]


class SavedFolder:
    """A folder that `KVCache.save` wrote, all headers checked; raises `ValueError` naming a wrong file."""

    metadata: Metadata
    starts: np.ndarray
    lengths: np.ndarray

    def __init__(self, path: Path) -> None:
        names, save = index(path)
        if not names:
            raise ValueError(
                f"path: wanted a folder with all files of one KVCache.save, got {path} with 0 of 1"
            )
        # all headers are checked before any array is allocated
        files = [path / name for name in names]
        headers = [_safetensors.header(file) for file in files]
        texts = [header.metadata.get(KEY) for header in headers]
        self.metadata = _read_metadata(files[0], texts[0])
        for file, text in zip(files, texts, strict=True):
            if text != texts[0] or self.metadata.save != save:
                raise ValueError(
                    f"{file}: wanted a file of the same KVCache.save as the others, got one of another"
                )
        self._blocks = {name: [] for name in self.metadata.arrays}
        for label, tensor in itertools.chain(*(header.tensors.items() for header in headers)):
            name, begins = _checked_block(label, tensor, self.metadata)
            self._blocks[name].append((begins, tensor))
        for name, blocks in self._blocks.items():
            _check_cover(path, name, blocks, self.metadata.arrays[name][0])
        self.starts, self.lengths = map(self._whole, ("starts", "lengths"))
        stored = self.lengths - self.starts
        if min(self.starts.min(), stored.min()) < 0 or stored.max() > self.metadata.slots.capacity:
            raise ValueError(
                f"{path}: wanted rows of 0 to {self.metadata.slots.capacity} tokens, "
                f"got {stored.tolist()} from {self.starts.tolist()}"
            )

    def pieces(self, name: str) -> Iterator[Piece]:
        for begins, tensor in self._blocks[name]:
            all_of_tensor = tuple((0, size) for size in tensor.shape)
            assert tensor.dtype is not None
            yield begins, _safetensors.read(tensor, all_of_tensor, tensor.dtype)

    def _whole(self, name: str) -> np.ndarray:
        array = np.zeros(*self.metadata.arrays[name])
        for begins, piece in self.pieces(name):
            array[_block(begins, piece.shape)] = piece
        return array


def _read_metadata(file: Path, text: str | None) -> Metadata:
    try:
        fields = json.loads(text or "null")
        slots = Slots(*(checks.check_integer("slots", size, 1) for size in fields["slots"]))
        if slots.capacity % slots.stripe:
            raise ValueError(f"slots: wanted whole blocks on every device, got {slots}")
        dtype = checks.check_floating_dtype("dtype", fields["dtype"])
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:  # JAX would round it to 32 bits
            raise ValueError(f"dtype: wanted JAX's 64 bits on (jax_enable_x64), got {dtype}")
        stored = np.dtype(np.int8) if fields["stored"] == "int8" else dtype
        shapes = {
            name: tuple(checks.check_integer(name, size, 1) for size in shape)
            for name, shape in fields["shapes"].items()
        }
        rows, _, heads, _ = shapes["key"]
        arrays = {
            "key": ((rows, slots.capacity, heads, shapes["key"][3]), stored),
            "value": ((rows, slots.capacity, heads, shapes["value"][3]), stored),
            "starts": ((rows,), np.dtype(np.int32)),
            "lengths": ((rows,), np.dtype(np.int32)),
        }
        if stored == np.int8:
            scale = (rows, slots.capacity, heads), np.dtype(np.float32)
            arrays |= {"key_scale": scale, "value_scale": scale}
        if shapes != {name: shape for name, (shape, _) in arrays.items()}:
            raise ValueError(f"shapes: wanted those of a cache with {slots}, got {shapes}")
        return Metadata(
            fields.get("save"), slots, check_room(fields["window"], slots), dtype, arrays
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: wanted the metadata of KVCache.save, got {error}") from error


def _checked_block(label: str, tensor: Tensor, metadata: Metadata) -> tuple[str, tuple[int, ...]]:
    """The name of the array that a tensor is a block of, and the start of the block."""
    name, _, begins = label.partition("@")
    shape, dtype = metadata.arrays.get(name, ((), None))
    places = tuple(int(begin) for begin in begins.split(",") if re.fullmatch(r"\d{1,18}", begin))
    fits = (
        tensor.dtype is not None
        and tensor.dtype == dtype
        and len(places) == len(tensor.shape) == len(shape)
        and all(
            size >= 1 and begin % size == 0 and begin + size <= length
            for begin, size, length in zip(places, tensor.shape, shape, strict=True)
        )
    )
    if not fits:
        raise ValueError(
            f"{tensor.file}: wanted blocks of a cache's arrays, got {label!r} of "
            f"{tensor.code}{list(tensor.shape)}"
        )
    return name, places


def _check_cover(path: Path, name: str, blocks: Sequence[Block], shape: Sequence[int]) -> None:
    """Raises `ValueError` unless blocks of one shape, each at a multiple of it, cover an array."""
    sizes = {tensor.shape for _, tensor in blocks}
    places = {begins for begins, _ in blocks}
    covered = len(places) * math.prod(min(sizes, default=()))
    if len(sizes) != 1 or len(places) != len(blocks) or covered != math.prod(shape):
        raise ValueError(
            f"{path}: wanted all {math.prod(shape)} numbers of {name} once, got {len(blocks)} "
            f"blocks of shapes {sorted(sizes)}"
        )


def _block(begins: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(i, i + size) for i, size in zip(begins, shape, strict=True))


def reload(
    path: Path, parallel: SequenceParallel | None, capacity: int | None, block_size: int | None
) -> tuple[CacheArrays, Slots, int | None, np.dtype]:
    """Reads a saved cache onto the mesh in force: its arrays, slots, window and dtype."""
    saved = _files.steady(path, [INDEX], lambda: SavedFolder(path))
    starts, lengths, old = saved.starts, saved.lengths, saved.metadata.slots
    capacity = checks.check_integer("capacity", old.capacity if capacity is None else capacity, 1)
    block = checks.check_integer("block_size", old.block if block_size is None else block_size, 1)
    rows, _, heads, *_ = saved.metadata.arrays["key"][0]
    new = slots_for(capacity, block, parallel, rows, heads)
    window = check_room(saved.metadata.window, new)
    if window is not None:  # a smaller ring buffer keeps the newest tokens
        starts = np.maximum(starts, lengths - new.capacity)
    needed = int((lengths - starts).max())
    if needed > new.capacity:
        raise ValueError(
            f"capacity: wanted at least the {needed} tokens that a row holds, got {new.capacity}"
        )

    # the new slot of the token in each saved slot; -1 for a slot without a token
    def new_slots(rows: slice, slots: slice) -> np.ndarray:
        tokens = old.held(np.arange(slots.start, slots.stop)[None], lengths[rows, None])
        return np.where(tokens < starts[rows, None], -1, new.slot(tokens))

    def read(name: str) -> Array | None:
        if name not in saved.metadata.arrays:
            return None
        rows, _, *trailing = saved.metadata.arrays[name][0]
        shape = rows, new.capacity, *trailing
        sharding = sharding_of(parallel, len(shape))
        return _in_new_slots(saved.pieces(name), shape, sharding, new_slots)

    stored = map(read, CacheArrays._fields[:4])
    placed = (jax.device_put(x, sharding_of(parallel, 1)) for x in (starts, lengths))
    return CacheArrays(*stored, *placed), new, window, saved.metadata.dtype


def _in_new_slots(
    pieces: Iterator[Piece],
    shape: tuple[int, ...],
    sharding: NamedSharding | None,
    new_slots: Callable[[slice, slice], np.ndarray],
) -> Array:
    # one buffer for each range of slots on this process's devices, filled from one saved block after the other
    parts = [tuple(slice(0, size) for size in shape)]
    if sharding is not None:
        parts = list(sharding.addressable_devices_indices_map(shape).values())
    bounds = {_slots_of(part, shape) for part in parts}
    buffers: dict[tuple[int, int], np.ndarray] = {}
    for begins, piece in pieces:
        rows, slots, *rest = _block(begins, piece.shape)
        new = new_slots(rows, slots)
        for first, last in bounds:
            if (first, last) not in buffers:
                buffers[first, last] = np.zeros((shape[0], last - first, *shape[2:]), piece.dtype)
            row, slot = np.nonzero((new >= first) & (new < last))
            index = (rows.start + row, new[row, slot] - first, *rest)
            buffers[first, last][index] = piece[row, slot]
    if sharding is None:
        return jnp.asarray(buffers[0, shape[1]])

    def part(index: Any) -> np.ndarray:
        return buffers[_slots_of(index, shape)][index[0], :, *index[2:]]

    return jax.make_array_from_callback(shape, sharding, part)


def _slots_of(index: Any, shape: tuple[int, ...]) -> tuple[int, int]:
    first, last, _ = index[1].indices(shape[1])
    return first, last
