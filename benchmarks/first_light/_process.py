"""Supervises the process of the measurements: if one measurement crashes or hangs, another process continues."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ._bench import Bench

_POLL = 0.2  # seconds between looks at the process
_ROOT = Path(__file__).parents[2]  # where everything is imported from
COMMAND = (sys.executable, "-m", "benchmarks.first_light._steps")


def supervise(bench: Bench, command: Sequence[str] = COMMAND) -> int:
    """Runs the process until all is measured or the time is spent.

    A measurement that it had begun when it ended or hung gets that as its result. If it was compiling several
    programs, the next process compiles one by one.

    Returns 0, or 1 if the process ends before it begins anything.
    """
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # PyTorch wants memory
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    if bench.trial:
        environment["JAX_PLATFORMS"] = "cpu"
    bench.read().end()
    while True:
        child = subprocess.Popen(
            [*command, json.dumps(dataclasses.astuple(bench))], env=environment
        )
        ending = _ended(child, bench)
        if not ending:
            return 0
        record = bench.read()
        begun = record.under_way()
        if begun is None:
            print(f"the process of the measurements {ending}")
            return 1
        step, labels, _ = begun
        record.end()
        if time.time() > bench.deadline:
            return 0
        if len(labels) > 1:
            print(f"the process {ending} while it compiled; from here on, one program at a time")
            bench = dataclasses.replace(bench, alone=True)
        elif not record.known(step, labels[0]):
            record.put(step, labels[0], {"error": f"the process {ending}", "final": True})


def _ended(child: subprocess.Popen[bytes], bench: Bench) -> str:
    """Waits for the process, and kills it if a measurement takes too long; returns the failure, or ""."""
    record = bench.read()
    try:
        while child.poll() is None:
            begun = record.under_way()
            if begun is not None and time.time() > begun[-1]:
                return "hung, and was killed"
            time.sleep(_POLL)
        return f"ended with status {child.returncode}" if child.returncode else ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        child.wait()
