"""`python -m energy_attn bench`: times and memory beside `jax.nn` and PyTorch, as JSON and a plot.

Both sides run in one process, compiled and warmed up, and take turns; a figure is a ratio of
medians. PyTorch takes part where it is installed.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import energy_attn

Run = Callable[[], Any]
OURS, JAX_NN, PYTORCH = "energy_attn", "jax.nn", "PyTorch"


class Shape(NamedTuple):
    """The sizes of an attention, named as everywhere in the library."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    width: int


class Case(NamedTuple):
    """One comparison: what is computed, on what."""

    name: str
    shape: Shape
    dtype: str
    backward: bool = False


HEADS = {"heads": 16, "kv_heads": 16, "width": 64}
CASES = (
    Case("prefill", Shape(1, 2048, 2048, **HEADS), "float32"),
    Case("prefill", Shape(1, 2048, 2048, **HEADS), "bfloat16"),
    Case("decode", Shape(1, 1, 65536, **HEADS), "float32"),
    Case("decode", Shape(1, 1, 65536, **HEADS), "bfloat16"),
    Case("forward + backward", Shape(1, 2048, 2048, **HEADS), "float32", backward=True),
)
MEMORY = Case("memory", Shape(1, 16384, 16384, 8, 8, 64), "float32", backward=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench`."""
    parser.add_argument("--out", type=Path, default=Path("bench"), help="folder for the results")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each side")
    parser.add_argument("--shrink", type=int, default=1, help="divide sequence lengths, to try out")


def run(args: argparse.Namespace) -> int:
    """Measures every case, prints a table, and writes `bench.json` and `bench.svg`."""
    if args.repeats < 1 or args.shrink < 1:
        print("bench: --repeats and --shrink want numbers of at least 1", file=sys.stderr)
        return 2
    rows = []
    for case in CASES:
        case = case._replace(shape=_shrunk(case.shape, args.shrink))
        seconds = measure(_sides(case), args.repeats)
        rows.append(_row(case, seconds))
        print(_line(rows[-1]), flush=True)
    memory = _memory(MEMORY._replace(shape=_shrunk(MEMORY.shape, args.shrink)))
    print(
        f"{'temporary memory':20} {memory['dtype']:9} "
        f"{memory['bytes'][OURS] / 2**20:8.0f} MiB   "
        f"{100 * memory['bytes'][OURS] / memory['bytes'][JAX_NN]:.2f}% of {JAX_NN}'s"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(), "repeats": args.repeats, "times": rows, "memory": memory}
    (args.out / "bench.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {args.out / 'bench.json'}")
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed (pip install 'energy_attn[plot]')")
    else:
        _plot(result, args.out / "bench.svg")
        print(f"wrote {args.out / 'bench.svg'}")
    return 0


def measure(sides: dict[str, Run], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run of each side: warmed up, then in turn.

    A turn is one run untimed and one timed, so that no side pays for what the one before it left
    in the caches and the allocator.
    """
    for side in sides.values():
        side()
        side()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            side()
            start = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def machine() -> dict[str, Any]:
    """What a reader needs to judge a figure."""
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
    torch = _torch()
    return described if torch is None else {**described, "torch": str(torch.__version__)}


def _torch() -> Any:
    return importlib.import_module("torch") if importlib.util.find_spec("torch") else None


def _shrunk(shape: Shape, by: int) -> Shape:
    return shape._replace(queries=max(shape.queries // by, 1), keys=max(shape.keys // by, 1))


def _arrays(case: Case) -> list[np.ndarray]:
    shape, rng = case.shape, np.random.default_rng(0)
    sizes = ((shape.queries, shape.heads), *[(shape.keys, shape.kv_heads)] * 2)
    return [
        rng.standard_normal((shape.batch, *size, shape.width), dtype=np.float32) for size in sizes
    ]


def _program(case: Case, attend: Callable[..., Any]) -> Any:
    def loss(*arrays: Any) -> Any:
        return (attend(*arrays) ** 2).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)) if case.backward else attend)


def _sides(case: Case) -> dict[str, Run]:
    arrays = _arrays(case)
    on_device = [jnp.asarray(x).astype(case.dtype) for x in arrays]

    def compiled(attend: Callable[..., Any]) -> Run:
        program = _program(case, attend)
        return lambda: jax.block_until_ready(program(*on_device))

    sides = {
        OURS: compiled(energy_attn.attention),
        JAX_NN: compiled(jax.nn.dot_product_attention),
    }
    torch = _torch()
    if torch is None:
        return sides
    torch.set_num_threads(os.cpu_count() or 1)
    # the same [B, T, N, H] layout in memory, seen as PyTorch names its axes
    tensors = [torch.from_numpy(x).to(getattr(torch, case.dtype)).transpose(1, 2) for x in arrays]
    attend = torch.nn.functional.scaled_dot_product_attention

    def forward() -> None:
        with torch.no_grad():
            attend(*tensors)

    def forward_and_backward() -> None:
        leaves = [x.detach().requires_grad_() for x in tensors]
        (attend(*leaves) ** 2).sum().backward()

    return {**sides, PYTORCH: forward_and_backward if case.backward else forward}


def _row(case: Case, seconds: dict[str, list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(runs) for name, runs in seconds.items()}
    return {
        "name": case.name,
        "dtype": case.dtype,
        "shape": case.shape._asdict(),
        "median_ms": {name: round(1e3 * x, 2) for name, x in medians.items()},
        "runs_ms": {name: [round(1e3 * x, 2) for x in runs] for name, runs in seconds.items()},
        "times_faster": {
            name: round(x / medians[OURS], 2) for name, x in medians.items() if name != OURS
        },
    }


def _line(row: dict[str, Any]) -> str:
    against = "   ".join(f"{x:.2f}× faster than {name}" for name, x in row["times_faster"].items())
    return f"{row['name']:20} {row['dtype']:9} {row['median_ms'][OURS]:8.1f} ms    {against}"


def _memory(case: Case) -> dict[str, Any]:
    shapes = [jax.ShapeDtypeStruct(x.shape, case.dtype) for x in _arrays(case)]

    def temporary(attend: Callable[..., Any]) -> int:
        analysis = _program(case, attend).lower(*shapes).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)

    return {
        "name": "temporary memory, forward + backward",
        "dtype": case.dtype,
        "shape": case.shape._asdict(),
        "bytes": {
            OURS: temporary(energy_attn.attention),
            JAX_NN: temporary(jax.nn.dot_product_attention),
        },
    }


def _plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["times"]
    peers = list(rows[0]["times_faster"])
    colours = {JAX_NN: "#4c72b0", PYTORCH: "#dd8452"}
    figure, axes = pyplot.subplots(figsize=(7.5, 0.75 * len(rows) + 1.6), layout="constrained")
    height = 0.8 / len(peers)
    for i, peer in enumerate(peers):
        places = [row + (i - (len(peers) - 1) / 2) * height for row in range(len(rows))]
        bars = axes.barh(
            places,
            [row["times_faster"][peer] for row in rows],
            height=height,
            label=f"than {peer}",
            color=colours[peer],
        )
        axes.bar_label(bars, fmt="%.1f×", padding=3, fontsize=9)
    axes.axvline(1, color="0.3", linewidth=1)
    axes.set_yticks(
        range(len(rows)),
        [
            f"{row['name']}, {row['dtype']}\nT={row['shape']['queries']}, S={row['shape']['keys']}"
            for row in rows
        ],
    )
    axes.invert_yaxis()
    axes.set_xlabel("times faster (ratio of medians; right of 1 is faster)")
    about = result["machine"]
    axes.set_title(
        f"energy_attn {about['energy_attn']} on {about['processor']}, {about['cores']} cores, "
        f"jax {about['jax']}",
        fontsize=10,
    )
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
