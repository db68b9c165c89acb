"""The report of `latency.py`: the machine, rows, a table, and a plot."""

import collections
import importlib.metadata
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

NAIVE, AUTO, ALONE = "pmax + psum + psum", "tree, auto", "no exchange"
COLOURS = {
    "ring, keys": "#c44e52",
    NAIVE: "#8c8c8c",
    "tree, allreduce": "#dd8452",
    "tree, gather": "#ccb974",
    "ring, queries": "#8172b3",
    "scatter, sums": "#937860",
    "scatter, exchange": "#da8bc3",
    "tree, butterfly": "#4c72b0",
    "tree, halving": "#b0467e",
    "tree, hierarchical": "#64b5cd",
    AUTO: "#55a868",
    ALONE: "0.75",
}


def machine() -> dict[str, Any]:
    """The machine and the versions that the figures were measured with."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "energy_attn": importlib.metadata.version("energy_attn"),
    }


def integers(text: str) -> list[int]:
    """The numbers of a list such as 2,4,8."""
    return [int(part) for part in text.split(",")]


def panel_over_lengths(panel: Any, lengths: Sequence[int], title: str, xlabel: str) -> None:
    """Makes both axes of a panel logarithmic, with ticks at the lengths of its curves."""
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(lengths, [short(x) for x in lengths], fontsize=8)
    panel.minorticks_off()
    panel.set_title(title, fontsize=9)
    panel.set_xlabel(xlabel)
    panel.grid(axis="y", color="0.9", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)


def short(tokens: int) -> str:
    """8192 as 8k."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens}"


def rows(hosts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method, from the measurements of all hosts.

    A step lasts until the last host has its answer, so a turn counts as long as on the slowest.
    """
    rows_by_method = []
    for name, first in hosts[0].items():
        results = [host[name] for host in hosts]
        turns = [max(times) for times in zip(*(x["milliseconds"] for x in results), strict=True)]
        kinds: collections.Counter[str] = collections.Counter()
        for kind, _, count in first["collectives"]:
            kinds[kind] += count
        rows_by_method.append(
            {
                "method": name,
                "median_ms": round(statistics.median(turns), 2),
                "min_ms": round(min(turns), 2),
                "max_ms": round(max(turns), 2),
                "turns_ms": [round(x, 2) for x in turns],
                "bytes": sum(size * count for _, size, count in first["collectives"]),
                "rounds": sum(kinds.values()),
                "collectives": dict(kinds),
                "error": max(x["error"] for x in results),
            }
        )
    return rows_by_method


def table(run: dict[str, Any]) -> str:
    """A run in lines of text."""
    network, medians = run["network"], {row["method"]: row["median_ms"] for row in run["rows"]}
    network_line = network["kind"]
    if network.get("measured"):
        seen = network["measured"]
        network_line += (
            f" of {network['mbit']:g} Mbit/s, {network['latency_ms']:g} ms"
            f" (sockets: {seen['mbit']:.0f} Mbit/s, {seen['round_trip_ms']:.2f} ms there and back)"
        )
    lines = [
        f"\n{run['hosts']} hosts × {run['devices']}, S = {run['keys']}, {network_line}; "
        f"auto is {run['auto']}",
        f"{'':20} {'ms a step':>9} {'min … max':>17} {'× naive':>8} {'rounds':>6} "
        f"{'bytes':>9} {'error':>8}  model",
    ]
    for row in run["rows"]:
        model = row["model"]
        prediction = f"{model['ms']:.2f} ms, {model['rounds']}, {model['bytes']} B" if model else ""
        lines.append(
            f"{row['method']:20} {row['median_ms']:9.2f} "
            f"{row['min_ms']:7.2f} … {row['max_ms']:7.2f} "
            f"{medians[NAIVE] / row['median_ms']:8.2f} {row['rounds']:6} {row['bytes']:9} "
            f"{row['error']:8.1e}  {prediction}"
        )
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws times against context lengths, one panel per host count."""
    hosts = list(dict.fromkeys(run["hosts"] for run in result["runs"]))
    figure, panels = pyplot.subplots(
        1, len(hosts), figsize=(2.6 + 2.6 * len(hosts), 4.2), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for panel, number in zip(panels[0], hosts, strict=True):
        runs = [run for run in result["runs"] if run["hosts"] == number]
        keys = [run["keys"] for run in runs]
        for place, (name, colour) in enumerate(COLOURS.items()):
            rows = [[row for row in run["rows"] if row["method"] == name] for run in runs]
            if not all(rows):
                continue
            lows, middles, highs = (
                [row[0][field] for row in rows] for field in ("min_ms", "median_ms", "max_ms")
            )
            below, above = (
                [abs(middle - end) for middle, end in zip(middles, bounds, strict=True)]
                for bounds in (lows, highs)
            )
            panel.errorbar(
                # a little beside each other
                [count * 1.04 ** (place - len(COLOURS) / 2) for count in keys],
                middles,
                (below, above),
                color=colour,
                linestyle="--" if name in (ALONE, AUTO) else "-",
                linewidth=1.4,
                elinewidth=0.7,
                marker="o",
                markersize=3.5,
                label=name,
            )
        each = "" if runs[0]["devices"] == 1 else f" × {runs[0]['devices']} devices"
        panel_over_lengths(panel, keys, f"{number} hosts{each}", "keys")
    panels[0, 0].set_ylabel("ms for a decode step (median, min to max)")
    network = result["runs"][0]["network"]
    field = network["kind"]
    if "mbit" in network:
        field += f": {network['mbit']:g} Mbit/s, {network['latency_ms']:g} ms"
    figure.suptitle(
        f"{field}; {result['heads']} heads of {result['width']}, {result['dtype']}, "
        f"jax {result['machine']['jax']}",
        fontsize=10,
    )
    handles, labels = panels[0, -1].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside right center", fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
