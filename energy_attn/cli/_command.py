"""Shared by the commands: arguments, devices, tables, errors, and the library's byte-level Llama."""

import argparse
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from ..models import Llama

MOST = 2**31 - 1  # of 32 bits, as JAX counts
_MOST_DEVICES = 4096  # simulated devices: each takes memory and threads
MODEL = Path(__file__).parent / "demo" / "model"  # the checkpoint of the byte-level Llama
# Modules that examples/byte_llama was not trained on: long, and part of every Python since 3.11.
HELD_OUT = ("argparse.py", "dataclasses.py", "tarfile.py", "typing.py")


def integer(text: str) -> int:
    return numbers(text, None, "an integer")[0]


def numbers(text: str, separator: str | None, expected: str) -> tuple[int, ...]:
    """Integers of 32 bits between separators; an error names the `expected` text."""
    parts = [text] if separator is None else text.split(separator)
    try:
        integers = tuple(map(int, parts))
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted {expected}, got {shown(text)}") from None
    if not all(-MOST <= x <= MOST for x in integers):
        raise argparse.ArgumentTypeError(
            f"wanted {expected}, from {-MOST} to {MOST}, got {shown(text)}"
        )
    return integers


def sizes(
    text: str, *, separator: str, expected: str, counts: Collection[int] = range(1, MOST)
) -> tuple[int, ...]:
    """Integers of at least 1, as many as one of `counts`."""
    integers = numbers(text.lower(), separator, expected)
    if len(integers) not in counts or min(integers) < 1:
        raise argparse.ArgumentTypeError(f"wanted {expected}, got {text!r}")
    return integers


def shown(text: str) -> str:
    return repr(text if len(text) < 60 else text[:57] + "...")


def count(text: str) -> int:
    """A number above 0, with K for 1024 and M for 1024²."""
    match = re.fullmatch(r"([1-9]\d*)([KM]?)", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"wanted a number above 0, as 32768, 32K or 1M, got {shown(text)}"
        )
    number = int(match[1][:20]) * 1024 ** ("", "K", "M").index(match[2])
    if number > MOST:
        raise argparse.ArgumentTypeError(
            f"wanted a number above 0 and at most {MOST}, got {shown(text)}"
        )
    return number


def simulate_devices(count: int = 8) -> None:
    """Asks for `count` CPU devices, unless the user has asked for a number, or there are too many.

    JAX reads the flag when it starts its CPU backend. Accelerators stay the default devices.
    """
    flag = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if count <= _MOST_DEVICES and flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={count}".strip()


def enough_devices(count: int) -> list[Any]:
    """The first `count` default devices, or simulated ones if there are fewer."""
    for devices in (jax.devices(), jax.devices("cpu")):
        if len(devices) >= count:
            return devices[:count]
    raise ValueError(f"wanted {count} devices, real or simulated, got {len(jax.devices())}")


def refuse(command: str, error: object) -> int:
    """Prints on standard error why a command cannot run, and returns its exit status."""
    print(f"energy_attn {command}: {error}", file=sys.stderr)
    return 2


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The lines of a table, with cells aligned to the left, or to the right in the columns `right`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(x.rjust(n) if i in right else x.ljust(n) for i, (x, n) in cells).rstrip()

    return [line(row) for row in rows]


def byte_llama() -> "Llama":
    from ..models import Llama  # not every command has a model

    return Llama.load(MODEL, dtype="float32", progress=False)


def held_out_text(root: str | Path | None = None) -> np.ndarray:
    """Returns the sources of the modules in `HELD_OUT` as uint8, with a zero byte between files."""
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
