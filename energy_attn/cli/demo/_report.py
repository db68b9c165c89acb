"""The output of the demo: a table, bytes as text, and a picture of the free energy of each head."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class TableRow(NamedTuple):
    """A line of the table."""

    what: str  # the quantity
    measured: str  # its value
    beside: str = ""  # the value wanted, or one to compare with
    holds: bool | None = None  # whether the value is right; None where no value is wanted
    kernel: str = ""  # the kernels that ran; empty where the value is the same with any


def table(lines: list[TableRow]) -> str:
    lines = [TableRow("", "measured", "wanted, or to compare", kernel="kernel"), *lines]
    what = max(len(line.what) for line in lines)
    measured = max(len(line.measured) for line in lines)
    kernel = max(len(line.kernel) for line in lines)
    signs = {True: "✓", False: "✗", None: " "}
    rows = [
        f"{line.what:<{what}}  {line.measured:>{measured}}  {signs[line.holds]}  {line.kernel:<{kernel}}  {line.beside}"
        for line in lines
    ]
    rows.insert(1, "─" * max(map(len, rows)))
    return "\n".join(row.rstrip() for row in rows)


def readable(text: np.ndarray | bytes) -> str:
    """Bytes as text; invalid UTF-8 as `\\xNN`."""
    return bytes(text).decode("utf-8", "backslashreplace")


_SHOWN = {"\n": "↵", "\t": "⇥", " ": "·"}
# A grey that reads on white and on black, and no background: pages are either.
_INK = "#7f7e7d"
_SETTINGS: dict[Any, Any] = {
    "axes.labelcolor": _INK,
    "savefig.transparent": True,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def character(byte: int) -> str:
    text = chr(byte) if byte < 127 else "�"
    return _SHOWN.get(text, text if text.isprintable() else "�")


def draw(path: Path, energies: np.ndarray, text: np.ndarray, context: int) -> str | None:
    """Draws the energies below the decoded text."""
    try:
        from matplotlib import rc_context
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"

    with rc_context(_SETTINGS):
        layers, count, heads = energies.shape
        width, height = 1.6 + 0.135 * count, 1.2 + layers * (0.12 + 0.24 * heads)
        figure = Figure(figsize=(max(8.0, width), height), layout="constrained")
        panels = figure.subplots(layers, 1, sharex=True, squeeze=False)
        low, high = np.percentile(energies, [0.5, 99.5])
        colours = ScalarMappable(Normalize(low, high), "magma")
        for layer, panel in enumerate(panels[:, 0]):
            panel.imshow(colours.to_rgba(energies[layer].T), aspect="auto", interpolation="nearest")
            panel.set_yticks(range(heads), [f"{head}" for head in range(heads)], fontsize=8)
            panel.set_ylabel(f"layer {layer}\nhead", fontsize=9)
            panel.tick_params(length=0)
            panel.spines[:].set_visible(False)
        bottom = panels[-1, 0]
        bottom.set_xticks(range(count), [character(byte) for byte in bytes(text)])
        for label in bottom.get_xticklabels():
            label.set(family="monospace", fontsize=9)
        bottom.set_xlabel(f"decoded bytes, after {context:,} bytes of context", fontsize=9)
        figure.suptitle("Free energy of each head as it reads the text that it wrote", fontsize=12)
        bar = figure.colorbar(colours, ax=panels[:, 0], pad=0.01, aspect=40)
        bar.set_label("F = log Σ exp(scores), nats", fontsize=9)
        bar.ax.tick_params(labelsize=8)
        bar.outline.set_visible(False)
        figure.savefig(path, dpi=150)
    return None
