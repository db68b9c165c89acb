"""The picture of a benchmark."""

from pathlib import Path
from typing import Any

from ._cases import BARE, CUDNN, DENSE, FLASH, JAX_NN, ONE_GRADIENT, ONE_PASS, PYTORCH
from ._generation import MODEL, PLAIN
from ._llama import TRANSFORMERS
from ._masks import CAUSAL
from ._speculative import DECODE, PYTHON

_COLOURS = {
    JAX_NN: "#4c72b0",
    CUDNN: "#4c72b0",
    PYTORCH: "#dd8452",
    FLASH: "#55a868",
    BARE: "#8c8c8c",
    DENSE: "#4c72b0",
    ONE_PASS: "#8c8c8c",
    CAUSAL: "#dd8452",
    ONE_GRADIENT: "#8c8c8c",
    DECODE: "#8c8c8c",
    PYTHON: "#dd8452",
    PLAIN: "#55a868",
    MODEL: "#8172b3",
    TRANSFORMERS: "#dd8452",
}


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws, for every case, how many times faster it is than each peer, into `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["times"]
    height = 0.28
    places: list[float] = []
    bars: dict[str, tuple[list[float], list[float]]] = {}
    top = 0.0
    for row in rows:
        peers = row["times_faster"]
        places.append(top + height * (len(peers) - 1) / 2)
        for i, (peer, times) in enumerate(peers.items()):
            where, lengths = bars.setdefault(peer, ([], []))
            where.append(top + i * height)
            lengths.append(times)
        top += height * max(len(peers), 1) + 0.35
    figure, axes = pyplot.subplots(figsize=(7.5, 0.8 * top + 1.4), layout="constrained")
    for peer, (where, lengths) in bars.items():
        drawn = axes.barh(where, lengths, height=height, label=f"than {peer}", color=_COLOURS[peer])
        axes.bar_label(drawn, fmt="%.2g×", padding=3, fontsize=9)
    axes.axvline(1, color="0.3", linewidth=1)
    axes.set_yticks(places, [_label(row) for row in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("times faster (ratio of medians; right of 1 is faster)")
    about = result["machine"]
    where = (
        f"{about['processor']}, {about['cores']} cores"
        if about["device"] == "cpu"
        else about["device"]
    )
    axes.set_title(
        f"energy_attn {about['energy_attn']} on {where}, jax {about['jax']}", fontsize=10
    )
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    if bars:
        axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _label(row: dict[str, Any]) -> str:
    of = row.get("of_bandwidth", {}).get("energy_attn")
    read = "" if of is None else f", {of:.0%} of the bandwidth"
    causal = ", causal" if row.get("causal") else ""
    return f"{row['name']}, {row['dtype']}{causal}\n{row['sizes']}{read}"
