"""The steps in their order, and the process that takes them: `python -m benchmarks.first_light._steps BENCH`."""

import json
import os
import sys
from collections.abc import Callable

from ._about import about, roof
from ._bench import Bench
from ._check import check, check_large
from ._record import Late, Lost, failure
from ._speed import decode, prefill, rules
from ._sweep import sweep
from ._torch import torch

# The most important come first, in case time runs out.
STEPS: dict[str, Callable[[Bench], None]] = {
    "about": about,
    "roof": roof,
    "check": check,
    "decode": decode,
    "prefill": prefill,
    "rules": rules,
    "sweep": sweep,
    "check_large": check_large,
    "torch": torch,
}


def measure(bench: Bench) -> int:
    """Takes the steps, in this process. Returns 0, or 1 if the device does not work any more."""
    for name in bench.steps:
        try:
            STEPS[name](bench)
        except Late:
            print("the time is spent", flush=True)
            break
        except Lost:
            print(f"{name}: the device takes no further work from this process", flush=True)
            return 1
        except Exception as reason:  # that of arrays which do not fit, for one
            bench.record.put("failed", name, failure(reason))
    bench.record.end()
    return 0


if __name__ == "__main__":
    status = measure(Bench(*json.loads(sys.argv[1])))
    sys.stdout.flush()
    os._exit(status)  # a broken context of the device may not come to an end
