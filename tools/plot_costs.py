#!/usr/bin/env python3
"""Draw the pictures of docs/choosing.md from the cost model: docs/choosing/volume.svg and merges.svg.

    python tools/plot_costs.py

Nothing is measured or compiled. The pictures are the same at every run.
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from energy_attn.distributed import cost

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "choosing"
COLOURS = {
    "allreduce": "#0072b2",
    "gather": "#e69f00",
    "butterfly": "#009e73",
    "hierarchical": "#cc79a7",
    "halving": "#56b4e9",
    "ring, keys": "#222222",
    "ring, queries": "#888888",
}
# Those that "auto" chooses from; the last needs two mesh axes.
MERGES = ("allreduce", "gather", "butterfly", "halving", "hierarchical")
# Of two lines in one place, the upper.
DASHES = {"ring, queries": "--", "hierarchical": "--"}
PANELS = {
    "8 hosts, 1 Gbit/s, 0.2 ms": cost.topology("ethernet", nodes=8, latency=4e-4),
    "4 hosts of 2 devices, 1 Gbit/s, 2 ms": cost.topology("ethernet", (2,), nodes=4, latency=4e-3),
    "16 DGX H100": cost.topology("dgx_h100", (8,), nodes=16),
    "TPU v5p, 4x4x8": cost.topology("tpu_v5p", (4, 4, 8)),
}


def volume() -> Figure:
    """Bytes that a device sends for one token of Llama 3.1 8B's attention, by length of the context."""
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    mesh = cost.topology("dgx_h100", (8,), nodes=16)
    lengths = [2**power for power in range(13, 24)]
    for name, (method, merge) in {
        "ring, keys": ("ring", "keys"),
        "gather": ("tree", "gather"),
        "ring, queries": ("ring", "queries"),
        "butterfly": ("tree", "butterfly"),
        "allreduce": ("tree", "allreduce"),
        "hierarchical": ("tree", "hierarchical"),
    }.items():
        shapes = [cost.Shape(1, 1, keys, 32, 8, 128) for keys in lengths]
        sent = [cost.volume(method, merge, shape, mesh) for shape in shapes]
        axes.loglog(lengths, sent, DASHES.get(name, "-"), color=COLOURS[name], label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("keys in the context")
    axes.set_ylabel("bytes sent per device, layer and token")
    axes.set_title("One query, 32 heads of 128, 8 of keys, bfloat16, 128 devices")
    _finish(axes)
    return figure


def merges() -> Figure:
    """Draws the predicted seconds of the merge strategies against the rows they merge."""
    figure, panels = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained", sharex=True)
    rows = [2**power for power in range(3, 17)]
    for axes, (title, mesh) in zip(panels.flat, PANELS.items(), strict=True):
        for merge in MERGES[: 5 if len(mesh.links) > 1 else 4]:
            shapes = [cost.Shape(1, 1, 0, heads, heads, 128) for heads in rows]
            seconds = [1e3 * cost.latency("tree", merge, shape, mesh) for shape in shapes]
            axes.loglog(rows, seconds, color=COLOURS[merge], label=merge)
        axes.set_title(title)
        _finish(axes)
    figure.supxlabel("rows: batch x queries x heads, of 128 numbers in bfloat16")
    figure.supylabel("milliseconds by the model")
    return figure


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")


def main() -> None:
    """Write both pictures."""
    plt.rcParams.update({"svg.hashsalt": "energy_attn", "svg.fonttype": "none", "font.size": 9})
    PICTURES.mkdir(exist_ok=True)
    for draw in (volume, merges):
        draw().savefig(PICTURES / f"{draw.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
