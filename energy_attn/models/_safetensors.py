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

from ..kernels._errors import received

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
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


def tensors(file: Path) -> dict[str, Tensor]:
    """What a file holds, its header checked against its size.

    Raises `ValueError` naming the file, and the tensor where it is one's, for a file that is not
    there, truncated or no safetensors file.
    """
    try:
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
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: wanted a safetensors file, got {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file}: wanted a safetensors file, got {received(header)} as header")
    header.pop("__metadata__", None)
    found, ends = {}, 0
    for name, entry in header.items():
        found[name], end = _tensor(file, name, entry, 8 + length)
        ends = max(ends, end)
    if ends > size:
        raise ValueError(
            f"{file}: wanted {ends} bytes for its tensors, got {size}: it is truncated"
        )
    return found


def _tensor(file: Path, name: str, entry: Any, begins: int) -> tuple[Tensor, int]:
    """A tensor as a header says it, and the byte at which it ends; raises as `tensors`."""
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
    `ValueError` where the file ends before the tensor.
    """
    found = {part: np.empty([end - start for start, end in part], dtype) for part in parts}
    stored, (_, *width) = tensor.dtype, tensor.shape
    assert stored is not None
    row = math.prod(width) * stored.itemsize
    step = max(1, _PIECE // max(row, 1))
    first, last = min(part[0][0] for part in found), max(part[0][1] for part in found)
    whole = np.empty((min(step, last - first), *width), stored)
    with tensor.file.open("rb", buffering=0) as stream:
        for start in range(first, last, step):
            end = min(start + step, last)
            stream.seek(tensor.begin + start * row)
            piece = whole[: end - start]
            _fill(stream, piece, tensor.file)
            for ((begins, ends), *columns), out in found.items():
                low, high = max(begins, start), min(ends, end)
                if low < high:
                    index = slice(low - start, high - start), *(slice(*part) for part in columns)
                    out[low - begins : high - begins] = piece[index]
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
    file: Path, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]], arrays: Iterator[np.ndarray]
) -> None:
    """Writes tensors of these shapes and dtypes, of which `arrays` gives one at a time.

    Raises `OSError` where the file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the numbers then begin where any dtype may
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
