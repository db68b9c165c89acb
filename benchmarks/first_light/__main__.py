"""`python -m benchmarks.first_light`: checks and times every kernel for GPUs on the attached GPU.

No failure ends it: exceptions, hangs and crashes are recorded as results. A later call with the same `--out`
continues where the last one stopped.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..command import add_common
from ._bench import TRIAL, Bench
from ._process import supervise
from ._steps import STEPS
from ._summary import summary


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
    about = (__doc__ or "").partition(": ")[2]
    parser = argparse.ArgumentParser("python -m benchmarks.first_light", description=about)
    add = parser.add_argument
    add("--steps", type=_names, default=tuple(STEPS), help=f"some of {','.join(STEPS)}")
    add("--copy", type=Path, help="a second folder for the results")
    add(
        "--budget",
        type=float,
        default=1440.0,
        help="seconds after which no measurement is begun (%(default).0f)",
    )
    add("--dry-run", action="store_true", help="short sequences, on the CPU")
    add("--fresh", action="store_true", help="forget the results in --out")
    add_common(parser)
    args = parser.parse_args(arguments)
    bench = Bench(
        str(args.out),
        str(args.copy) if args.copy else None,
        args.steps,
        time.time() + args.budget,
        args.repeats,
        TRIAL if args.dry_run and args.shrink == 1 else args.shrink,
        args.dry_run,
    )
    if args.fresh:
        bench.read().path.unlink(missing_ok=True)
    status = supervise(bench)
    record = bench.read()
    print(*summary(record.steps), f"wrote {record.path}", sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
