"""The plot of an energy report: the observables of each layer and head."""

from os import PathLike
from typing import Any

import numpy as np

from energy_attn.kernels.internal import received

from ..report._report import EnergyReport
from ._figure import colour_bar, new_figure, saved, ticks

# Field, title, unit and colours; quantities of one kind share theirs.
_PANELS = (
    ("energy", "free energy  F", "nats", "cividis"),
    ("entropy", "entropy  H", "nats", "viridis"),
    ("effective_keys", "effective keys  exp H", "keys", "viridis"),
    ("heat_capacity", "heat capacity  Var(s)", "nats²", "magma"),
    ("variance", "variance of the values  tr Σ", "value²", "magma"),
)
# With more cells than this, numbers in them would be too small to read.
_READABLE = 96


def energy_report(report: EnergyReport, path: str | PathLike[str] | None = None) -> Any:
    """Draws a report: a heat map of layers and heads for each quantity, and a scatter plot of all heads.

    If there are few cells, each shows its number. The last panel has a point for each head, by its
    energy and entropy: heads that attend to one key lie at the bottom, those that average over all
    keys at the top. Layers that have names are labelled with them.

    Args:
        report: means, as `energy_report(...)` returns them without `per_query`.
        path: the file to write; its suffix (`.png`, `.svg`, `.pdf`) is the format. None writes no
            file.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        TypeError: `report` is not an `EnergyReport`.
        ValueError: the report is of single queries.
        ImportError: matplotlib is not installed; the extra `plot` installs it.

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> figure = ea.plot.energy_report(ea.energy_report(ea.FreeEnergy().at(q, k, v)))
        >>> [panel.get_title() for panel in figure.axes[:2]]
        ['free energy  F', 'entropy  H']
    """
    if not isinstance(report, EnergyReport):
        raise TypeError(f"report: wanted an EnergyReport, got {received(report)}")
    shape = report.energy.shape
    if len(shape) != 2:
        raise ValueError(
            f"report: wanted means of shape (layers, heads), got {received(report.energy)}; "
            "leave per_query out"
        )
    layers, heads = shape
    across = min(max(1.6 + 0.42 * heads, 2.7), 5.5)
    down = min(max(1.2 + 0.34 * layers, 1.9), 5.5)
    figure = new_figure("energy_report", 3 * across, 2 * down)
    panels = figure.subplots(2, 3).ravel()
    labels = [report.names[i] for i in ticks(layers)] if report.names else None
    for panel, (field, title, unit, colours) in zip(panels, _PANELS, strict=False):
        values = np.asarray(getattr(report, field), np.float64)
        shown = np.ma.masked_invalid(values)
        image = panel.imshow(shown, aspect="auto", cmap=colours, interpolation="nearest")
        panel.set(title=title, xlabel="head", ylabel="layer")
        panel.set_xticks(ticks(heads))
        panel.set_yticks(ticks(layers))
        if labels and panel in panels[::3]:
            panel.set_yticks(ticks(layers), labels, fontsize=7)
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
        colour_bar(figure, panel, image, unit)
        if layers * heads <= _READABLE:
            _annotate(panel, image, values)
    _compare(figure, panels[-1], report)
    return saved(figure, path)


def _compare(figure: Any, panel: Any, report: EnergyReport) -> None:
    energy, entropy = (np.asarray(x, np.float64) for x in (report.energy, report.entropy))
    layers, heads = energy.shape
    layer = np.repeat(np.arange(layers), heads)
    drawn = panel.scatter(
        energy.ravel(), entropy.ravel(), 24, layer, cmap="plasma", edgecolors="0.6", linewidths=0.7
    )
    panel.set(title="every head", xlabel="free energy F, nats", ylabel="entropy H, nats")
    panel.spines[["top", "right"]].set_visible(False)
    colour_bar(figure, panel, drawn, "layer", ticks=ticks(layers))


def _annotate(panel: Any, image: Any, values: np.ndarray) -> None:
    for (layer, head), value in np.ndenumerate(values):
        if not np.isfinite(value):
            continue
        red, green, blue, _ = image.cmap(image.norm(value))
        light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
        panel.text(
            head,
            layer,
            f"{value:.3g}",
            ha="center",
            va="center",
            fontsize=7,
            color="black" if light else "white",
        )
