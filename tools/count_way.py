#!/usr/bin/env python3
"""Count the functions between a user's call and its kernel, the lines of each folder, and the public names.

    python tools/count_way.py

A stop is a function of the library on the stack when the kernel is called; a type is a class of the library among
the arguments of these functions.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from check_structure import exports  # noqa: E402

import energy_attn as ea  # noqa: E402
from energy_attn.kernels import AbstractJAXKernel, AttentionState, KernelCall  # noqa: E402

FOLDERS = "kernels distributed energy_attn papers benchmarks tools examples tests".split()


class Stop(AbstractJAXKernel):
    """A kernel that keeps the functions by which it was called."""

    name = "stop"
    frames: tuple[FrameType, ...] = ()

    def forward(self, call: KernelCall) -> AttentionState:
        """A state of zeros."""
        type(self).frames = type(self).frames or tuple(ours(sys._getframe(1)))
        query, value = call.operands.query, call.operands.value
        out = jnp.zeros((*query.shape[:-1], value.shape[-1]), value.dtype)
        return AttentionState(out, jnp.zeros(query.shape[:-1], jnp.float32))


def ours(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the library's functions, from the innermost out."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if (
            path.is_relative_to(ROOT)
            and "energy_attn" in path.parts + ROOT.parts
            and path.parent != ROOT / "tools"
        ):
            yield frame
        frame = frame.f_back


def types(x: Any) -> Iterator[str]:
    """The classes of the library in an argument, one level deep."""
    for value in (x, *(x if isinstance(x, tuple) else ())):
        if type(value).__module__.startswith("energy_attn"):
            yield type(value).__name__


def main() -> None:
    """Prints the three counts."""
    query = jnp.ones((1, 4, 2, 8))
    jax.eval_shape(lambda q: ea.attention(q, q, q, is_causal=False, implementation=Stop()), query)
    frames = Stop.frames[::-1]
    print(f"{len(frames)} stops of `query` from ea.attention to a kernel:")
    for frame in frames:
        place = Path(frame.f_code.co_filename).relative_to(ROOT)
        print(f"    {place}:{frame.f_code.co_firstlineno} {frame.f_code.co_qualname}")
    type_names = sorted({name for f in frames for x in f.f_locals.values() for name in types(x)})
    print(f"{len(type_names)} types on it: {', '.join(type_names)}")
    lines = {
        folder: sum(
            len((Path(place) / name).read_text(encoding="utf-8").splitlines())
            for place, _, names in os.walk(ROOT / folder)  # without the links to other folders
            for name in names
            if name.endswith(".py")
        )
        for folder in FOLDERS
    }
    print(f"{sum(lines.values())} lines of Python:", *(f"{k} {v}" for k, v in lines.items()))
    names = sorted({name for _, name in exports(ROOT)})
    print(f"{len(names)} public names")


if __name__ == "__main__":
    main()
