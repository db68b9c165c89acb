"""The text to train on, which every machine has: the sources of Python's standard library, as bytes."""

import contextlib
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Tests, tables, generated files, and packages that are not the library's.
_SKIPPED = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "lib2to3", "pydoc_data"}
    | {"site-packages", "test", "tests"}
)
# Left out of the training: long, and part of every Python from 3.11 on.
HELD_OUT = ("argparse.py", "dataclasses.py", "tarfile.py", "typing.py")


class Text(NamedTuple):
    """Bytes to train on, and bytes that are held out."""

    train: np.ndarray
    held_out: np.ndarray
    files: int


def standard_library(root: str | Path | None = None) -> Text:
    """Reads the `.py` files of the standard library in the order of their paths, without unreadable ones.

    Args:
        root: its folder; None: found by `sysconfig`.

    Returns:
        uint8 arrays, with a zero byte between files.

    Raises:
        FileNotFoundError: no sources can be read, as where Python is one zip file.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _SKIPPED
        paths += [Path(folder, name) for name in names if _is_source(name)]
    paths.sort(key=lambda path: path.relative_to(root).parts)
    held_out = [root / name for name in HELD_OUT]
    train = _readable(path for path in paths if path not in held_out)
    held = _readable(path for path in held_out if path in paths)
    if not train or not held:
        raise FileNotFoundError(f"no sources of the standard library in {root}")
    return Text(_joined(train), _joined(held), len(train))


def _readable(paths: Iterable[Path]) -> list[bytes]:
    """The content of the files, without dangling links, pipes (which would block) and unreadable files."""
    contents = []
    for path in paths:
        with contextlib.suppress(OSError):
            if path.is_file():
                contents.append(path.read_bytes())
    return contents


def _joined(files: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"\0".join(files), np.uint8)


def _is_source(name: str) -> bool:
    return name.endswith(".py") and not name.startswith("_sysconfigdata")
