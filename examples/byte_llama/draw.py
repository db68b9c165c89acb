"""Draws the training curves that train.py wrote, into curves.svg.

python examples/byte_llama/draw.py
"""

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
COMPARED = ("none", "z-loss", "entropy")
PANELS = {
    "loss": "loss, nats a byte",
    "energy": "mean |F|, nats",
    "largest_energy": "largest |F|, nats",
    "entropy": "mean entropy, nats",
}


def read(*names: str) -> dict[str, dict[str, Any]]:
    """Curves by name; raises `OSError` for a missing one."""
    return {name: json.loads((FOLDER / "curves" / f"{name}.json").read_text()) for name in names}


def draw(curves: dict[str, dict[str, Any]]) -> Any:
    """A panel for each quantity on held-out text over steps, with a line for each curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    for panel, (column, label) in zip(panels.flat, PANELS.items(), strict=True):
        for name, curve in curves.items():
            at = curve["columns"].index(column)
            rows = [row for row in curve["curve"] if row[0] > 1]
            panel.plot([row[0] for row in rows], [row[at] for row in rows], label=name)
        panel.set_ylabel(label)
        panel.grid(True)
    for panel in panels[1]:
        panel.set_xlabel("steps")
    if len(curves) > 1:
        panels[0, 0].legend(title="penalty")
    return figure


def main() -> int:
    """Draws the trainings that differ in their penalty."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "energy_attn"}):
        draw(read(*COMPARED)).savefig(FOLDER / "curves.svg", metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
