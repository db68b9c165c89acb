"""Programs as several processes, started by the example for a cluster as a user starts it."""

import subprocess
import sys

from tests.support.flags import environment
from tests.support.spawn import ROOT


def launch(*arguments: object, timeout: float = 270) -> subprocess.CompletedProcess:
    """`python examples/cluster/launch.py …`, and what became of it."""
    return subprocess.run(
        [sys.executable, "examples/cluster/launch.py", *map(str, arguments)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
