"""Comparable times: all sides compiled and warmed up, in turn, in one process."""

import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import energy_attn

from ._cases import Run, torch, wait

SHORT = 0.02  # seconds: shorter runs are repeated to make a timing this long


def measure(sides: dict[str, Run], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run of each side: warmed up, then in turn.

    A turn is an untimed run and a timing of as many runs as take 20 ms, so that no side pays for the
    state in which the side before it left caches and allocator, nor for the start of a short run.
    """
    numbers: dict[str, int] = {}
    for name, side in sides.items():
        wait(side())
        numbers[name] = max(1, round(SHORT / max(_seconds(side, 1), 1e-6)))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            wait(side())
            seconds[name].append(_seconds(side, numbers[name]) / numbers[name])
    return seconds


def _seconds(side: Run, number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        result = side()
    wait(result)  # pyright: ignore[reportPossiblyUnboundVariable]  # at least one
    return time.perf_counter() - start


class Traffic(NamedTuple):
    """What memory's bandwidth is measured by.

    Attributes:
        name: what runs, in words.
        run: it.
        size: the bytes that it reads and writes.
    """

    name: str
    run: Run
    size: int

    def rate(self, seconds: list[float]) -> float:
        """Bytes per second, by the median of its times."""
        return self.size / statistics.median(seconds)


def traffic(platform_: str, size: int) -> Traffic:
    """On CPUs reading, by sums of rows of an array of `size` bytes; on other platforms copying it."""
    x = jnp.ones(size // 4, jnp.float32)
    if platform_ != "cpu":
        copy = jax.jit(lambda x: x + 1)
        return Traffic("copy, bytes read and written", lambda: copy(x), 2 * x.nbytes)
    read = jax.jit(lambda x: x.reshape(-1, 1024).sum(1))
    return Traffic("sums of rows", lambda: read(x), x.nbytes)


def machine() -> dict[str, Any]:
    """The machine and versions behind a figure."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        model = next((v.strip() for k, _, v in lines if k.strip() == "model name"), model)
    described = {
        "device": jax.devices()[0].device_kind,
        "processor": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "energy_attn": energy_attn.__version__,
    }
    peer = torch()
    return described if peer is None else {**described, "torch": str(peer.__version__)}
