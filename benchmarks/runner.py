"""Runs comparisons: all sides are compiled and warmed up, then timed in turn in one process."""

import importlib
import importlib.util
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

import energy_attn
from energy_attn.kernels.internal import platform_here

OURS, JAX_NN, PYTORCH = "energy_attn", "jax.nn", "PyTorch"
ONE_PASS, ONE_GRADIENT = "our attention", "our gradient"
SHORT = 0.02  # seconds: shorter runs are repeated to make a timing this long
PAUSE = 0.02  # seconds between sides, in which idle threads of the one before stop spinning
_LEAST = 16  # a trial's shortest sequence

Run = Callable[[], Any]  # starts a computation and returns its result, to be waited for
Sides = dict[str, Callable[[], Run]]  # makes each side's run; one that raises is absent


class Output(NamedTuple):
    """A result with other figures than the time."""

    result: PyTree
    figures: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One comparison.

    Sides whose names begin with "our" are there for their cost, and their results are not compared.
    """

    name: str
    dtype: str
    shape: dict[str, int]  # by the library's letters: B, T, S, N, K, H
    sides: Callable[..., Sides]  # from dtype, sizes and options to our side and those of the peers
    options: dict[str, Any] = field(default_factory=dict)
    long: str = "TS"  # the sizes that a trial divides
    reads: Callable[..., int] | None = (
        None  # the bytes that must be read, for the bandwidth's share
    )

    def shrunk(self, by: int) -> "Case":
        """The case with sequences `by` times shorter."""
        shape = {
            name: min(x, max(x // by, _LEAST)) if name in self.long else x
            for name, x in self.shape.items()
        }
        return Case(**{**vars(self), "shape": shape})


class Traffic(NamedTuple):
    """A measurement of memory bandwidth: its name, its program, and the bytes that this reads and writes."""

    name: str
    run: Run
    size: int

    def rate(self, seconds: Sequence[float]) -> float:
        """Bytes per second, by the median of its times."""
        return self.size / statistics.median(seconds)


def traffic(size: int) -> Traffic:
    """On CPUs reading, by sums of rows of an array of `size` bytes; on other platforms copying it."""
    x = jnp.ones(size // 4, jnp.float32)
    if platform_here() != "cpu":
        copy = jax.jit(lambda x: x + 1)
        return Traffic("copy, bytes read and written", lambda: copy(x), 2 * x.nbytes)
    read = jax.jit(lambda x: x.reshape(-1, 1024).sum(1))
    return Traffic("sums of rows", lambda: read(x), x.nbytes)


def torch() -> Any:
    """PyTorch, which takes all cores. Raises `ImportError` where it is not installed."""
    module = importlib.import_module("torch")
    module.set_num_threads(os.cpu_count() or 1)
    return module


def on_mesh(mesh: Mesh, make: Callable[[], Run]) -> Run:
    """A run that is made and called with a mesh in force."""
    with jax.set_mesh(mesh):
        run = make()

    def within() -> Any:
        with jax.set_mesh(mesh):
            return run()

    return within


def wait(result: PyTree) -> None:
    """Waits for a result of JAX or PyTorch."""
    for leaf in jax.tree.leaves(jax.block_until_ready(result)):
        if getattr(leaf, "is_cuda", False):
            torch().cuda.synchronize()
            return


def measure(sides: dict[str, Run], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run of each side: warmed up, then in turn.

    A turn is a pause, an untimed run, and a timing of as many runs as take 20 ms, so that no side pays for the state in
    which the side before it left threads, caches and allocator, nor for the start of a short run.
    """
    numbers: dict[str, int] = {}
    for name, side in sides.items():
        wait(side())
        numbers[name] = max(1, round(SHORT / max(seconds_of(side), 1e-6)))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            time.sleep(PAUSE)
            wait(side())
            seconds[name].append(seconds_of(side, numbers[name]) / numbers[name])
    return seconds


def seconds_of(side: Run, number: int = 1) -> float:
    """Seconds of `number` successive runs of a side."""
    start = time.perf_counter()
    for _ in range(number):
        result = side()
    wait(result)  # pyright: ignore[reportPossiblyUnboundVariable]  # at least one
    return time.perf_counter() - start


