"""Several processes, as on several machines: collectives cross process borders and no process holds all keys."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROCESSES, DEVICES = 2, 4
SECONDS = 120  # for a machine that is busy; alone it takes ten


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def run_together(module: str, processes: int, devices: int, seconds: float) -> list[str]:
    """What `processes` processes print, each started as `python -m module COORDINATOR COUNT INDEX`.

    All are killed when one fails or time is up, and what they wrote to stderr is shown.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
    }
    coordinator = f"localhost:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, coordinator, str(processes), str(index)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]
    try:
        end = time.monotonic() + seconds
        while any(p.poll() is None for p in started):
            if time.monotonic() > end or any(p.poll() for p in started):
                break
            time.sleep(0.05)
        codes = [p.poll() for p in started]
    finally:
        for process in started:
            process.kill()  # nothing to one that has ended
        written = [process.communicate() for process in started]
    if any(codes) or None in codes:
        text = "\n".join(
            f"--- process {i}, exit {codes[i]}\n{err}" for i, (_, err) in enumerate(written)
        )
        raise AssertionError(f"processes failed, or ran longer than {seconds} s:\n{text}")
    return [out for out, _ in written]


def test_tree_over_processes():
    """A mesh that mixes up processes, collectives that end at a process's border, or a result that they disagree on.

    Decoding over a (node, device) mesh of 2 processes × 4 devices equals the dense float64 judge in both, and so do
    the gradients, of which each process holds those of its own keys.
    """
    for index, text in enumerate(
        run_together("tests.distributed.process", PROCESSES, DEVICES, SECONDS)
    ):
        found = json.loads(text.splitlines()[-1])
        assert found["processes"] == PROCESSES
        assert found["mesh"] == {"node": PROCESSES, "device": DEVICES}
        assert found["my devices"] == [index] * DEVICES
        assert max(found["errors"].values()) < 1e-12, found["errors"]
        everyone = [list(range(PROCESSES * DEVICES))]
        assert found["groups"] == [everyone] * 3


def test_failures_are_shown(tmp_path):
    """A process that dies and leaves the other waiting for it: the test must end, with its last words."""
    try:
        run_together("tests.distributed.no_such_process", 2, 1, seconds=30)
    except AssertionError as error:
        assert "no_such_process" in str(error)
    else:
        raise AssertionError("a failure went unseen")
