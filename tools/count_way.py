#!/usr/bin/env python3
"""Count what a call enters on the way to its kernel.

    python tools/count_way.py            print the functions that each call enters, and the table
    python tools/count_way.py --write    write the table into CONTRIBUTING.md

A function counts if it is entered while a call of `ea.attention` and of its modules runs for the second time, with JAX
on a CPU: by then what JAX compiles is compiled. Functions of kernels do not count.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from budgets import ROOT

sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
from check_structure import exports

import energy_attn as ea
from energy_attn.kernels import Operands, Settings

PAGE = ROOT / "CONTRIBUTING.md"
TABLE = re.compile(r"(?<=<!-- tools/count_way.py -->\n).*?(?=<!-- end -->)", re.DOTALL)


def entered(call: Callable[[], object]) -> list[tuple[Path, str]]:
    """The functions of the library that a call enters when it runs for the second time: their files and names."""
    call()
    functions: dict[tuple[Path, str], None] = {}

    def profile(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT / "energy_attn"):
            functions[path.relative_to(ROOT / "energy_attn"), frame.f_code.co_qualname] = None

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(functions)


def ways() -> dict[str, list[tuple[Path, str]]]:
    """The functions that each of the counted calls enters, by what users write."""
    x, tokens = jnp.ones((1, 4, 2, 8)), jnp.ones((4, 16))
    energy = ea.FreeEnergy()
    attend = ea.nn.MultiheadAttention(2, 16, key=jax.random.key(0))
    return {
        "ea.attention(q, k, v)": entered(lambda: ea.attention(x, x, x)),
        "ea.FreeEnergy().attention(q, k, v)": entered(lambda: energy.attention(x, x, x)),
        "ea.nn.MultiheadAttention(...)(x, x, x)": entered(lambda: attend(tokens, tokens, tokens)),
    }


def table(functions: dict[str, list[tuple[Path, str]]]) -> str:
    """The counts as a table of Markdown."""
    rows = ["| count | |", "|---|---|"]
    for call, found in functions.items():
        files = {file for file, _ in found}
        counts = f"{len(found)} / {len(files)} / {len({file.parent for file in files})}"
        rows.append(f"| functions / files / folders that `{call}` enters | {counts} |")
    fields = len(Operands._fields) + len(Settings._fields)
    rows.append(f"| fields of `Operands` and `Settings` | {fields} |")
    rows.append(f"| public names | {len({name for _, name in exports(ROOT)})} |")
    return "\n".join(["", *rows, "", ""])


if __name__ == "__main__":
    functions = ways()
    for call, found in functions.items():
        print(f"{call} enters:", *(f"    {file} {name}" for file, name in found), sep="\n")
    print(text := table(functions))
    if sys.argv[1:] == ["--write"]:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(TABLE.sub(lambda _: text, page), encoding="utf-8")
