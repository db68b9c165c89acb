"""Figures of the measurements, as SVG."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

# Colour-blind safe: colours of Okabe and Ito, the first made lighter.
BLUE, ORANGE, GREEN = COLOURS = ("#1f86cc", "#e69f00", "#009e73")


def draw_example(example: dict[str, Any]) -> Figure:
    """The row of attention in three panels, from `worked_example`."""
    figure = Figure(figsize=(11, 3.7), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    tokens = example["tokens"]
    weights, along = (np.asarray(example[name]) for name in ("weights", "along"))
    left.scatter(along, weights, 22, color=BLUE)
    for rank, i in enumerate(np.argsort(along)):  # alternating sides, as neighbours may be near
        offset, side = ((-4, -2), "right") if rank % 2 else ((4, 3), "left")
        point = along[i], weights[i]
        left.annotate(tokens[i], point, offset, textcoords="offset points", ha=side, fontsize=8)
    left.margins(x=0.12)
    left.axvline(0, color="0.6", linewidth=0.8)
    left.set(yscale="log", ylabel="weight", title=f"where “{example['query']}” looks")

    distance, largest = np.asarray(example["distance"]), example["eigenvalues"][0]
    middle.plot(distance, example["rate"], color=BLUE, label="rate function I")
    top = 1.15 * max(example["rate"])
    middle.plot(distance, distance**2 / (2 * largest), "--", color=ORANGE, label="y² / 2λ")
    for end in (0, -1):
        point = int(np.argmin(np.abs(along - distance[end])))
        middle.plot(distance[end], -np.log(weights[point]), "o", color=BLUE, markersize=5)
        middle.annotate(
            tokens[point],
            (distance[end], example["rate"][end]),
            (4 if end == 0 else -4, 5),
            textcoords="offset points",
            ha="left" if end == 0 else "right",
            fontsize=8,
        )
    middle.set(ylim=(-0.05 * top, top), title="to move the output along it", ylabel="nats")
    middle.legend(frameon=False, fontsize=8, loc="upper center")
    for axes in (left, middle):
        axes.set_xlabel("distance from the output, along the first direction")

    for (token, rate), colour in zip(example["towards"].items(), COLOURS, strict=True):
        right.plot(example["share"], rate, color=colour)
        right.plot(1, -np.log(weights[tokens.index(token)]), "o", color=colour, markersize=5)
        right.annotate(
            token, (1, rate[-1]), (-8, 0), textcoords="offset points", ha="right", fontsize=8
        )
    right.set(title="to move it to one value", xlabel="part of the way", ylabel="nats")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as a reproducible SVG, with words as text. Raises `OSError`."""
    style: dict[Any, Any] = {"svg.hashsalt": "energy_attn", "svg.fonttype": "none"}
    style["font.sans-serif"] = ["DejaVu Sans"]  # one font instead of a list in every word
    with matplotlib.rc_context(style):
        figure.savefig(path, metadata={"Date": None})
