#!/usr/bin/env python3
"""Compare the lines of each folder with its budget in `tools/budgets.toml`.

    python tools/budgets.py            print each folder that is above its budget; the exit status is 1 if there is any
    python tools/budgets.py --lower    write today's numbers where they are below the budgets

`make check` fails above a budget. Raising one is a line in the commit that needs it, whose message says why.
"""

import os
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kernels", "distributed", "energy_attn")
WHOLE = ("tests", "benchmarks", "papers", "tools", "examples")  # one budget for all their folders
FILE = "tools/budgets.toml"


def sources(root: Path, folder: str) -> list[Path]:
    """Python files below `folder`, each once: linked folders are not entered."""
    walk = os.walk(root / folder)
    return sorted(Path(x, name) for x, _, names in walk for name in names if name.endswith(".py"))


def lines_of_folders(root: Path) -> Counter[str]:
    """Lines of Python in each folder of the rooms, and in each of the other folders as a whole."""
    lines = Counter[str]()
    for room in (*ROOMS, *WHOLE):
        for path in sources(root, room):
            folder = room if room in WHOLE else str(path.parent.relative_to(root))
            lines[folder] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def over_budget(root: Path) -> Iterator[str]:
    """Folders with more lines than their budget, without a budget, and budgets of folders that are not there."""
    budgets = tomllib.loads((root / FILE).read_text(encoding="utf-8"))
    lines = lines_of_folders(root)
    for folder in sorted(lines.keys() | budgets.keys()):
        if folder not in lines:
            yield f"{FILE}: {folder!r} has no Python files; remove its line"
        elif lines[folder] > budgets.get(folder, 0):
            yield f"{folder}: {lines[folder]} lines, its budget is {budgets.get(folder)} ({FILE})"


def lower(root: Path) -> None:
    """Writes today's numbers where they are below the budgets; removes folders that are gone, adds no new ones."""
    file = root / FILE
    lines, new_lines = lines_of_folders(root), []
    for line in file.read_text(encoding="utf-8").splitlines():
        name, _, number = line.partition(" = ")
        if not number:
            new_lines.append(line)
        elif folder := lines[name.strip('"')]:
            new_lines.append(f"{name} = {min(folder, int(number))}")
    file.write_text("\n".join(new_lines) + "\n", encoding="utf-8")


def report(findings: Iterator[str]) -> int:
    """Prints findings; returns the exit status."""
    lines = list(findings)
    print(*lines, sep="\n", end="\n" if lines else "")
    return int(bool(lines))


if __name__ == "__main__":
    if sys.argv[1:] == ["--lower"]:
        lower(ROOT)
    sys.exit(report(over_budget(ROOT)))
