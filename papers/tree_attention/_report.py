"""Reports of the scripts in this folder: tables of text, and figures."""

import collections
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

Result = dict[str, Any]

NAIVE, AUTO, NO_EXCHANGE = "pmax + psum + psum", "tree, auto", "no exchange"
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
    NO_EXCHANGE: "0.75",
}
METHOD_COLOURS = {"tree": "#4c72b0", "ring, keys": "#c44e52", "ring, queries": "#8172b3"}
MIB = 2**20


def machine() -> Result:
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
    """Parses a list of numbers such as 2,4,8."""
    return [int(part) for part in text.split(",")]


def write(path: Path, result: Result, draw: Callable[[Result, Path], None] | None = None) -> None:
    """Writes a result as JSON, and its figure with the same name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    if draw is not None:
        draw(result, path.with_suffix(".svg"))


def save(figure: Any, path: Path) -> None:
    """Writes a figure as SVG without its date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    print(f"wrote {path}")


def short(tokens: int) -> str:
    """Formats 8192 as 8k."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens}"


def _panel_over_lengths(panel: Any, lengths: Sequence[int], title: str, xlabel: str) -> None:
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(lengths, [short(x) for x in lengths], fontsize=8)
    panel.minorticks_off()
    panel.set_title(title, fontsize=9)
    panel.set_xlabel(xlabel)
    panel.grid(axis="y", color="0.9", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)


def rows(hosts: Sequence[Result]) -> list[Result]:
    """A row for each method, from the measurements of all hosts.

    A step ends when the last host has its answer, so a turn counts as long as on the slowest.
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


