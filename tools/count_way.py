#!/usr/bin/env python3
"""Count what a call enters on the way to its kernel, and what the library has twice.

    python tools/count_way.py            print the functions that each call enters, and the table
    python tools/count_way.py --write    write the table into CONTRIBUTING.md
    python tools/count_way.py --check    exit with status 1 if the table there is another one

A function counts if it is entered while a call of `ea.attention` and of its modules runs for the second time, with JAX
on a CPU: by then what JAX compiles is compiled. Functions of kernels do not count.
"""

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from budgets import ROOMS  # noqa: E402
from check_structure import exports, repeated_classes, sources  # noqa: E402

import energy_attn as ea  # noqa: E402
from energy_attn.kernels import Operands, Settings  # noqa: E402

PAGE = ROOT / "CONTRIBUTING.md"
TABLE = re.compile(r"(?<=<!-- tools/count_way.py -->\n).*?(?=<!-- end -->)", re.DOTALL)


class Function(NamedTuple):
    """A function of the library, by its file and its qualified name."""

    file: str
    name: str


def entered(call: Callable[[], object]) -> list[Function]:
    """The functions of the library that a call enters when it runs for the second time, in their order."""
    call()
    functions: dict[Function, None] = {}

    def profile(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT / "energy_attn"):
            functions[
                Function(str(path.relative_to(ROOT / "energy_attn")), frame.f_code.co_qualname)
            ] = None

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(functions)


def calls() -> dict[str, Callable[[], object]]:
    """The calls that are counted, by what users write."""
    x, tokens = jnp.ones((1, 4, 2, 8)), jnp.ones((4, 16))
    energy = ea.FreeEnergy()
    attend = ea.nn.MultiheadAttention(2, 16, key=jax.random.key(0))
    return {
        "ea.attention(q, k, v)": lambda: ea.attention(x, x, x),
        "ea.FreeEnergy().attention(q, k, v)": lambda: energy.attention(x, x, x),
        "ea.nn.MultiheadAttention(...)(x, x, x)": lambda: attend(tokens, tokens, tokens),
    }


def trees() -> dict[str, ast.Module]:
    """The syntax trees of the library's modules, by their paths."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for room in ROOMS
        for path in sources(ROOT, room)
    }


def readers_of_programs(modules: dict[str, ast.Module]) -> list[str]:
    """Modules that read the equations of a jaxpr."""
    return [
        name
        for name, tree in modules.items()
        if any(isinstance(x, ast.Attribute) and x.attr == "eqns" for x in ast.walk(tree))
    ]


def asks_by_name(modules: dict[str, ast.Module]) -> list[str]:
    """Comparisons of a method with a name in `distributed`, and `isinstance` of a canonical kernel anywhere."""
    found = []
    for name, tree in modules.items():
        for node in ast.walk(tree):
            text = ast.unparse(node) if isinstance(node, ast.Call | ast.Compare) else ""
            by_class = re.match(r"isinstance\(.*Canonical", text)
            by_name = name.startswith("distributed/cost") and re.match(r"method (==|!=|in) ", text)
            if by_class or by_name:
                found.append(f"{name}:{node.lineno} {text}")
    return found


def rows() -> dict[str, str]:
    """Rows of the table: what each counts, and its count."""
    ways = {name: entered(call) for name, call in calls().items()}
    for name, functions in ways.items():
        print(f"{name} enters:", *(f"    {x.file} {x.name}" for x in functions), sep="\n")
    modules = trees()
    readers, twice, asked = (
        readers_of_programs(modules),
        list(repeated_classes(ROOT)),
        asks_by_name(modules),
    )
    print("Modules that read jaxprs:", *readers)
    print("Class names with two meanings:", *twice)
    print("Classes and methods that are asked by name:", *asked, sep="\n    ")

    return {
        **{
            f"functions / files / folders that `{name}` enters": " / ".join(
                str(len(set(x)))
                for x in (found, (f.file for f in found), (Path(f.file).parent for f in found))
            )
            for name, found in ways.items()
        },
        "fields of `Operands` and `Settings`": str(len(Operands._fields) + len(Settings._fields)),
        "modules that read jaxprs": str(len(readers)),
        "class names with two meanings, besides the public `masks.Function` and `scores.Function`": str(
            len(twice)
        ),
        "classes and methods that are asked by name": str(len(asked)),
        "public names": str(len({name for _, name in exports(ROOT)})),
    }


def table() -> str:
    """The counts as a table of Markdown."""
    return "\n".join(
        ["", "| count | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows().items()), "", ""]
    )


def main() -> int:
    """Prints the counts, and writes them into the page or compares them with it if that is asked for."""
    text, page = table(), PAGE.read_text(encoding="utf-8")
    print(text)
    with_counts = TABLE.sub(lambda _: text, page)
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(with_counts, encoding="utf-8")
    if sys.argv[1:] == ["--check"] and with_counts != page:
        print(f"{PAGE.name} has other counts; run `python tools/count_way.py --write`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
