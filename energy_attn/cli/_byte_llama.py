"""The byte-level Llama that comes with the library, and text that it was not trained on."""

import sysconfig
from pathlib import Path

import numpy as np

from ..models import Llama
from ..models.checkpoint._config import DEMO as FOLDER

# Modules that examples/byte_llama leaves out of the training: long, and part of every Python from 3.11 on.
HELD_OUT = ("argparse.py", "dataclasses.py", "tarfile.py", "typing.py")


def byte_llama() -> Llama:
    return Llama.load(FOLDER, dtype="float32", progress=False)


def held_out_text(root: str | Path | None = None) -> np.ndarray:
    """The sources of the modules in `HELD_OUT`, as uint8, with a zero byte between files."""
    root = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    sources = []
    for path in (root / name for name in HELD_OUT):
        try:
            # a pipe would block
            sources += [path.read_bytes()] if path.is_file() else []
        except OSError:
            continue
    if not sources:
        raise FileNotFoundError(f"no sources of the standard library in {root}")
    return np.frombuffer(b"\0".join(sources), np.uint8)