def table(title: str, rows: Iterable[Result]) -> str:
    """Formats rows with the same fields as aligned columns, below a title."""

    def cell(x: object) -> str:
        return f"{x:.4g}" if isinstance(x, float) else "" if x is None else str(x)

    rows = list(rows)
    lines = [list(rows[0]), *([cell(x) for x in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ("  ".join(map(str.rjust, line, widths)) for line in lines)
    return "\n".join(["", title, *aligned])


def latency_table(run: Result) -> str:
    """Formats a run of `latency.py`."""
    network, medians = run["network"], {row["method"]: row["median_ms"] for row in run["rows"]}
    title = f"{run['hosts']} hosts × {run['devices']}, S = {run['keys']}, {network}; auto is {run['auto']}"
    fields = "method", "median_ms", "min_ms", "max_ms", "rounds", "bytes", "error"
    return table(
        title,
        (
            {name: row[name] for name in fields}
            | {"× naive": medians[NAIVE] / row["median_ms"]}
            | {f"model {x}": (row["model"] or {}).get(x) for x in ("ms", "rounds", "bytes")}
            for row in run["rows"]
        ),
    )


def draw_latency(result: Result, path: Path) -> None:
    """Draws times against context lengths, one panel per host count."""
    hosts = list(dict.fromkeys(run["hosts"] for run in result["runs"]))
    size = (2.6 + 2.6 * len(hosts), 4.2)
    options: Result = {"sharey": True, "squeeze": False, "layout": "constrained"}
    figure, panels = pyplot.subplots(1, len(hosts), figsize=size, **options)
    for panel, number in zip(panels[0], hosts, strict=True):
        runs = [run for run in result["runs"] if run["hosts"] == number]
        keys = [run["keys"] for run in runs]
        for place, (name, colour) in enumerate(COLOURS.items()):
            found = [row for run in runs for row in run["rows"] if row["method"] == name]
            if len(found) < len(runs):
                continue
            middles = [row["median_ms"] for row in found]
            spread = [
                [abs(row["median_ms"] - row[end]) for row in found] for end in ("min_ms", "max_ms")
            ]
            panel.errorbar(
                # shifted, so that error bars do not overlap
                [count * 1.04 ** (place - len(COLOURS) / 2) for count in keys],
                middles,
                spread,
                color=colour,
                linestyle="--" if name in (NO_EXCHANGE, AUTO) else "-",
                linewidth=1.4,
                elinewidth=0.7,
                marker="o",
                markersize=3.5,
                label=name,
            )
        each = "" if runs[0]["devices"] == 1 else f" × {runs[0]['devices']} devices"
        _panel_over_lengths(panel, keys, f"{number} hosts{each}", "keys")
    panels[0, 0].set_ylabel("ms for a decode step (median, min to max)")
    network = result["runs"][0]["network"]
    link = (
        f": {network['mbit']:g} Mbit/s, {network['latency_ms']:g} ms" if "mbit" in network else ""
    )
    figure.suptitle(
        f"{network['kind']}{link}; {result['heads']} heads of {result['width']}, {result['dtype']}, "
        f"jax {result['machine']['jax']}",
        fontsize=10,
    )
    labels = panels[0, -1].get_legend_handles_labels()
    figure.legend(*labels, frameon=False, loc="outside right center", fontsize=9)
    save(figure, path)


def draw_points(fitted: Sequence[Any], unseen: Sequence[Any], band: float, path: Path) -> None:
    """Draws measured against predicted exchanges, hollow where the model was not fitted to them."""
    pyplot.rcParams.update({"svg.hashsalt": "energy_attn", "svg.fonttype": "none", "font.size": 9})
    figure, axes = pyplot.subplots(figsize=(6.4, 5.6), layout="constrained")
    predictions = [point.predicted for point in (*fitted, *unseen) if point.resolved]
    span = [min(predictions) / 2, max(predictions) * 2]
    axes.plot(span, span, color="0.4", linewidth=0.8, zorder=0)
    low, high = ([end * factor for end in span] for factor in (1 / band, band))
    axes.fill_between(span, low, high, color="0.92", zorder=-1, label=f"within {band}")
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
            marker="o",
            markersize=3.5,
            elinewidth=0.7,
            label="_" if method in labelled else method,
        )
        labelled.add(method)
    axes.set(xscale="log", yscale="log", xlim=span, ylim=span)
    axes.set_xlabel("ms by the model")
    axes.set_ylabel("ms measured: a step less the attention in it (median, 95% interval)")
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    save(figure, path)


def mean_and_error(seconds: dict[str, float], digits: int = 4) -> str:
    """Formats a mean and its standard error."""
    return f"{seconds['mean']:.{digits}f}±{seconds['error']:.{digits}f}"


def run_table(run: Result) -> str:
    """Formats the times of one group of devices by `tables.py`, a line for each prompt and method."""
    title = f"{run['devices']} devices ({run['platform']}), {run['processes']} processes; mean ± standard error"
    return table(
        title,
        (
            {
                "prompt": short(row["prompt"]),
                "read, s": mean_and_error(row["prompt_s"]),
                "method": name,
                "decoded, s": mean_and_error(x["decode_s"]),
                "both, s": mean_and_error(x["total_s"]),
                "× tree": x["decode_s"]["mean"] / row["methods"]["tree"]["decode_s"]["mean"],
                "bytes a step": sum(kind["bytes"] for kind in x["sent_per_step"].values()),
                "model": sum(kind["bytes"] for kind in x["predicted_per_step"].values()),
                "tokens": "same" if x["same_tokens"] else "differ from the tree's",
            }
            for row in run["rows"]
            for name, x in row["methods"].items()
        ),
    )


def paper_table(rows: Iterable[Result]) -> str:
    """Formats the paper's times of a prompt and ten tokens, and the cost model's of a step."""
    return table(
        "The paper's tables 1 and 2, s for a prompt and ten tokens; and by the model ms of a step, s of a prompt",
        (
            {
                "system": row["system"],
                "prompt": short(row["prompt"]),
                "tree, s": mean_and_error(row["paper"]["tree"], 2),
                "ring, s": mean_and_error(row["paper"]["ring"], 2),
                "(ring - tree) / 10, ms": 1e3 * row["step_difference_s"],
                **{f"model, {x}": 1e3 * y for x, y in row["predicted"].items() if x != "prompt"},
                "model, prompt": row["predicted"]["prompt"],
            }
            for row in rows
        ),
    )


def case_table(case: Result) -> str:
    """Formats a model that was compiled for a target, a line for each program."""
    title = (
        f"{case['model']} on {case['target']}, weights {case['weights']}, {case['slots']} slots; "
        f"a device has {case['memory'] / 1e9:g} GB, and holds and sends:"
    )
    return table(
        title,
        (
            {"program": name, "GB": x["holds"] / 1e9, "sends": x["sends"]}
            | {"attention, by the model": x.get("attention_sends")}
            for name, x in case["programs"].items()
        ),
    )


def draw_tables(result: Result, path: Path) -> None:
    """Draws the times of decode steps over lengths of prompts, ours and those derived from the paper's tables."""
    runs, paper = result["runs"], result["paper"]
    systems = list(dict.fromkeys(row["system"] for row in paper))
    count = len(runs) + len(systems)
    figure, panels = pyplot.subplots(
        1, count, figsize=(1.0 + 2.5 * count, 3.8), squeeze=False, layout="constrained"
    )
    for panel, run in zip(panels[0], runs, strict=False):
        prompts = [row["prompt"] for row in run["rows"]]
        for name, colour in METHOD_COLOURS.items():
            times = [row["methods"][name]["decode_s"] for row in run["rows"]]
            scale = 1e3 / result["tokens"]
            mean, error = ([scale * x[key] for x in times] for key in ("mean", "error"))
            panel.errorbar(
                prompts, mean, error, color=colour, marker="o", markersize=3.5, label=name
            )
        several = f", {run['processes']} processes" if run["processes"] > 1 else ""
        _panel_over_lengths(panel, prompts, f"here: {run['devices']} devices{several}", "prompt")
    panels[0, 0].set_ylabel("ms for a decode step")
    curves = {
        "paper: (ring - tree) / 10": ("k", "-", lambda row, x: row["step_difference_s"]),
        "model: ring of keys - tree": ("#c44e52", "--", lambda row, x: x["ring"] - x["tree"]),
        "with repeated keys": ("#dd8452", ":", lambda row, x: x["repeated"] - x["tree"]),
        "model: ring of queries": ("#8172b3", "--", lambda row, x: x["queries"]),
        "model: tree": ("#4c72b0", "--", lambda row, x: x["tree"]),
    }
    for panel, system in zip(panels[0, len(runs) :], systems, strict=True):
        system_rows = [row for row in paper if row["system"] == system]
        prompts = [row["prompt"] for row in system_rows]
        for name, (colour, line, seconds) in curves.items():
            milliseconds = [1e3 * seconds(row, row["predicted"]) for row in system_rows]
            style: Result = {"color": colour, "linestyle": line, "label": name}
            panel.plot(prompts, milliseconds, marker="o", markersize=3, **style)
        # without labels that would overlap
        ticks = [x for x in prompts if not any(x / 1.3 < y < x for y in prompts)]
        _panel_over_lengths(panel, ticks, f"{system}, {system_rows[0]['model']}", "prompt")
    for place, side in ((0, "left"), (-1, "right")):
        labels = panels[0, place].get_legend_handles_labels()
        location = f"outside lower {side}"
        figure.legend(*labels, loc=location, ncols=len(labels[1]), frameon=False, fontsize=8)
    save(figure, path)


def memory_table(rows: Iterable[Result]) -> str:
    """Formats the results of `memory.py`, in MiB for each device."""
    sizes = "held", "temporaries", "model", "paper"
    fields = "device", "devices", "keys", "sharded", "heads", "kv_heads", "method"
    return table(
        "MiB on each device",
        (
            {name: row[name] for name in fields} | {x: (row[x] or 0) / MIB for x in sizes}
            for row in rows
        ),
    )


def draw_memory(result: Result, path: Path) -> None:
    """Draws the memory of a decode step, over keys and over devices: compiled, by model and by paper."""
    rows = result["rows"]
    one = [row for row in rows if row["target"] == "v5p" and not row["sharded"]]
    middle = sorted({row["keys"] for row in one})[1] if one else 0
    panels = {
        "keys": ("8 TPU v5p", [row for row in one if row["devices"] == 8]),
        "devices": (
            f"TPU v5p, {middle // 1024}k keys",
            [row for row in one if row["keys"] == middle],
        ),
        "heads": (
            "2 RTX 4090, as in the paper",
            [row for row in rows if row["target"] == "rtx4090"],
        ),
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(9.6, 3.8), layout="constrained")
    for panel, (axis, (title, panel_rows)) in zip(axes, panels.items(), strict=True):

        def place(row: Result, axis: str = axis) -> int:
            return row[axis] * (row["width"] if axis == "heads" else 1)

        for name, colour in METHOD_COLOURS.items():
            swept = sorted((x for x in panel_rows if x["method"] == name), key=place)
            # a line if several are compared
            styles = {"held": "o", "model": "-", "paper": ":"} if len(swept) > 1 else {"held": "o"}
            for field, style in styles.items():
                sizes = [x[field] / MIB for x in swept if x[field] is not None]
                if swept and len(sizes) == len(swept):
                    label = f"{name}, {'compiled' if field == 'held' else field}"
                    places = [place(x) for x in swept]
                    panel.plot(places, sizes, style, color=colour, markersize=4, label=label)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        ticks = sorted({place(x) for x in panel_rows})
        panel.set_xticks(ticks, [f"{x // 1024}k" if x >= 2**16 else f"{x}" for x in ticks])
        lowest, highest = panel.get_ylim()
        sizes = [2**i for i in range(20) if lowest <= 2**i <= highest]
        panel.set_yticks(sizes, [f"{size:,}" for size in sizes])
        panel.minorticks_off()
        panel.set_title(title, fontsize=10)
        panel.set_xlabel({"heads": "hidden size"}.get(axis, axis))
        panel.grid(axis="y", color="0.9", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("MiB on a device, a decode step")
    handles = dict(zip(*axes[0].get_legend_handles_labels()[::-1], strict=True))
    options: Result = {"frameon": False, "loc": "outside lower center", "ncols": 3, "fontsize": 8}
    figure.legend(handles.values(), handles, **options)
    save(figure, path)
