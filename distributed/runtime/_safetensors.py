"""safetensors files: their header checked, and parts of tensors read or written a piece at a time.

A file is the length of its header (8 bytes, little-endian), the header (JSON), and the tensors'
numbers one behind the other. Nothing of it is run. Source: the format's description in the
documentation of safetensors.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from energy_attn.kernels.internal import received

from . import _files

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "I8": "int8",
}
_CODES = {jnp.dtype(name): code for code, name in _DTYPES.items()}
_HEADER = 100_000_000  # bytes, the most that the format allows
_PIECE = 1 << 22  # bytes that are read or written at a time

# The first and the last index, exclusive, of a part of a tensor on each axis.
Part = tuple[tuple[int, int], ...]


class Tensor(NamedTuple):
    """Where a tensor is: in which file, from which byte on. `dtype` is None for one that is not read."""

    file: Path
    begin: int
    shape: tuple[int, ...]
    dtype: np.dtype | None
    code: str


class Header(NamedTuple):
    """What a file says: of itself, and where its tensors are."""

    about: dict[str, str]
    tensors: dict[str, Tensor]


def header(file: Path) -> Header:
    """What a file holds, its header checked against its size.

    Raises `ValueError` naming the file, and the tensor where it is one's, for a file that is not
    there, truncated or no safetensors file.
    """
    try:
        _files.check_pulled(file)
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            fits = length <= min(size - 8, _HEADER)
            text = stream.read(length) if fits else b""
    except OSError as error:
        raise ValueError(f"{file}: wanted a safetensors file, got {error}") from error
    if not fits:
        raise ValueError(
            f"{file}: wanted a safetensors file, got a header of {length} bytes in one of {size}"
        )
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: wanted a safetensors file, got {error}") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{file}: wanted a safetensors file, got {received(entries)} as header")
    about = entries.pop("__metadata__", {})
    if not isinstance(about, dict) or not all(isinstance(text, str) for text in about.values()):
        raise ValueError(f"{file}: wanted texts as __metadata__, got {received(about)}")
    found, spans = {}, []
    for name, entry in entries.items():
        found[name], end = _tensor(file, name, entry, 8 + length)
        spans.append((found[name].begin, end, name))
    end = 0
    for begin, last, name in sorted(spans):
        if begin < end:  # else a small file could ask for any memory
            raise ValueError(f"{name}: wanted bytes of its own in {file}, got another tensor's")
        end = last
    if end > size:
        raise ValueError(f"{file}: wanted {end} bytes for its tensors, got {size}: it is truncated")
    return Header(about, found)


def _tensor(file: Path, name: str, entry: Any, begins: int) -> tuple[Tensor, int]:
    """A tensor as a header says it, and the byte at which it ends; raises as `header`."""
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(first), int(last)]}:
            pass
        case _:
            raise ValueError(
                f"{name}: wanted dtype, shape and data_offsets in {file}, got {received(entry)}"
            )
    if not all(type(size) is int and size >= 0 for size in shape) or not 0 <= first <= last:
        raise ValueError(f"{name}: wanted sizes and offsets in {file}, got {received(entry)}")
    dtype = jnp.dtype(_DTYPES[code]) if code in _DTYPES else None
    if dtype is not None and last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{name}: wanted {math.prod(shape) * dtype.itemsize} bytes in {file}, "
            f"got {last - first}"
        )
    return Tensor(file, begins + first, tuple(shape), dtype, code), begins + last


def read(tensor: Tensor, parts: Iterable[Part], dtype: np.dtype) -> dict[Part, np.ndarray]:
    """Parts of a tensor in `dtype`, from one pass over the rows that they need.

    Beside them no more than `_PIECE` bytes of the file are in memory, or one row. Raises
    `ValueError` where the file ends before the tensor, or cannot be read.
    """
    found = {part: np.empty([end - start for start, end in part], dtype) for part in parts}
    stored, (_, *width) = tensor.dtype, tensor.shape
    assert stored is not None
    row = math.prod(width) * stored.itemsize
    step = max(1, _PIECE // max(row, 1))
    first, last = min(part[0][0] for part in found), max(part[0][1] for part in found)
    whole = np.empty((min(step, last - first), *width), stored)
    try:
        with open(tensor.file, "rb", buffering=0) as stream:
            for start in range(first, last, step):
                end = min(start + step, last)
                stream.seek(tensor.begin + start * row)
                piece = whole[: end - start]
                _fill(stream, piece, tensor.file)
                for ((begins, ends), *columns), out in found.items():
                    low, high = max(begins, start), min(ends, end)
                    if low < high:
                        index = (
                            slice(low - start, high - start),
                            *(slice(*part) for part in columns),
                        )
                        out[low - begins : high - begins] = piece[index]
    except OSError as error:
        raise ValueError(f"{tensor.file}: wanted a safetensors file, got {error}") from error
    return found


def _fill(stream: Any, piece: np.ndarray, file: Path) -> None:
    """Reads until `piece` is full: one call of the system may give fewer bytes."""
    view, done = memoryview(piece.reshape(-1).view(np.uint8).data), 0
    while done < len(view):
        got = stream.readinto(view[done:])
        if not got:
            raise ValueError(f"{file}: wanted {len(view) - done} more bytes, got its end")
        done += got


def write(
    file: Path,
    about: Mapping[str, str],
    shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    arrays: Iterable[np.ndarray],
) -> None:
    """Writes a new file of tensors of these shapes and dtypes, of which `arrays` gives one at a time.

    Raises `OSError` where the file cannot be written.
    """
    entries: dict[str, Any] = {"__metadata__": dict(about)}
    end = 0
    for name, (shape, dtype) in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the numbers then begin where any dtype may

    def pieces() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for array in arrays:
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

    _files.write(file, pieces())
