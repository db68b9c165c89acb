#!/usr/bin/env python3
"""Run the checks that a change must pass, and print the cost of each: `.ci/run`.

Stages run one after the other, and the first that fails ends the run. At the end stand, for each stage and each folder
of tests, seconds on the clock, seconds of all cores, and the number of cases.

The long cases are shared out: each run has one of `SHARDS` parts, chosen by the number of commits, and more of the
folders that the commits of the last day touched. Every other round of parts is compiled for AVX2. What was chosen is
printed as a command that repeats it.
"""

import contextlib
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARDS = 6
# The folders of tests for files outside of the rooms.
ELSEWHERE = {
    "docs": "repository",
    "tools": "repository",
    "benchmarks": "benchmarks",
    "papers": "papers",
    "examples": "examples",
}


@dataclass
class Stage:
    """A target of the Makefile, and its cost."""

    name: str
    arguments: tuple[str, ...]
    wall: float = 0.0
    cpu: float = 0.0
    folders: dict[str, list[float]] = field(default_factory=dict)  # CPU seconds, cases


def git(*arguments: str) -> str:
    """The output of a git command."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def tests_of(name: str, root: Path = ROOT) -> str | None:
    """The folder of tests that guards a file of the repository."""
    first, *folders = Path(name).parent.parts or ("docs",)
    if first == "tests":
        folder = Path("tests", *folders)
        return str(folder) if folders and folders[0] not in ("support", "mutants") else None
    if first == "energy_attn" and folders[:1] in (["masks"], ["scores"]):
        first = "kernels"  # names of that room, under a name for users
    folder = (
        Path("tests", ELSEWHERE[first]) if first in ELSEWHERE else Path("tests", first, *folders)
    )
    while not (root / folder).is_dir():
        folder = folder.parent
    return str(folder) if len(folder.parts) > 1 else None


def touched(names: Iterable[str], root: Path = ROOT) -> list[str]:
    """The folders of tests that guard these files, none inside another."""
    guards = {folder for name in names if (folder := tests_of(name, root))}
    return sorted(x for x in guards if not any(y in guards for y in map(str, Path(x).parents)))


def rotation() -> tuple[str, ...]:
    """Returns the arguments that choose this run's long cases and the instructions to compile for."""
    commits = int(git("rev-list", "--count", "HEAD"))
    names = git("log", "--since=1 day ago", "--name-only", "--format=").split("\n")
    folders = " ".join(touched(filter(None, names)))
    isa = "AVX2" if commits // SHARDS % 2 else ""
    return (f"SHARD={commits % SHARDS + 1}/{SHARDS}", f"TOUCHED={folders}", f"ISA={isa}")


def run(stage: Stage) -> bool:
    """Run a stage; whether it succeeded."""
    print(f"\n== {stage.name}: make {shlex.join(stage.arguments)}", flush=True)
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as seconds:
        before, start = _cpu(), time.monotonic()
        done = subprocess.run(
            ["make", "--no-print-directory", *stage.arguments],
            cwd=ROOT,
            env=os.environ | {"GATE_SECONDS": seconds.name},
        )
        stage.wall, stage.cpu = time.monotonic() - start, _cpu() - before
        for line in seconds:
            for folder, (took, cases) in json.loads(line).items():
                totals = stage.folders.setdefault(folder, [0.0, 0])
                totals[0], totals[1] = totals[0] + took, totals[1] + cases
    return done.returncode == 0


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def in_background(stage: Stage) -> Iterator[None]:
    """Run a stage in the background of the block; its output is printed afterwards."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        start = time.monotonic()
        process = subprocess.Popen(
            ["make", "--no-print-directory", *stage.arguments],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield
        finally:
            before = _cpu()  # which counts a process when it is waited for
            failed = process.wait() != 0
            stage.wall, stage.cpu = time.monotonic() - start, _cpu() - before
            output.seek(0)
            print(f"\n== {stage.name}, beside that\n{output.read()}", flush=True)
    if failed:
        raise SystemExit(f"gate: {stage.name} failed")


def report(stages: Iterable[Stage]) -> str:
    """The table of costs."""
    lines = [f"\n{'wall s':>8} {'CPU s':>8} {'cases':>6}"]
    stages = [stage for stage in stages if stage.wall]
    for stage in stages:
        cases = sum(int(cases) for _, cases in stage.folders.values())
        lines.append(f"{stage.wall:8.0f} {stage.cpu:8.0f} {cases or '':>6}  {stage.name}")
        for folder, (took, cases) in sorted(stage.folders.items()):
            lines.append(f"{'':8} {took:8.0f} {cases or '':>6}      {folder}")
    total = [sum(getattr(stage, name) for stage in stages) for name in ("wall", "cpu")]
    lines.append(f"{total[0]:8.0f} {total[1]:8.0f} {'':6}  all stages")
    return "\n".join(lines)


def main() -> int:
    """Run all stages; the exit status is 1 if one fails."""
    turn = rotation()
    # .ci/run has made the first environment, without which this program would not run.
    began = float(os.environ.get("GATE_BEGAN", time.time()))
    first = Stage("environment", (), wall=time.time() - began)
    other_environments = Stage("other environments (beside check)", ("environments",))
    check, *rest = [
        Stage("check", ("check",)),
        Stage("tests", ("test",)),
        Stage("newest JAX", ("test-newest",)),
        Stage("long tests in turn", ("test-rest", *turn)),
        Stage("tests on an emulated CPU", ("test-emulated",)),
        Stage("TPU programs", ("test-tpu", turn[0])),
        Stage("CUDA 12 programs", ("test-cuda", "CUDA=12", "CUDA_TESTS=toolkits", turn[0])),
        Stage("CUDA 13 programs", ("test-cuda", "CUDA=13", turn[0])),
    ]
    stages = [first, other_environments, check, *rest]
    failed = ""
    try:
        with in_background(other_environments):
            if not run(check):
                failed = check.name
        for stage in rest if not failed else ():
            if not run(stage):
                failed = stage.name
                break
    finally:
        print(report(stages), flush=True)
    if failed:
        print(f"gate: {failed} failed", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
