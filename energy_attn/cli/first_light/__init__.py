"""The suite `first-light` of `bench`: what the kernels for GPUs do on a GPU, in 25 minutes and without a network.

No failure ends it: what raises, hangs or ends the process is a result. A later call with the same `--out` goes on
where the last one stopped.
"""

import argparse
import time
from pathlib import Path

from ._bench import TRIAL
from ._process import supervise
from ._steps import STEPS, Options
from ._summary import summary

OPTIONS = ("steps", "copy", "budget", "dry_run", "fresh")
_BUDGET = 1440.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite, which other suites do not have."""
    group = parser.add_argument_group("first-light")
    group.add_argument("--steps", type=_names, help=f"some of {','.join(STEPS)}")
    group.add_argument("--copy", type=Path, help="a second folder for the results")
    group.add_argument(
        "--budget",
        type=float,
        help=f"seconds after which no measurement is begun (default: {_BUDGET:.0f})",
    )
    group.add_argument("--dry-run", action="store_true", help="short sequences, on the CPU")
    group.add_argument("--fresh", action="store_true", help="forget the results in --out")


def _names(text: str) -> tuple[str, ...]:
    steps = tuple(text.split(","))
    for step in steps:
        if step not in STEPS:
            raise argparse.ArgumentTypeError(f"wanted some of {', '.join(STEPS)}, got {step!r}")
    return steps


def run(args: argparse.Namespace) -> int:
    """Measures until all is known or the time is spent, prints a summary, and writes `first_light.json`.

    Returns 0, or 1 if no measurement could be begun.
    """
    options = Options(
        str(args.out),
        str(args.copy) if args.copy else None,
        args.steps or tuple(STEPS),
        time.time() + (_BUDGET if args.budget is None else args.budget),
        args.repeats,
        TRIAL if args.dry_run and args.shrink == 1 else args.shrink,
        args.dry_run,
    )
    if args.fresh:
        options.record().path.unlink(missing_ok=True)
    status = supervise(options)
    record = options.record()
    for line in summary(record.steps):
        print(line)
    print(f"wrote {record.path}")
    return status
