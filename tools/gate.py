#!/usr/bin/env python3
"""Run the checks that a change must pass, and print the cost of each: `.ci/run`.

Stages run one after the other, and the first that fails ends the run. At the end stand, for each stage and each folder
of tests, seconds on the clock, seconds of all cores, and the number of cases.

The long cases are shared out: each run has one of `SHARDS` parts, chosen by the number of commits, and more of the
folders that the commits of the last day touched. Every other round of parts is compiled for AVX2. What was chosen is
printed as a command that repeats it.
"""

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHARDS = 6


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


def tests_of(name: str) -> str | None:
    """The folder of tests that guards a file of the repository."""
    folder = str(Path(name).parent).removeprefix("tests/")
    folder = re.sub(r"^(docs|tools)\b.*|^\.$", "repository", folder)
    # names of the kernels' room, under a name for users
    folder = re.sub(r"^energy_attn/(?=masks|scores)", "kernels/", folder)
    guard = Path("tests", folder)
    while not (ROOT / guard).is_dir():
        guard = guard.parent
    return str(guard) if guard.parts[1:] and guard.parts[1] not in ("support", "mutants") else None


def touched(names: Iterable[str]) -> list[str]:
    """The folders of tests that guard these files, none inside another."""
    guards = {folder for name in names if (folder := tests_of(name))}
    return sorted(x for x in guards if not any(y in guards for y in map(str, Path(x).parents)))


def rotation() -> tuple[str, ...]:
    """Returns the arguments that choose this run's long cases and the instructions to compile for."""
    commits = int(git("rev-list", "--count", "HEAD"))
    names = git("log", "--since=1 day ago", "--name-only", "--format=").split("\n")
    folders = " ".join(touched(filter(None, names)))
    isa = "AVX2" if commits // SHARDS % 2 else ""
    return (f"SHARD={commits % SHARDS + 1}/{SHARDS}", f"TOUCHED={folders}", f"ISA={isa}")


def begin(stage: Stage, **options: Any) -> subprocess.Popen:
    """Starts a stage."""
    return subprocess.Popen(["make", "--no-print-directory", *stage.arguments], cwd=ROOT, **options)


def run(stage: Stage, begun: subprocess.Popen | None = None) -> bool:
    """Runs a stage, or waits for one that was begun; whether it succeeded."""
    print(f"\n== {stage.name}: make {shlex.join(stage.arguments)}", flush=True)
    before, start = cpu(), time.monotonic()
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as seconds:
        process = begun or begin(stage, env=os.environ | {"GATE_SECONDS": seconds.name})
        succeeded = process.wait() == 0
        stage.wall, stage.cpu = time.monotonic() - start, cpu() - before
        for line in seconds:
            for folder, (took, cases) in json.loads(line).items():
                totals = stage.folders.setdefault(folder, [0.0, 0])
                totals[0], totals[1] = totals[0] + took, totals[1] + cases
    if not succeeded:
        print(f"gate: {stage.name} failed", flush=True)
    return succeeded


def cpu() -> float:
    """CPU seconds of the processes that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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


def run_all(check: Stage, environments: Stage, rest: list[Stage]) -> bool:
    """Runs the stages until one fails; environments are made during the first, and what they print follows it."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        making = begin(environments, stdout=output, stderr=subprocess.STDOUT)
        checked = run(check)
        made = run(environments, making)
        output.seek(0)
        print(output.read(), flush=True)
    return checked and made and all(run(stage) for stage in rest)


def main() -> int:
    """Run all stages; the exit status is 1 if one fails."""
    turn = rotation()
    # .ci/run has made the first environment, without which this program would not run.
    began = float(os.environ.get("GATE_BEGAN", time.time()))
    first = Stage("environment", (), wall=time.time() - began)
    check = Stage("check", ("check",))
    environments = Stage("other environments (beside check)", ("environments",))
    rest = [
        Stage("tests", ("test",)),
        Stage("newest JAX", ("test-newest",)),
        Stage("long tests in turn", ("test-rest", *turn)),
        Stage("tests on an emulated CPU", ("test-emulated",)),
        Stage("TPU programs", ("test-tpu", turn[0])),
        Stage("CUDA 12 programs", ("test-cuda", "CUDA=12", "CUDA_TESTS=toolkits", turn[0])),
        Stage("CUDA 13 programs", ("test-cuda", "CUDA=13", turn[0])),
    ]
    try:
        return 0 if run_all(check, environments, rest) else 1
    finally:
        print(report([first, check, environments, *rest]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
