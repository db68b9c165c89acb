"""A text that every machine has: the sources of Python's standard library, as bytes."""

import contextlib
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Tests are not prose; the others are tables, machine-made, or other people's.
_SKIPPED = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "lib2to3", "pydoc_data"}
    | {"site-packages", "test", "tests"}
)
# Never trained on. Long, and part of every Python from 3.11 on.
_HELD_OUT = ("argparse.py", "dataclasses.py", "tarfile.py", "typing.py")


class Text(NamedTuple):
    """Bytes to train on, and bytes that the model never sees before it is asked to go on."""

    train: np.ndarray
    held_out: np.ndarray
    files: int


def standard_library(root: str | Path | None = None) -> Text:
    """Reads the standard library's `.py` files in the order of their paths; those that cannot be read are left out.

    Args:
        root: where it lies; found by `sysconfig` if None.

    Returns:
        uint8 arrays; a zero byte parts the files.

    Raises:
        FileNotFoundError: if there are no sources there that can be read, as where Python came as one zip file.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _SKIPPED
        paths += [Path(folder, name) for name in names if _is_source(name)]
    paths.sort(key=lambda path: path.relative_to(root).parts)
    held_out = [root / name for name in _HELD_OUT]
    train = _readable(path for path in paths if path not in held_out)
    held = _readable(path for path in held_out if path in paths)
    if not train or not held:
        raise FileNotFoundError(f"no sources of the standard library in {root}")
    return Text(_joined(train), _joined(held), len(train))


def _readable(paths: Iterable[Path]) -> list[bytes]:
    """What the files hold, without links that lead nowhere, pipes (which would be waited for) and files of others."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            if path.is_file():
                found.append(path.read_bytes())
    return found


def _joined(files: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"\0".join(files), np.uint8)


def _is_source(name: str) -> bool:
    return name.endswith(".py") and not name.startswith("_sysconfigdata")
