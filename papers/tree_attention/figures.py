"""Draws the figures of the pages from committed results: python -m papers.tree_attention.figures [FOLDER].

It writes benchmarks/latency.svg, benchmarks/memory.svg, benchmarks/tables.svg and choosing/measured.svg, by default
into `docs/`. Nothing is measured.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from . import compare

Result = dict[str, Any]
DOCS = Path(__file__).resolve().parents[2] / "docs"
COLOURS = {
    "ring, keys": "#c44e52",
    "pmax + psum + psum": "#8c8c8c",
    "tree, allreduce": "#dd8452",
    "tree, gather": "#ccb974",
    "ring, queries": "#8172b3",
    "scatter, sums": "#937860",
    "scatter, exchange": "#da8bc3",
    "tree, butterfly": "#4c72b0",
    "tree, halving": "#b0467e",
    "tree, hierarchical": "#64b5cd",
    "tree, auto": "#55a868",
    "no exchange": "0.75",
}
METHOD_COLOURS = {"tree": "#4c72b0", "ring, keys": "#c44e52", "ring, queries": "#8172b3"}
DOTS: Result = {"marker": "o", "markersize": 3.5}
STYLE: Result = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
    "svg.hashsalt": "energy_attn",
}
MIB = 2**20


def latency() -> Any:
    """Times of decode steps against context lengths, one panel per host count."""
    result = json.loads((DOCS / "benchmarks" / "latency.json").read_text())
    hosts = list(dict.fromkeys(run["hosts"] for run in result["runs"]))
    size = 2.6 + 2.6 * len(hosts), 4.2
    figure, panels = pyplot.subplots(1, len(hosts), figsize=size, sharey=True)
    for panel, number in zip(panels, hosts, strict=True):
        runs = [run for run in result["runs"] if run["hosts"] == number]
        keys = [run["keys"] for run in runs]
        for place, (name, colour) in enumerate(COLOURS.items()):
            rows = [row for run in runs for row in run["rows"] if row["method"] == name]
            if len(rows) < len(runs):
                continue
            spread = [
                [abs(row["median_ms"] - row[end]) for row in rows] for end in ("min_ms", "max_ms")
            ]
            panel.errorbar(
                # shifted, so that error bars do not overlap
                [count * 1.04 ** (place - len(COLOURS) / 2) for count in keys],
                [row["median_ms"] for row in rows],
                spread,
                color=colour,
                linestyle="--" if name in ("no exchange", "tree, auto") else "-",
                linewidth=1.4,
                elinewidth=0.7,
                **DOTS,
                label=name,
            )
        _panel_over_lengths(panel, keys, f"{number} hosts", "keys")
    panels[0].set_ylabel("ms for a decode step (median, min to max)")
    network = result["runs"][0]["network"]
    figure.suptitle(
        f"{network['kind']}: {network['mbit']:g} Mbit/s, {network['latency_ms']:g} ms; "
        f"{result['heads']} heads of {result['width']}, {result['dtype']}, jax {result['machine']['jax']}",
        fontsize=10,
    )
    labels = panels[-1].get_legend_handles_labels()
    figure.legend(*labels, loc="outside right center", fontsize=9)
    return figure


def measured() -> Any:
    """Measured against predicted exchanges, hollow where the model was not fitted to them."""
    fitted, unseen = (compare.exchanges(names) for names in (compare.FITTED, compare.UNSEEN))
    figure, axes = pyplot.subplots(figsize=(6.4, 5.6))
    predictions = [point.predicted for point in (*fitted, *unseen) if point.resolved]
    span = [min(predictions) / 2, max(predictions) * 2]
    axes.plot(span, span, color="0.4", linewidth=0.8, zorder=0)
    low, high = ([end * factor for end in span] for factor in (1 / compare.BAND, compare.BAND))
    axes.fill_between(span, low, high, color="0.92", zorder=-1, label=f"within {compare.BAND}")
    labelled: set[str] = set()
    for method, exchanges in ((x, points) for x in COLOURS for points in (fitted, unseen)):
        points = [point for point in exchanges if point.resolved and point.method == method]
        if not points:
            continue
        axes.errorbar(
            [point.predicted for point in points],
            [point.measured for point in points],
            (
                [max(0.0, point.measured - point.low) for point in points],
                [max(0.0, point.high - point.measured) for point in points],
            ),
            color=COLOURS[method],
            markerfacecolor="white" if exchanges is unseen else COLOURS[method],
            linestyle="none",
            elinewidth=0.7,
            **DOTS,
            label="_" if method in labelled else method,
        )
        labelled.add(method)
    axes.set(xscale="log", yscale="log", xlim=span, ylim=span)
    axes.set_xlabel("ms by the model")
    axes.set_ylabel("ms measured: a step less the attention in it (median, 95% interval)")
    axes.grid(color="0.9", linewidth=0.6)
    axes.legend(fontsize="small")
    return figure


def tables() -> Any:
    """Times of decode steps over lengths of prompts, ours and those derived from the paper's tables."""
    result = json.loads(Path(__file__).with_name("tables.json").read_text())
    (run,), paper = result["runs"], result["paper"]
    systems = list(dict.fromkeys(row["system"] for row in paper))
    count = 1 + len(systems)
    figure, panels = pyplot.subplots(1, count, figsize=(1.0 + 2.5 * count, 3.8))
    prompts = [row["prompt"] for row in run["rows"]]
    for name, colour in METHOD_COLOURS.items():
        times = [row["methods"][name]["decode_s"] for row in run["rows"]]
        scale = 1e3 / result["tokens"]
        mean, error = ([scale * x[key] for x in times] for key in ("mean", "error"))
        panels[0].errorbar(prompts, mean, error, color=colour, **DOTS, label=name)
    _panel_over_lengths(panels[0], prompts, f"here: {run['devices']} devices", "prompt")
    panels[0].set_ylabel("ms for a decode step")
    curves = {
        "paper: (ring - tree) / 10": ("k", "-", lambda row, x: row["step_difference_s"]),
        "model: ring of keys - tree": ("#c44e52", "--", lambda row, x: x["ring"] - x["tree"]),
        "with repeated keys": ("#dd8452", ":", lambda row, x: x["repeated"] - x["tree"]),
        "model: ring of queries": ("#8172b3", "--", lambda row, x: x["queries"]),
        "model: tree": ("#4c72b0", "--", lambda row, x: x["tree"]),
    }
    for panel, system in zip(panels[1:], systems, strict=True):
        rows = [row for row in paper if row["system"] == system]
        prompts = [row["prompt"] for row in rows]
        for name, (colour, line, seconds) in curves.items():
            milliseconds = [1e3 * seconds(row, row["predicted"]) for row in rows]
            style: Result = {"color": colour, "linestyle": line, "label": name}
            panel.plot(prompts, milliseconds, marker="o", markersize=3, **style)
        # without labels that would overlap
        ticks = [x for x in prompts if not any(x / 1.3 < y < x for y in prompts)]
        _panel_over_lengths(panel, ticks, f"{system}, {rows[0]['model']}", "prompt")
    for place, side in ((0, "left"), (-1, "right")):
        labels = panels[place].get_legend_handles_labels()
        figure.legend(*labels, loc=f"outside lower {side}", ncols=len(labels[1]), fontsize=8)
    return figure


