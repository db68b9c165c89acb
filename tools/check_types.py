#!/usr/bin/env python3
"""Print each violation of the rules for types; the exit status is 1 if there is any.

The rules:

- Of the parameters of functions that have an annotation, at most `MOST` of all are annotated `Any`, in each room.
- Pyright finds every mistake in `tests/typing/mistakes.py`, each on a line marked `# mistake`, and nothing else there.

`tests/repository/test_structure.py` runs the same functions, but not pyright.
"""

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from check_structure import ROOMS, sources

MOST = 0.05
MISTAKES = "tests/typing/mistakes.py"
MARK = "# mistake"


def says_nothing(annotation: ast.expr) -> bool:
    """Whether an annotation is `Any`, by itself or in a union, under any name, quoted or not.

    `list[Any]`, `dict[str, Any]` and `Callable[..., Any]` do not count.
    """
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.BinOp):
        return says_nothing(annotation.left) or says_nothing(annotation.right)
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith("Optional"):
        return says_nothing(annotation.slice)
    return ast.unparse(annotation) in ("Any", "typing.Any")


def annotated(tree: ast.AST) -> Iterator[tuple[ast.arg, str]]:
    """The parameters that have an annotation, `*args` and `**kwargs` too, and the names of their functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            a = node.args
            for x in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg):
                if x is not None and x.annotation is not None:
                    yield x, node.name


def any_parameters(root: Path, room: str) -> tuple[int, list[str]]:
    """How many parameters of a room are annotated, and those that are annotated `Any`: `file:line: function(name)`."""
    total, untyped = 0, []
    for path in sources(root, room):
        for x, function in annotated(ast.parse(path.read_text(encoding="utf-8"))):
            total += 1
            if says_nothing(x.annotation):
                untyped.append(f"{path.relative_to(root)}:{x.lineno}: {function}({x.arg})")
    return total, untyped


def too_many_any(root: Path) -> Iterator[str]:
    """Rooms in which more than `MOST` of the annotated parameters are `Any`, with these parameters."""
    for room in ROOMS:
        total, untyped = any_parameters(root, room)
        if len(untyped) > MOST * total:
            yield f"{room}: {len(untyped)} of {total} annotated parameters are `Any`, more than {MOST:.0%}"
            yield from untyped


def misjudged(source: str, report: str) -> Iterator[str]:
    """The marked lines on which pyright found no error, and the others on which it did."""
    lines = enumerate(source.splitlines(), 1)
    marked = {number for number, line in lines if line.rstrip().endswith(MARK)}
    errors = {
        x["range"]["start"]["line"] + 1: x["message"].splitlines()[0]
        for x in json.loads(report)["generalDiagnostics"]
        if x["severity"] == "error"
    }
    if not marked:
        yield f"{MISTAKES}: marks no mistake"
    for number in sorted(marked - set(errors)):
        yield f"{MISTAKES}:{number}: pyright overlooks this mistake"
    for number in sorted(set(errors) - marked):
        yield f"{MISTAKES}:{number}: {errors[number]}"


def pyright(root: Path, python: str) -> str:
    """Runs the pyright of this environment on the planted mistakes; returns its output as JSON."""
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--project",
        str(root / MISTAKES).rpartition("/")[0],
    ]
    command += ["--pythonpath", python, "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:  # 1: it found errors
        raise RuntimeError(f"pyright failed with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    """Print every finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pythonpath", default=sys.executable, help="the Python that has jax")
    python = parser.parse_args().pythonpath
    root = Path(__file__).resolve().parents[1]
    source = (root / MISTAKES).read_text(encoding="utf-8")
    findings = [*too_many_any(root), *misjudged(source, pyright(root, python))]
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
