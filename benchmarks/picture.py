"""The picture of a suite's results."""

from pathlib import Path
from typing import Any

from .runner import OURS, sizes_of

_HEIGHT = 0.28


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws, for every case, how many times faster it is than each peer, into `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places: list[float] = []
    bars: dict[str, tuple[list[float], list[float]]] = {}
    top = 0.0
    for row in result["times"]:
        peers = row["times_faster"]
        places.append(top + _HEIGHT * (len(peers) - 1) / 2)
        for i, (peer, times) in enumerate(peers.items()):
            heights, lengths = bars.setdefault(peer, ([], []))
            heights.append(top + i * _HEIGHT)
            lengths.append(times)
        top += _HEIGHT * max(len(peers), 1) + 0.35
    figure, axes = pyplot.subplots(figsize=(7.5, 0.8 * top + 1.4), layout="constrained")
    for peer, (heights, lengths) in bars.items():
        drawn = axes.barh(heights, lengths, height=_HEIGHT, label=f"than {peer}")
        axes.bar_label(drawn, fmt="%.2g×", padding=3, fontsize=9)
    axes.axvline(1, color="0.3", linewidth=1)
    axes.set_yticks(places, [_label(row) for row in result["times"]], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("times faster (ratio of medians; right of 1 is faster)")
    about = result["machine"]
    on_cpu = f"{about['processor']}, {about['cores']} cores"
    device = on_cpu if about["device"] == "cpu" else about["device"]
    title = f"energy_attn {about['energy_attn']} on {device}, jax {about['jax']}"
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    if bars:
        axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _label(row: dict[str, Any]) -> str:
    share = row.get("of_bandwidth", {}).get(OURS)
    read = "" if share is None else f", {share:.0%} of the bandwidth"
    causal = ", causal" if row.get("causal") else ""
    return f"{row['name']}, {row['dtype']}{causal}\n{sizes_of(row)}{read}"
