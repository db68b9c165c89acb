"""`python -m benchmarks.first_light`: checks and times every kernel for GPUs on the attached GPU.

No failure ends it: exceptions, hangs and crashes are recorded as results. A later call with the same `--out`
continues where the last one stopped.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from ..command import parser_of
from ._bench import Bench, Result
from ._steps import STEPS

COMMAND = (sys.executable, "-m", "benchmarks.first_light._steps")
TRIAL = 128  # the divisor of lengths in a dry run
PATIENCE = 150.0  # seconds of a measurement, or of the compilation of several, before the process is killed
_POLL = 0.2  # seconds between looks at the process


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures until all is done or the time is spent, and writes `first_light.json`.

    Returns 0, or 1 if the process of a step ends before it begins anything.
    """
    parser = parser_of("benchmarks.first_light", __doc__)
    add = parser.add_argument
    add("--steps", default=",".join(STEPS), help="some of %(default)s")
    add("--budget", type=float, default=1440.0, help="seconds until the end (%(default).0f)")
    add("--dry-run", action="store_true", help=f"on the CPU, with --shrink {TRIAL}")
    args = parser.parse_args(arguments)
    steps = args.steps.split(",")
    for step in steps:
        if step not in STEPS:
            parser.error(f"--steps: wanted some of {','.join(STEPS)}, got {step!r}")
    shrink = TRIAL if args.dry_run else args.shrink
    bench = Bench(str(args.out), time.time() + args.budget, args.repeats, shrink)
    # PyTorch wants memory, too; and the tests of the step `check` run on the CPU unless this is set
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "", **os.environ}
    if args.dry_run:
        environment["JAX_PLATFORMS"] = "cpu"
    began = [supervise(step, bench, environment) for step in steps]
    print(*summary(dataclasses.replace(bench).results), f"wrote {bench.path}", sep="\n")
    return 0 if all(began) else 1


def supervise(
    step: str, bench: Bench, environment: dict[str, str], command: Sequence[str] = COMMAND
) -> bool:
    """Runs a process that takes a step, and another one after each that ends early or hangs.

    What such a process had begun gets that as its result. Returns False if it ends before it begins anything.
    """
    options = json.dumps(dataclasses.astuple(bench))
    while time.time() < bench.deadline:
        child = subprocess.Popen([*command, step, options], env=environment)
        ending = _ending(child, bench)
        on_time = time.time() < bench.deadline
        error = f"the process {ending}" if ending and on_time else None
        begun = dataclasses.replace(bench).settle(error)  # a new one, which reads the file
        if error is None:
            break
        if not begun:
            print(f"{step}: {error}")
            return False
    return True


def _ending(child: subprocess.Popen[bytes], bench: Bench) -> str:
    """Waits for the process, and kills it if it hangs or the time is spent; returns the failure, or ""."""
    started, patience = time.time(), PATIENCE * (10 if bench.trial else 1)
    try:
        while child.poll() is None:
            time.sleep(_POLL)
            changed = bench.path.stat().st_mtime if bench.path.exists() else 0.0
            if time.time() > min(bench.deadline, max(started, changed) + patience):
                return "hung, and was killed"
        return f"ended with status {child.returncode}" if child.returncode else ""
    finally:
        child.kill()
        child.wait()


def summary(steps: dict[str, dict[str, Result]]) -> Iterator[str]:
    """How many results each step has, and which are wrong or failed: the end of an output is read first."""
    for step, results in steps.items():
        wrong = {x: r.get("said", "") for x, r in results.items() if r.get("good") is False}
        failed = {x: r["error"].partition("\n")[0] for x, r in results.items() if "error" in r}
        declined = sum("declined" in r for r in results.values())
        measured = len(results) - len(failed) - declined
        yield f"{step}: {measured} measured, {declined} declined, {len(failed)} failed, {len(wrong)} WRONG"
        yield from (f"  failed: {label}: {text[:160]}" for label, text in failed.items())
        yield from (f"  WRONG: {label} {text[:160]}" for label, text in wrong.items())


if __name__ == "__main__":
    sys.exit(main())
