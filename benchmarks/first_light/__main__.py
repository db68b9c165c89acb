"""`python -m benchmarks.first_light`: checks and times every kernel for GPUs on the attached GPU.

No failure ends it: exceptions, hangs and crashes are recorded as results. A later call with the same `--out`
continues where the last one stopped.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..command import parser_of
from ..runner import OURS
from ._bench import TRIAL, Bench, Result
from ._steps import STEPS

COMMAND = (sys.executable, "-m", "benchmarks.first_light._steps")
_ROOT = Path(__file__).parents[2]  # where everything is imported from
_POLL = 0.2  # seconds between looks at the process
_MOST, _BEST = 25, 3  # lines of a list, and of a sweep
_MOVES = "differs from run to run (gradients of queries by cudnn and flash may)"
# Of a wrong result, in its label.
_KNOWN = ("kernel", "case", "mode", "dtype", "call", "tiles", "good", "moved")


def _names(text: str) -> tuple[str, ...]:
    steps = tuple(text.split(","))
    for step in steps:
        if step not in STEPS:
            raise argparse.ArgumentTypeError(f"wanted some of {', '.join(STEPS)}, got {step!r}")
    return steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures until all is done or the time is spent, prints a summary, and writes `first_light.json`.

    Returns 0, or 1 if no measurement could be begun.
    """
    parser = parser_of("benchmarks.first_light", __doc__)
    add = parser.add_argument
    add("--steps", type=_names, default=tuple(STEPS), help=f"some of {','.join(STEPS)}")
    add("--copy", help="a second folder for the results")
    seconds = "seconds after which no measurement is begun (%(default).0f)"
    add("--budget", type=float, default=1440.0, help=seconds)
    add("--dry-run", action="store_true", help="short sequences, on the CPU")
    add("--fresh", action="store_true", help="forget the results in --out")
    args = parser.parse_args(arguments)
    deadline = time.time() + args.budget
    shrink = TRIAL if args.dry_run and args.shrink == 1 else args.shrink
    options = args.steps, deadline, args.repeats, shrink, args.dry_run
    bench = Bench(str(args.out), args.copy, *options)
    if args.fresh:
        bench.path.unlink(missing_ok=True)
    status = supervise(bench)
    print(*summary(dataclasses.replace(bench).results), f"wrote {bench.path}", sep="\n")
    return status


def supervise(bench: Bench, command: Sequence[str] = COMMAND) -> int:
    """Runs the process of the steps until all is measured or the time is spent.

    A measurement that it had begun when it ended or hung gets that as its result. If it was compiling several
    programs, the next process compiles one by one.

    Returns 0, or 1 if the process ends before it begins anything.
    """
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # PyTorch wants memory
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    if bench.trial:
        environment["JAX_PLATFORMS"] = "cpu"
    bench.end()
    while True:
        options = json.dumps(dataclasses.astuple(bench))
        ending = _ended(subprocess.Popen([*command, options], env=environment), bench)
        if not ending:
            return 0
        begun = bench.under_way()
        if begun is None:
            print(f"the process of the measurements {ending}")
            return 1
        step, labels, _ = begun
        bench.end()
        if time.time() > bench.deadline:
            return 0
        bench = dataclasses.replace(bench, alone=bench.alone or len(labels) > 1)
        if len(labels) > 1:
            print(f"the process {ending} while it compiled; from here on, one program at a time")
        elif not bench.known(step, labels[0]):
            bench.put(step, labels[0], {"error": f"the process {ending}", "final": True})


def _ended(child: subprocess.Popen[bytes], bench: Bench) -> str:
    """Waits for the process, and kills it if a measurement takes too long; returns the failure, or ""."""
    try:
        while child.poll() is None:
            begun = bench.under_way()
            if begun is not None and time.time() > begun[-1]:
                return "hung, and was killed"
            time.sleep(_POLL)
        return f"ended with status {child.returncode}" if child.returncode else ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        child.wait()


def summary(steps: dict[str, dict[str, Result]]) -> Iterator[str]:
    """Short tables of wrong results, failures and times: the end of an output is read first."""
    yield "== ceilings"
    for label, x in steps.get("roof", {}).items():
        figures = (f"{k} {v:.4g}" for k, v in x.items() if isinstance(v, float))
        yield f"  {label}: {', '.join(figures)}"
    lists: dict[str, list[str]] = {"WRONG": [], _MOVES: [], "declined": [], "did not run": []}
    for step, results in steps.items():
        for label, x in results.items():
            errors = ", ".join(f"{k} {x[k]}" for k in x if k not in _KNOWN)
            for title, text in {
                "WRONG": errors if x.get("good") is False else "",
                _MOVES: ", ".join(x.get("moved", ())),
                "declined": x.get("declined", "")[:160],
                "did not run": x.get("error", "").partition("\n")[0][:160],
            }.items():
                lists[title] += [f"  {step}: {label}: {text}"] if text else []
    for title, lines in lists.items():
        yield f"== {title}: {len(lines)}"
        yield from lines[:_MOST]
        if len(lines) > _MOST:
            yield f"  and {len(lines) - _MOST} more"
    yield "== TFLOP/s (causal: half the products counted)"
    rates = steps.get("prefill", {}) | steps.get("torch", {})
    for shape, by_kernel in _groups(rates, "tflop_per_s", "kernel").items():
        ordered = sorted(by_kernel.items(), key=lambda item: -item[1])
        yield f"  {shape}: " + ", ".join(f"{name} {rate:.0f}" for name, rate in ordered)
    yield "== decoding"
    for label, x in steps.get("decode", {}).items():
        if "us_per_step" in x:
            share = f", {x['of_copy']:.0%} of copying" if x["of_copy"] else ""
            small = " (may stay in a cache)" if x["cached"] else ""
            rate = x["bytes_per_s"] / 1e12
            yield f"  {label}: {x['us_per_step']:.1f} us, {rate:.2f} TB/s{share}{small}"
    yield "== tiles: the best, compared with those that are chosen"
    for call, seconds in _groups(steps.get("sweep", {}), "seconds", "tiles").items():
        chosen = seconds.pop(OURS, None)
        for tiles in sorted(seconds, key=seconds.__getitem__)[:_BEST]:
            gain = f", {chosen / seconds[tiles]:.2f} times as fast" if chosen else ""
            yield f"  {call}: {tiles}: {seconds[tiles] * 1e6:.1f} us{gain}"


def _groups(results: dict[str, Result], figure: str, by: str) -> dict[str, dict[str, float]]:
    """A figure of results that are not wrong, by the rest of the label and by its end, the field `by`."""
    groups: dict[str, dict[str, float]] = {}
    for label, x in results.items():
        if figure in x and x.get("good") is not False:
            key = label.removesuffix(x[by]).rstrip(" :")
            groups.setdefault(key, {})[x[by]] = x[figure]
    return groups


if __name__ == "__main__":
    sys.exit(main())
