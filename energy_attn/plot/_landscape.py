"""The plot of a landscape."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from energy_attn.kernels.internal import checks

from ..report._landscape import Landscape
from ._images import colour_bar, new_figure


def landscape(plane: Landscape, axes: Iterable[Any] | None = None) -> Any:
    r"""Draws both planes of a landscape: contours of $F$ and of $I$ in nats, attention marked.

    On the left $F$, with an arrow for its slope at the source 0, which is attention. On the right
    $I$, with attention at its minimum; outside the hull of the values $I$ is infinite and the panel
    is empty. Needs matplotlib, which the extra `plot` installs.

    Args:
        plane: the result of [`landscape`][energy_attn.landscape].
        axes: two matplotlib axes to draw into; None makes a figure.

    Returns:
        The matplotlib `Figure`.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: `plane` is not the result of `landscape`.

    Source: see [`landscape`][energy_attn.landscape].

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 9, 2))
        >>> figure = ea.plot.landscape(ea.landscape(q[0], k, v, points=9))
        >>> [panel.get_title().split()[0] for panel in figure.axes[:2]]
        ['free', 'rate']
    """
    if not isinstance(plane, Landscape):
        raise TypeError(
            f"plane: wanted the result of energy_attn.landscape, got {checks.received(plane)}"
        )
    if axes is None:
        left, right = new_figure("landscape", 8.4, 3.9).subplots(1, 2)
    else:
        left, right = axes
    _draw_free_energy(left, plane)
    _draw_rate(right, plane)
    return left.figure


def _draw_free_energy(axes: Any, plane: Landscape) -> None:
    x, y, energies = (np.asarray(a) for a in (*plane.source, plane.free_energy))
    levels = np.linspace(energies.min(), energies.max(), 15)
    _contours(axes, x, y, energies, levels, cmap="viridis")
    # half as long as the panel, in any units
    slope = np.asarray(plane.slope)
    room = np.asarray([x[-1], y[-1]])
    longest = np.max(np.abs(slope) / room)
    if longest > 0:
        arrow = {"arrowstyle": "-|>", "color": "white", "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", tuple(slope * 0.5 / longest), (0.0, 0.0), arrowprops=arrow)
    axes.plot(0, 0, "o", color="white", markersize=5)
    axes.set(title="free energy F(ζ); its slope at 0 is attention")
    axes.set(xlabel="source along $u_1$", ylabel="source along $u_2$")


def _draw_rate(axes: Any, plane: Landscape) -> None:
    x, y, rates = (np.asarray(a) for a in (*plane.point, plane.rate))
    inside = np.isfinite(rates)
    # near the corners of the hull I has its highest values, on little area
    most = np.percentile(rates[inside], 97) if inside.any() else 0.0
    shown = np.ma.masked_where(~inside, rates)
    # equal steps of √I are about equal steps of distance
    levels = (most or 1.0) * np.linspace(0, 1, 13) ** 2
    _contours(axes, x, y, shown, levels, cmap="magma_r", extend="max")
    if plane.values is not None:
        values = np.asarray(plane.values)
        values = values[np.isfinite(values).all(1)]
        axes.plot(*values.T, ".", color="tab:blue", markersize=6, label="values")
        axes.fill(*_hull(values).T, fill=False, edgecolor="tab:blue", linewidth=0.8)
        axes.set(xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
    star = {"color": "tab:green", "markeredgecolor": "white", "markersize": 13}
    axes.plot(0, 0, "*", label="attention", **star)
    axes.set(title="rate function I(z); empty outside the hull")
    axes.set(xlabel="$z$ along $u_1$, from attention", ylabel="$z$ along $u_2$, from attention")
    axes.legend(loc="upper right", fontsize=8, framealpha=0.8)


def _contours(
    axes: Any, x: np.ndarray, y: np.ndarray, z: np.ndarray, levels: np.ndarray, **options: Any
) -> None:
    filled = axes.contourf(x, y, z.T, levels=levels, **options)
    axes.contour(x, y, z.T, levels=levels, colors="0.2", linewidths=0.4, alpha=0.6)
    colour_bar(axes.figure, axes, filled, "nats", format="%.2g")


def _hull(values: np.ndarray) -> np.ndarray:
    # the corners in order: the lower chain from left to right and the upper one back
    def chain(ordered: np.ndarray) -> list[np.ndarray]:
        corners: list[np.ndarray] = []
        for value in ordered:
            while len(corners) > 1 and _turn(corners[-2], corners[-1], value) <= 0:
                corners.pop()
            corners.append(value)
        return corners[:-1]

    ordered = values[np.lexsort(values.T[::-1])]
    return np.asarray(chain(ordered) + chain(ordered[::-1]))


def _turn(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> float:
    (x, y), (u, w) = b - a, c - b
    return float(x * w - y * u)
