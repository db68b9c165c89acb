"""safetensors files: read by their own library, a part of a tensor at a time, and written by us.

`safe_open(file, "numpy").get_slice(name)` maps the file and copies the slice that is asked for. For
a matrix of 512 MiB in float32, or 256 in bfloat16, cut over eight devices by rows or by columns, it
takes no other memory of the process than the parts themselves, in a third to three times the time of
reads into buffers (safetensors 0.8 on Linux). The pages of the file that it maps are the system's to
take back.

The library writes a file from all of its tensors at once: 256 MiB for four of 64, where one at a
time is enough. So `write` is our own, and brings what it wrote to the disk.

A file is the length of its header (8 bytes, little-endian), the header (JSON), and the tensors'
numbers one behind the other. Source: the format's description in the documentation of safetensors.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp  # with ml_dtypes, by which NumPy knows bfloat16
import numpy as np

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
_PIECE = 1 << 22  # bytes that are converted at a time

# The first and the last index, exclusive, of a part of a tensor on each axis.
Part = tuple[tuple[int, int], ...]


class Tensor(NamedTuple):
    """A tensor of a file. `dtype` is None for one that cannot be read.

    The file stays open as long as one of its tensors is there, whatever takes its place in the folder.
    """

    file: Path
    stored: Any
    shape: tuple[int, ...]
    dtype: np.dtype | None
    code: str


class Header(NamedTuple):
    """The metadata of a file, and its tensors."""

    about: dict[str, str]
    tensors: dict[str, Tensor]


def header(file: Path) -> Header:
    """The header of a file, checked against its size.

    Raises `ValueError` naming the file where it is not there, truncated or no safetensors file.
    """
    from safetensors import SafetensorError, safe_open  # late: most programs open no file

    try:
        _files.check_file(file)
        with safe_open(file, "numpy") as opened:
            found = {}
            for name in opened.keys():
                stored = opened.get_slice(name)
                code, shape = stored.get_dtype(), tuple(stored.get_shape())
                dtype = jnp.dtype(_DTYPES[code]) if code in _DTYPES else None
                found[name] = Tensor(file, stored, shape, dtype, code)
            return Header(opened.metadata() or {}, found)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: wanted a safetensors file, got {error}") from error


def read(tensor: Tensor, parts: Iterable[Part], dtype: np.dtype) -> dict[Part, np.ndarray]:
    """Parts of a tensor in `dtype`.

    Beside them no more than `_PIECE` bytes of the file are in memory, or one row, and the pages that
    are mapped.
    """
    return {part: _read(tensor, part, dtype) for part in parts}


def _read(tensor: Tensor, part: Part, dtype: np.dtype) -> np.ndarray:
    index = tuple(slice(*bounds) for bounds in part)
    if any(start == end for start, end in part):  # the library cuts out no empty parts
        return np.empty([end - start for start, end in part], dtype)
    assert tensor.dtype is not None
    if dtype == tensor.dtype or not part:
        return tensor.stored[index].astype(dtype, copy=False)
    (first, last), *width = part
    found = np.empty([end - start for start, end in part], dtype)
    row = math.prod(end - start for start, end in width) * tensor.dtype.itemsize
    step = max(1, _PIECE // row)
    for start in range(first, last, step):
        end = min(start + step, last)
        found[start - first : end - first] = tensor.stored[(slice(start, end), *index[1:])]
    return found


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
