"""Reads slices of tensors with the library safetensors, and writes files one tensor at a time."""

# `safe_open(file, "numpy").get_slice(name)` maps the file and copies only the requested slice. The library writes a
# file from all of its tensors at once; `write` needs memory for one, and syncs the file to disk.
# A file is the length of its header (8 bytes, little-endian), the header (JSON), and the numbers of the tensors in
# order (documentation of safetensors, "Format").

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

# the first and the last index, exclusive, along each axis of a tensor
Part = tuple[tuple[int, int], ...]


class Tensor(NamedTuple):
    """A tensor of a file, which keeps the file open."""

    file: Path
    stored: Any
    shape: tuple[int, ...]
    dtype: np.dtype | None  # None if this module cannot read it
    code: str


class Header(NamedTuple):
    metadata: dict[str, str]
    tensors: dict[str, Tensor]


def header(file: Path) -> Header:
    """The header of a file, checked against its size."""
    from safetensors import SafetensorError, safe_open  # late: most programs open no file

    try:
        _files.check_file(file)
        with safe_open(file, "numpy") as opened:
            tensors = {}
            for name in opened.keys():
                stored = opened.get_slice(name)
                code, shape = stored.get_dtype(), tuple(stored.get_shape())
                dtype = jnp.dtype(_DTYPES[code]) if code in _DTYPES else None
                tensors[name] = Tensor(file, stored, shape, dtype, code)
            return Header(opened.metadata() or {}, tensors)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: wanted a safetensors file, got {error}") from error


def read(tensor: Tensor, part: Part, dtype: np.dtype) -> np.ndarray:
    """A part of a tensor in `dtype`; uses further memory of at most `_PIECE` bytes or one row."""
    shape = [end - start for start, end in part]
    if 0 in shape:  # the library has no empty slices
        return np.empty(shape, dtype)
    assert tensor.dtype is not None
    if dtype == tensor.dtype or not part:
        return tensor.stored[tuple(slice(*x) for x in part)].astype(dtype, copy=False)
    out, first = np.empty(shape, dtype), part[0][0]
    for rows, *others in _pieces(part, tensor.dtype):
        out[rows.start - first : rows.stop - first] = tensor.stored[(rows, *others)]
    return out


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape and numbers; compares `_PIECE` bytes or one row at a time."""
    if a.shape != b.shape or not a.shape or a.dtype is None or b.dtype is None:
        return False
    dtype = a.dtype if a.dtype == b.dtype else np.dtype(np.float64)
    whole = tuple((0, size) for size in a.shape)
    return 0 in a.shape or all(
        np.array_equal(*(x.stored[index].astype(dtype, copy=False) for x in (a, b)))
        for index in _pieces(whole, dtype)
    )


def _pieces(part: Part, dtype: np.dtype) -> Iterator[tuple[slice, ...]]:
    (first, last), *width = part
    step = max(1, _PIECE // (math.prod(end - start for start, end in width) * dtype.itemsize))
    for start in range(first, last, step):
        yield slice(start, min(start + step, last)), *(slice(*x) for x in width)


def write(
    file: Path,
    metadata: Mapping[str, str],
    shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    arrays: Iterable[np.ndarray],
) -> None:
    """Writes a new file of tensors of these shapes and dtypes; `arrays` yields them one at a time."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (shape, dtype) in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # aligns the numbers for any dtype

    def pieces() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for array in arrays:
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

    _files.write(file, pieces())
