"""The report of `tables.py`: its measurements, the paper's, compiled programs; and a plot."""

from pathlib import Path
from typing import Any

from _report import panel_over_lengths, pyplot, short

COLOURS = {"tree": "#4c72b0", "ring, keys": "#c44e52", "ring, queries": "#8172b3"}


def run_table(run: dict[str, Any]) -> str:
    """The times of one group of devices, a line for each prompt and method."""
    lines = [
        f"\n{run['devices']} devices ({run['platform']}), {run['processes']} processes; seconds, "
        "mean ± standard error",
        f"{'prompt':>8} {'read':>15}  {'':14} {'decoded':>16} {'both':>15} {'× tree':>7} "
        f"{'bytes a step':>13} {'model':>13}",
    ]
    for row in run["rows"]:
        tree = row["methods"]["tree"]["decode_s"]["mean"]
        for name, x in row["methods"].items():
            sent, prediction = (
                sum(kind["bytes"] for kind in x[field].values())
                for field in ("sent_per_step", "predicted_per_step")
            )
            lines.append(
                f"{short(row['prompt']):>8} {time(row['prompt_s']):>15}  {name:14} "
                f"{time(x['decode_s']):>16} {time(x['total_s']):>15} "
                f"{x['decode_s']['mean'] / tree:7.2f} {sent:13} {prediction:13}"
                + ("" if x["same_tokens"] else "  other tokens than the tree's")
            )
    return "\n".join(lines)


def paper_table(rows: list[dict[str, Any]]) -> str:
    """Formats the paper's times and the cost model's."""
    lines = [
        "\nThe paper's tables 1 and 2: seconds for a prompt and ten tokens, ring of keys and tree. Beside "
        "them, of a step: (ring - tree) / 10 in the paper and by the model, ms; the model's tree, ring of "
        "queries and scatter of states, ms; and the least time for the prompt, s",
        f"{'':12} {'prompt':>6} {'tree':>12} {'ring':>12} {'ratio':>6} | {'paper':>7} {'model':>7} "
        f"{'repeated':>9} | {'tree a step':>12} {'queries':>8} {'scatter':>8} {'prompt':>7}",
    ]
    for row in rows:
        prediction, paper = row["predicted"], row["paper"]
        ratio = paper["ring"]["mean"] / paper["tree"]["mean"]
        ring, repeated = (
            1e3 * (prediction[name] - prediction["tree"]) for name in ("ring", "repeated")
        )
        lines.append(
            f"{row['system']:12} {short(row['prompt']):>6} {time(paper['tree'], 2):>12} "
            f"{time(paper['ring'], 2):>12} {ratio:6.1f} | {1e3 * row['step_difference_s']:7.0f} "
            f"{ring:7.1f} {repeated:9.1f} | {1e3 * prediction['tree']:12.2f} {1e3 * prediction['queries']:8.2f} "
            f"{1e3 * prediction['scatter']:8.2f} {prediction['prompt']:7.2f}"
        )
    return "\n".join(lines)


def case_table(case: dict[str, Any]) -> str:
    """A model compiled for a target, a line for each program."""
    lines = [
        f"\n{case['model']} on {case['target']}, weights {case['weights']}, {case['slots']} slots; "
        f"of {case['memory'] / 1e9:g} GB a device holds, and sends:"
    ]
    for name, x in case["programs"].items():
        kinds = ", ".join(
            f"{kind['rounds']} {collective} of {kind['bytes']} B"
            for collective, kind in x["sends"].items()
        )
        prediction = "; ".join(
            f"attention by the model: {kind['rounds']} {collective} of {kind['bytes']} B"
            for collective, kind in x.get("attention_sends", {}).items()
        )
        lines.append(f"{name:12} {x['holds'] / 1e9:7.2f} GB  {kinds}  {prediction}")
    return "\n".join(lines)


def time(seconds: dict[str, float], digits: int = 4) -> str:
    """A mean and its standard error."""
    return f"{seconds['mean']:.{digits}f}±{seconds['error']:.{digits}f}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws the times of decode steps over lengths of prompts, ours and those derived from the paper's tables."""
    runs, paper = result["runs"], result["paper"]
    systems = list(dict.fromkeys(row["system"] for row in paper))
    count = len(runs) + len(systems)
    figure, panels = pyplot.subplots(
        1, count, figsize=(1.0 + 2.5 * count, 3.8), squeeze=False, layout="constrained"
    )
    for panel, run in zip(panels[0], runs, strict=False):
        prompts = [row["prompt"] for row in run["rows"]]
        for name, colour in COLOURS.items():
            times = [row["methods"][name]["decode_s"] for row in run["rows"]]
            scale = 1e3 / result["tokens"]
            mean, error = ([scale * x[key] for x in times] for key in ("mean", "error"))
            panel.errorbar(
                prompts, mean, error, color=colour, marker="o", markersize=3.5, label=name
            )
        several = f", {run['processes']} processes" if run["processes"] > 1 else ""
        panel_over_lengths(panel, prompts, f"here: {run['devices']} devices{several}", "prompt")
    panels[0, 0].set_ylabel("ms for a decode step")
    for panel, system in zip(panels[0, len(runs) :], systems, strict=True):
        rows = [row for row in paper if row["system"] == system]
        prompts = [row["prompt"] for row in rows]
        predictions = [row["predicted"] for row in rows]
        differences = {
            "paper: (ring - tree) / 10": ([row["step_difference_s"] for row in rows], "k", "-"),
            "model: ring of keys - tree": (
                [x["ring"] - x["tree"] for x in predictions],
                "#c44e52",
                "--",
            ),
            "with repeated keys": (
                [x["repeated"] - x["tree"] for x in predictions],
                "#dd8452",
                ":",
            ),
            "model: ring of queries": ([x["queries"] for x in predictions], "#8172b3", "--"),
            "model: tree": ([x["tree"] for x in predictions], "#4c72b0", "--"),
        }
        for name, (seconds, colour, line) in differences.items():
            milliseconds = [1e3 * x for x in seconds]
            style: dict[str, Any] = {"color": colour, "linestyle": line, "label": name}
            panel.plot(prompts, milliseconds, marker="o", markersize=3, **style)
        # without labels that would overlap
        ticks = [x for x in prompts if not any(x / 1.3 < y < x for y in prompts)]
        panel_over_lengths(panel, ticks, f"{system}, {rows[0]['model']}", "prompt")
    our_labels, paper_labels = (panels[0, place].get_legend_handles_labels() for place in (0, -1))
    style = {"frameon": False, "fontsize": 8}
    figure.legend(*our_labels, loc="outside lower left", ncols=len(our_labels[1]), **style)
    figure.legend(*paper_labels, loc="outside lower right", ncols=len(paper_labels[1]), **style)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    print(f"wrote {path}")
