"""Pictures of docs/heads.md, from the numbers that heads.py writes."""

from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure

FIRST_COLOUR, OTHER_COLOUR = "#1f86cc", "#d55e00"


def heat(panel: Any, values: Any, title: str, colours: str = "viridis", **options: Any) -> None:
    """Layers down, heads across, each number in its cell."""
    shown = np.asarray(values, np.float64)
    image = panel.imshow(shown, cmap=colours, aspect="auto", interpolation="nearest", **options)
    for (layer, head), x in np.ndenumerate(shown):
        light = np.dot(image.cmap(image.norm(x))[:3], (0.299, 0.587, 0.114)) > 0.5
        text = f"{round(x, 2) + 0.0:.2f}" if abs(x) < 9.995 else f"{x:.1f}"
        colour = "black" if light else "white"
        panel.text(head, layer, text, ha="center", va="center", fontsize=8, color=colour)
    panel.set(title=title, xlabel="head", ylabel="layer")
    panel.set_xticks(range(shown.shape[1]))
    panel.set_yticks(range(shown.shape[0]))
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)


def energies(report: dict[str, Any]) -> Figure:
    """Energies of the byte model's heads, and the cost of removing each."""
    figure, panels = plt.subplots(2, 3, figsize=(7.6, 4.8))
    mean = {name: x[0] for name, x in report["heads"].items()}
    heat(panels[0, 0], mean["relative_entropy"], "entropy S / log n")
    heat(panels[0, 1], mean["energy"], "free energy F, nats")
    heat(panels[0, 2], mean["heat_capacity"], "heat capacity C, nats²")
    for panel, kind in zip(panels[1], ("text", "repeats"), strict=False):
        shown = mean[f"mean on {kind}"]
        title = f"cost on {kind}, nats per byte"
        heat(panel, shown, title, "magma", norm=SymLogNorm(0.05))
    where = report["text"]["by_position, mean"]["relative_entropy"][0]
    heat(
        panels[1, 2],
        where,
        "rank correlation of S and\nthe head's effect, by query",
        "RdBu_r",
        vmin=-1,
        vmax=1,
    )
    return figure


def two_levels(weight: np.ndarray, others: int) -> np.ndarray:
    """The heat capacity of one key of this weight among `others` of equal scores."""
    gap = np.log(weight * others / (1 - weight))
    return weight * (1 - weight) * gap**2


def matches(report: dict[str, Any]) -> Figure:
    """Queries with and without an earlier occurrence: which heads tell them apart, and what the induction head does."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(8.2, 3.1))
    separation, queries = report["random"]["separation"]["others"], report["random"]["queries"]
    at = np.arange(np.size(separation["gap"][0]))
    for name, label, colour, mark in (
        ("relative_entropy", "entropy S", FIRST_COLOUR, "o"),
        ("heat_capacity", "heat capacity C", OTHER_COLOUR, "s"),
    ):
        value, error = (np.ravel(x) for x in separation[name])
        style = {"fmt": mark, "color": colour, "markersize": 4, "linewidth": 1}
        left.errorbar(at, value, 2 * error, label=label, **style)
    left.axhline(0.5, color="0.5", linewidth=0.8)
    layers, heads = np.shape(separation["gap"][0])
    left.set_xticks(at[::heads], [f"layer {i}" for i in range(layers)], ha="left")
    left.set(ylim=(0, 1), title="P(larger at a match), each head")
    left.legend(loc="upper left", fontsize=8)

    bins = np.linspace(0, 4, 25)
    for name, label, colour in (
        ("repeated", "with a match", FIRST_COLOUR),
        ("others", "without", OTHER_COLOUR),
    ):
        style = {"color": colour, "alpha": 0.55, "label": label}
        middle.hist(queries[name]["entropy"], bins, **style)
    middle.set(xlabel="entropy S, nats", ylabel="queries", title="The induction head")
    middle.legend(fontsize=8)

    induction = queries["repeated"]
    right.scatter(
        induction["matched_weight"],
        induction["heat_capacity"],
        8,
        color=FIRST_COLOUR,
        alpha=0.6,
        linewidths=0,
    )
    weight = np.linspace(0.002, 0.998, 200)
    others = round(1.5 * report["settings"]["half"])
    right.plot(weight, two_levels(weight, others), color="0.5", label="one key among equals")
    right.set(
        xlabel="weight of the match",
        ylabel="heat capacity C, nats²",
        title="Its heat capacity",
        ylim=(0, None),
    )
    right.legend(fontsize=8, loc="lower center")
    return figure


def costs(report: dict[str, Any]) -> Figure:
    """Draws the cost of each head of both models against its entropy and output norm."""
    figure, panels = plt.subplots(2, 2, figsize=(7.6, 5.4), sharey="row")
    models = (
        ("the byte model, nats per byte", report["heads"], "mean on text"),
        ("MiniLM, 1 − cosine", report["minilm"]["heads"], "mean"),
    )
    for row, (title, heads, cost) in zip(panels, models, strict=True):
        for panel, name, label in zip(
            row,
            ("relative_entropy", "varying_norm"),
            ("entropy S / log n", "norm of what varies in the output"),
            strict=True,
        ):
            x, y = (np.asarray(heads[z][0]) for z in (name, cost))
            layer = np.repeat(np.arange(len(x)), x.shape[1])
            drawn = panel.scatter(
                x.ravel(), y.ravel(), 26, layer, cmap="plasma", edgecolors="0.6", linewidths=0.6
            )
            panel.set(yscale="log", xlabel=label)
        row[0].set_ylabel(f"cost: {title}")
        bar = figure.colorbar(drawn, ax=row, pad=0.01, label="layer", ticks=range(len(x)))
        bar.outline.set_visible(False)
    return figure


def sinks(report: dict[str, Any]) -> Figure:
    """Draws the weight of [CLS] in each head of MiniLM, and the entropy with and without it."""
    figure, panels = plt.subplots(3, 1, figsize=(7.2, 7.0))
    mean = {name: x[0] for name, x in report["minilm"]["heads"].items()}
    heat(panels[0], mean["cost_of_first"], "free energy of [CLS], F − F′, nats", "magma")
    heat(panels[1], mean["relative_entropy"], "entropy S / log n", vmin=0, vmax=1)
    heat(
        panels[2],
        mean["relative_entropy_of_others"],
        "without [CLS]: S′ / log(n − 1)",
        vmin=0,
        vmax=1,
    )
    return figure