def compare(case: Case, repeats: int, memory: Traffic | None = None) -> dict[str, Any]:
    """Times of all sides of a case, and the largest differences of the peers' results from ours, as JSON has them."""
    runs: dict[str, Run] = {}
    outputs: dict[str, Output] = {}
    absent: dict[str, str] = {}
    for name, make in case.sides(dtype=case.dtype, **case.shape, **case.options).items():
        try:
            run = make()
            result = run()
            wait(result)
        except Exception as reason:  # whatever the installation of a peer lacks
            if name == OURS:
                raise
            absent[name] = f"{type(reason).__name__}: {reason}".splitlines()[0]
        else:
            runs[name] = run
            outputs[name] = result if isinstance(result, Output) else Output(result, {})
    differences = {
        name: float(f"{difference(outputs[OURS].result, x.result):.2g}")
        for name, x in outputs.items()
        if not name.startswith("our") and name != OURS
    }
    figures = {
        figure: {name: x.figures[figure] for name, x in outputs.items()}
        for figure in outputs[OURS].figures
    }
    # measured in turn with memory bandwidth, as the speed of a machine changes
    memory_traffic = memory if case.reads else None
    seconds = measure(runs | ({"memory": memory_traffic.run} if memory_traffic else {}), repeats)
    memory_seconds = seconds.pop("memory", ())
    medians = {name: statistics.median(x) for name, x in seconds.items()}
    row = {
        "name": case.name,
        "dtype": case.dtype,
        **case.options,
        "shape": case.shape,
        **figures,
        "median_ms": {name: _ms(x) for name, x in medians.items()},
        "runs_ms": {name: list(map(_ms, x)) for name, x in seconds.items()},
        "times_faster": {
            name: round(x / medians[OURS], 2) for name, x in medians.items() if name != OURS
        },
        "largest_difference": differences,
        "absent": absent,
    }
    if case.reads and memory_traffic:
        size, rate = case.reads(dtype=case.dtype, **case.shape), memory_traffic.rate(memory_seconds)
        row["GB_per_s"] = round(rate / 1e9, 2)
        row["of_bandwidth"] = {name: round(size / x / rate, 2) for name, x in medians.items()}
    return row


def _ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")


def difference(ours: PyTree, other: PyTree) -> float:
    """The largest difference of two results, relative to the largest entry of an array of ours; infinite for NaN."""
    pairs = zip(_numbers(ours), _numbers(other), strict=True)
    errors = [float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs]
    return max((x if x >= 0 else math.inf for x in errors), default=0.0)


def _numbers(result: PyTree) -> list[np.ndarray]:
    """The arrays of a result in float32; PyTorch's in our order of axes."""
    return [
        np.asarray(x.astype(jnp.float32))
        if isinstance(x, jax.Array | np.ndarray)
        else x.detach().transpose(1, 2).float().cpu().numpy()
        for x in jax.tree.leaves(result)
    ]


def sizes_of(row: dict[str, Any]) -> str:
    """The sizes of a row, in one line."""
    return ", ".join(f"{name}={x}" for name, x in row["shape"].items())


def title(row: dict[str, Any]) -> str:
    """The name, dtype and sizes of a row."""
    return f"{row['name']}, {row['dtype']}, {sizes_of(row)}"


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    against = "  ".join(f"{x:.2f}× faster than {name}" for name, x in row["times_faster"].items())
    share = f"  {row['of_bandwidth'][OURS]:.2f} of the bandwidth" if "of_bandwidth" in row else ""
    return f"{title(row):80} {row['median_ms'][OURS]:8.4g} ms  {against}{share}"


def run(suite: str, cases: Sequence[Case], repeats: int, shrink: int) -> dict[str, Any]:
    """Compares all cases, prints a table, and returns the results."""
    memory = traffic(max(2**30 // shrink, 2**16))
    rate = memory.rate(measure({"memory": memory.run}, repeats)["memory"])
    print(f"{suite}; memory: {rate / 1e9:.1f} GB/s ({memory.name})")
    rows = []
    for case in cases:
        case = case.shrunk(shrink)
        rows.append(compare(case, repeats, memory))
        print(line(rows[-1]), flush=True)
        for name, reason in rows[-1]["absent"].items():
            print(f"  without {name}: {reason}")
    return {
        "machine": machine(),
        "suite": suite,
        "repeats": repeats,
        "bandwidth": {"GB_per_s": round(rate / 1e9, 2), "measured_by": memory.name},
        "times": rows,
    }


def machine() -> dict[str, Any]:
    """The machine and versions behind a figure."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        model = next((v.strip() for k, _, v in lines if k.strip() == "model name"), model)
    info = {
        "device": jax.devices()[0].device_kind,
        "processor": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "energy_attn": energy_attn.__version__,
    }
    if importlib.util.find_spec("torch"):
        info["torch"] = str(torch().__version__)
    return info
