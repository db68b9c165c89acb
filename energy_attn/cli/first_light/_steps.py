"""The steps in their order, and the process that takes them."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ._about import about, roof
from ._bench import Bench
from ._check import check, check_large
from ._record import Late, Lost, Record, failure
from ._speed import decode, prefill
from ._sweep import sweep
from ._torch import torch

# What would be missed most comes first, in case time runs out.
STEPS: dict[str, Callable[[Bench], None]] = {
    "about": about,
    "roof": roof,
    "check": check,
    "decode": decode,
    "prefill": prefill,
    "sweep": sweep,
    "check_large": check_large,
    "torch": torch,
}
_SLOW = 20  # how many times longer than a GPU a CPU may take


class Options(NamedTuple):
    """What the process of the measurements is told.

    Attributes:
        out, copy: folders of the results.
        steps: names of `STEPS`.
        deadline: the time after which nothing is begun.
        repeats, shrink, trial, alone: those of `Bench`.
    """

    out: str
    copy: str | None
    steps: tuple[str, ...]
    deadline: float
    repeats: int
    shrink: int = 1
    trial: bool = False
    alone: bool = False

    def record(self) -> Record:
        """What has been measured so far."""
        copy = Path(self.copy) if self.copy else None
        return Record(Path(self.out), copy, self.deadline, _SLOW if self.trial else 1)


def measure(options: Options) -> int:
    """Takes the steps, in this process. Returns 0, or 1 if the device does not work any more."""
    record = options.record()
    bench = Bench(record, options.repeats, options.shrink, options.trial, options.alone)
    for name in options.steps:
        try:
            STEPS[name](bench)
        except Late:
            print("the time is spent", flush=True)
            break
        except Lost:
            print(f"{name}: the device takes no further work from this process", flush=True)
            return 1
        except Exception as reason:  # that of arrays which do not fit, for one
            record.put("failed", name, failure(reason))
    record.end()
    return 0
