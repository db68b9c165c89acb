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
            where, lengths = bars.setdefault(peer, ([], []))
            where.append(top + i * _HEIGHT)
            lengths.append(times)
        top += _HEIGHT * max(len(peers), 1) + 0.35
    figure, axes = pyplot.subplots(figsize=(7.5, 0.8 * top + 1.4), layout="constrained")
    for peer, (where, lengths) in bars.items():
        drawn = axes.barh(where, lengths, height=_HEIGHT, label=f"than {peer}")
        axes.bar_label(drawn, fmt="%.2g×", padding=3, fontsize=9)
    axes.axvline(1, color="0.3", linewidth=1)
    axes.set_yticks(places, [_label(row) for row in result["times"]], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("times faster (ratio of medians; right of 1 is faster)")
    about = result["machine"]
    on_cpu = f"{about['processor']}, {about['cores']} cores"
    where = on_cpu if about["device"] == "cpu" else about["device"]
    title = f"energy_attn {about['energy_attn']} on {where}, jax {about['jax']}"
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    if bars:
        axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _label(row: dict[str, Any]) -> str:
    of = row.get("of_bandwidth", {}).get(OURS)
    read = "" if of is None else f", {of:.0%} of the bandwidth"
    causal = ", causal" if row.get("causal") else ""
    return f"{row['name']}, {row['dtype']}{causal}\n{sizes_of(row)}{read}"
