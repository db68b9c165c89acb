"""The picture of a suite's results."""

from pathlib import Path
from typing import Any

from .runner import OURS, sizes_of

_HEIGHT = 0.42  # of a case, in inches


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws, for every case, how many times faster it is than each peer, into `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    rows = result["times"]
    points: dict[str, list[tuple[float, int]]] = {}
    for place, row in enumerate(rows):
        for peer, times in row["times_faster"].items():
            points.setdefault(peer, []).append((times, place))
    figure, axes = pyplot.subplots(figsize=(9, _HEIGHT * len(rows) + 1.6), layout="constrained")
    for peer, pairs in points.items():
        axes.scatter(*zip(*pairs, strict=True), s=36, alpha=0.8, label=f"than {peer}", zorder=3)
    axes.axvline(1, color="0.3", linewidth=1)
    axes.set_xscale("log")
    for axis in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        axis(FuncFormatter(lambda x, _: f"{x:g}" if f"{x:g}".strip("0.")[:1] in "125" else ""))
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=7)
    axes.grid(axis="y", color="0.9")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("times faster (ratio of medians; right of 1 is faster)")
    about = result["machine"]
    on_cpu = f"{about['processor']}, {about['cores']} cores"
    device = on_cpu if about["device"] == "cpu" else about["device"]
    title = f"energy_attn {about['energy_attn']} on {device}, jax {about['jax']}"
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if points:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    with pyplot.rc_context({"svg.fonttype": "none"}):  # letters, not their outlines
        figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _label(row: dict[str, Any]) -> str:
    share = row.get("of_bandwidth", {}).get(OURS)
    read = "" if share is None else f", {share:.0%} of the bandwidth"
    causal = ", causal" if row.get("causal") else ""
    return f"{row['name']}, {row['dtype']}{causal}\n{sizes_of(row)}{read}"