def memory() -> Any:
    """Memory of a decode step, over keys, devices and hidden sizes: compiled, by model and by paper."""
    rows = json.loads((DOCS / "benchmarks" / "memory.json").read_text())["rows"]
    rows = [x | {"hidden size": x["heads"] * x["width"]} for x in rows if not x["sharded"]]
    tpus, cards = ([x for x in rows if x["target"] == name] for name in ("v5p", "rtx4090"))
    middle = sorted({x["keys"] for x in tpus})[1]
    of_middle = [x for x in tpus if x["keys"] == middle]
    panels = {
        "keys": ("8 TPU v5p", [x for x in tpus if x["devices"] == 8]),
        "devices": (f"TPU v5p, {middle // 1024}k keys", of_middle),
        "hidden size": ("2 RTX 4090, as in the paper", cards),
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(9.6, 3.8))
    for panel, (axis, (title, panel_rows)) in zip(axes, panels.items(), strict=True):
        for name, colour in METHOD_COLOURS.items():
            swept = sorted((x for x in panel_rows if x["method"] == name), key=lambda x: x[axis])
            # a line if several are compared
            styles = {"held": "o", "model": "-", "paper": ":"} if len(swept) > 1 else {"held": "o"}
            for field, style in styles.items():
                sizes = [x[field] / MIB for x in swept if x[field] is not None]
                if swept and len(sizes) == len(swept):
                    label = f"{name}, {'compiled' if field == 'held' else field}"
                    places = [x[axis] for x in swept]
                    panel.plot(places, sizes, style, color=colour, markersize=4, label=label)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        ticks = sorted({x[axis] for x in panel_rows})
        panel.set_xticks(ticks, [f"{x // 1024}k" if x >= 2**16 else f"{x}" for x in ticks])
        lowest, highest = panel.get_ylim()
        sizes = [2**i for i in range(20) if lowest <= 2**i <= highest]
        panel.set_yticks(sizes, [f"{size:,}" for size in sizes])
        panel.set_title(title, fontsize=10)
        panel.set_xlabel(axis)
        _bare(panel)
    axes[0].set_ylabel("MiB on a device, a decode step")
    handles = dict(zip(*axes[0].get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _panel_over_lengths(panel: Any, lengths: Sequence[int], title: str, xlabel: str) -> None:
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    ticks = [f"{x // 1024}k" if x % 1024 == 0 else f"{x}" for x in lengths]
    panel.set_xticks(lengths, ticks, fontsize=8)
    panel.set_title(title, fontsize=9)
    panel.set_xlabel(xlabel)
    _bare(panel)


def _bare(panel: Any) -> None:
    panel.minorticks_off()
    panel.grid(axis="y", color="0.9", linewidth=0.8)


def main(folder: Path = DOCS) -> None:
    """Draws every figure into a folder."""
    small = {"svg.fonttype": "none", "font.size": 9}
    for name, draw, settings in (
        ("benchmarks/latency.svg", latency, {}),
        ("benchmarks/memory.svg", memory, {}),
        ("benchmarks/tables.svg", tables, {}),
        ("choosing/measured.svg", measured, small),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with pyplot.rc_context(STYLE | settings):
            figure = draw()
            figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        print(f"wrote {path}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
