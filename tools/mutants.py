#!/usr/bin/env python3
"""Plant faults, one at a time, and find the test of their folder that fails: `make mutants`.

    python tools/mutants.py [--jobs N] [NAME ...]

The faults stand in tests/mutants/*.toml: a name, the file, the text that is there (`old`, once) and what replaces it
(`new`), the folder of tests that guards it, and the test that is known to be red (`killed_by`). That one is run first;
where it is green, the whole folder, as `make test` runs it or, with `full = true`, as the rotating part does. A fault
is planted in a copy of the checkout, which is removed afterwards. The exit status is 1 if any survives, or if another
test is red than the one that is named.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 900


@dataclass(frozen=True)
class Mutant:
    """A fault of a few lines."""

    name: str
    file: str
    old: str
    new: str
    guard: str  # a folder of tests, or a file
    killed_by: str  # tests/.../test_file.py::test_name
    full: bool = False


def mutants(root: Path = ROOT) -> list[Mutant]:
    """All faults of the lists."""
    return [
        Mutant(**row)
        for path in sorted((root / "tests/mutants").glob("*.toml"))
        for row in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    ]


def copy_of(root: Path, to: Path) -> None:
    """Copies every file of a checkout that git does not ignore."""
    listed = ["git", "-C", str(root), *"ls-files -z --cached --others --exclude-standard".split()]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).exists() or (root / name).is_symlink():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name, follow_symlinks=False)


def red(copy: Path, tests: str, full: bool) -> str | None:
    """The first test that fails, None if none does."""
    command = [sys.executable, "-m", "pytest", "-qx", "-rfE", "-p", "no:cacheprovider", tests]
    command += ["-m", "full"] if full else []
    # a fault of the last run is not read from bytecode
    environment = {name: x for name, x in os.environ.items() if name != "CI"}
    environment |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    options: Any = {"capture_output": True, "text": True, "timeout": SECONDS}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, **options)
    except subprocess.TimeoutExpired:
        return f"{tests} (no end in {SECONDS} s)"
    if done.returncode in (0, 5):  # all passed, or none was asked for
        return None
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failures[0] if failures else f"{tests} (exit status {done.returncode})"


def judge(mutant: Mutant) -> bool:
    """Plants a fault in a copy of the checkout, and prints what kills it; whether that is the named test."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_of(ROOT, copy)
        text = (copy / mutant.file).read_text(encoding="utf-8")
        (copy / mutant.file).write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        killer = red(copy, mutant.killed_by, mutant.full) or red(copy, mutant.guard, mutant.full)
    expected = killer is not None and killer.split("[")[0] == mutant.killed_by.split("[")[0]
    verdict = "SURVIVED" if killer is None else "killed by" if expected else "killed by ANOTHER,"
    seconds = time.monotonic() - start
    print(f"{seconds:6.0f} s  {mutant.name}: {verdict} {killer or mutant.guard}", flush=True)
    return expected


def main(arguments: list[str]) -> int:
    """Judge those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a fault, or a part of it")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    args = parser.parse_args(arguments)
    chosen = [x for x in mutants() if not args.names or any(n in x.name for n in args.names)]
    if not chosen:
        parser.error(f"NAME: no fault has {args.names} in its name")
    with ThreadPoolExecutor(args.jobs) as pool:
        killed = sum(pool.map(judge, chosen))
    print(f"{killed} of {len(chosen)} killed by the test that the list names")
    return int(killed < len(chosen))


def wrong_entries(root: Path = ROOT) -> Iterator[str]:
    """The errors in the lists of mutants, found without running a test."""
    seen: set[str] = set()
    for mutant in mutants(root):
        text = (root / mutant.file).read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            yield f"{mutant.name}: `old` stands {text.count(mutant.old)} times in {mutant.file}"
        if mutant.name in seen:
            yield f"{mutant.name}: twice"
        seen.add(mutant.name)
        file, _, test = mutant.killed_by.partition("::")
        name = test.split("::")[-1].split("[")[0]
        if not file.startswith(mutant.guard.rstrip("/")):
            yield f"{mutant.name}: {file} is not in {mutant.guard}"
        elif not re.search(rf"def {name}\b", (root / file).read_text(encoding="utf-8")):
            yield f"{mutant.name}: {file} has no {name}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
