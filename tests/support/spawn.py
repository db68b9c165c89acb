"""Another Python, with devices of its own."""

import subprocess
import sys
from pathlib import Path

from tests.support.flags import environment

ROOT = Path(__file__).resolve().parents[2]


def spawn(*arguments, devices=None, **variables):
    """What it prints; one that fails says why."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(devices) | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
