"""Figures of energy reports, attention weights, masks and landscapes."""

import math
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from energy_attn.kernels.internal import checks
from energy_attn.kernels.masks import AbstractMask

from ..report._landscape import Landscape
from ..report._report import EnergyReport

# Field, title, unit and colours; quantities of one kind share theirs.
_PANELS = (
    ("energy", "free energy  F", "nats", "cividis"),
    ("entropy", "entropy  H", "nats", "viridis"),
    ("effective_keys", "effective keys  exp H", "keys", "viridis"),
    ("heat_capacity", "heat capacity  Var(s)", "nats²", "magma"),
    ("variance", "variance of the values  tr Σ", "value²", "magma"),
)
_READABLE = 96  # cells; in more cells numbers would be too small to read
_CHARACTERS = 27  # the width of a panel in characters of labels


def new_figure(name: str, width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"plot.{name}: wanted matplotlib, which is not installed (pip install matplotlib)"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def ticks(count: int, most: int = 16) -> range:
    """The rows or columns that have a tick: at most `most` out of `count`."""
    step = 1
    while count > most * step:
        step *= 2
    return range(0, count, step)


def colour_bar(figure: Any, panel: Any, drawn: Any, label: str, **options: Any) -> None:
    bar = figure.colorbar(drawn, ax=panel, pad=0.02, **options)
    bar.set_label(label)
    bar.outline.set_visible(False)


def saved(figure: Any, path: str | PathLike[str] | None) -> Any:
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _image(panel: Any, values: np.ndarray, *args: Any, **options: Any) -> Any:
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    return panel.imshow(values, *args, aspect="auto", interpolation="nearest", **options)


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
        TypeError: `report` is not the result of `energy_report`.
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
        raise TypeError(
            f"report: wanted the result of energy_attn.energy_report, got {checks.received(report)}"
        )
    shape = report.energy.shape
    if len(shape) != 2:
        raise ValueError(
            f"report: wanted means of shape (layers, heads), got {checks.received(report.energy)}; "
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
        image = _image(panel, shown, cmap=colours)
        panel.set(title=title, xlabel="head", ylabel="layer")
        panel.set_xticks(ticks(heads))
        panel.set_yticks(ticks(layers))
        if labels and panel in panels[::3]:
            panel.set_yticks(ticks(layers), labels, fontsize=7)
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
        style = {"ha": "center", "va": "center", "color": "black" if light else "white"}
        panel.text(head, layer, f"{value:.3g}", fontsize=7, **style)


def weights(
    weights: Array | np.ndarray,
    path: str | PathLike[str] | None = None,
    *,
    rows: Sequence[object] | None = None,
    keys: Sequence[object] | None = None,
) -> Any:
    """Draws attention weights, a panel for each head: rows from top to bottom, keys from left to right.

    The colour is the square root of the weight, so that weights of 1% stay visible. A weight of 0, such as the weight
    of a masked key, is black.

    Args:
        weights: `[R, N, J]` from 0 to 1, as [`Gibbs.weights`][energy_attn.Gibbs.weights] returns them without a batch.
        path: the file to write; its suffix (`.png`, `.svg`, `.pdf`) is the format. None writes no file.
        rows: a label for each row, such as its position or its token; None: 0, 1, 2 and so on.
        keys: a label for each key.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        TypeError: `weights` is not a floating array.
        ValueError: it has another number of axes, or there are more or fewer labels than rows or keys.
        ImportError: matplotlib is not installed; the extra `plot` installs it.

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> F = ea.FreeEnergy(is_causal=True).at(q, k, v)
        >>> figure = ea.plot.weights(F.weights(rows=slice(2, 5)), rows=range(2, 5))
        >>> [panel.get_title() for panel in figure.axes[:2]]
        ['head 0', 'head 1']
    """
    shown = np.asarray(checks.check_floating("weights", weights), np.float64)
    if shown.ndim != 3 or 0 in shown.shape:
        raise ValueError(
            f"weights: wanted shape (rows, heads, keys), without a batch axis, got {checks.received(weights)}"
        )
    count, heads, key_count = shown.shape
    labels = _labels("rows", rows, count), _labels("keys", keys, key_count)
    across = math.ceil(math.sqrt(heads))
    down = math.ceil(heads / across)
    figure = new_figure("weights", 0.8 + 2.2 * across, 0.4 + 2.2 * down)
    from matplotlib import colormaps
    from matplotlib.colors import PowerNorm

    black_if_masked = colormaps["viridis"].with_extremes(bad="black")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    drawn = None
    for head, panel in enumerate(panels):
        if head >= heads:
            panel.set_axis_off()
            continue
        norm, visible = PowerNorm(0.5, 0, 1), np.ma.masked_equal(shown[:, head], 0)
        drawn = _image(panel, visible, cmap=black_if_masked, norm=norm)
        panel.set_title(f"head {head}", fontsize=9)
        _label(panel, *labels)
    colour_bar(figure, list(panels), drawn, "weight")
    return saved(figure, path)


def mask(
    mask: AbstractMask | Bool[Array | np.ndarray, "T S"],
    query_len: int | None = None,
    key_len: int | None = None,
    path: str | PathLike[str] | None = None,
) -> Any:
    """Draws which query sees which key: queries from top to bottom, keys from left to right.

    Args:
        mask: a mask of [`masks`][energy_attn.kernels.masks.AbstractMask], whose first batch entry is drawn; or
            boolean, `[T, S]`.
        query_len: the number of queries, whose positions count from 0; required unless `mask` is an array.
        key_len: the number of keys; None: `query_len`.
        path: as for [`weights`][energy_attn.plot.weights].

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        TypeError: neither a mask nor a boolean array, or sizes that are not integers.
        ValueError: sizes below one, or given with an array; an array without exactly two axes.
        ImportError: matplotlib is not installed; the extra `plot` installs it.

    Examples:
        >>> import energy_attn as ea
        >>> figure = ea.plot.mask(ea.masks.Causal() & ea.masks.Window(4, 0), 16)
        >>> figure.axes[0].get_title()
        '70 of 256 pairs'
    """
    seen = _visible(mask, query_len, key_len)
    count, key_count = seen.shape
    figure = new_figure("mask", 3.6, 3.6)
    panel = figure.subplots()
    _image(panel, seen, "Blues", vmin=0, vmax=1.4)
    panel.set_title(f"{seen.sum()} of {seen.size} pairs", fontsize=9)
    _label(panel, range(count), range(key_count))
    return saved(figure, path)


def _visible(mask: Any, query_len: int | None, key_len: int | None) -> np.ndarray:
    if not isinstance(mask, AbstractMask):
        array = checks.check_array("mask", mask)
        if array.dtype != bool:
            raise TypeError(f"mask: wanted a mask or booleans, got {checks.received(mask)}")
        if array.ndim != 2 or 0 in array.shape:
            raise ValueError(f"mask: wanted shape (queries, keys), got {checks.received(mask)}")
        if query_len is not None or key_len is not None:
            raise ValueError(
                f"query_len: wanted None with a mask that is an array, got {query_len}, {key_len}"
            )
        return np.asarray(array)
    rows = checks.check_integer("query_len", query_len, 1)
    columns = rows if key_len is None else checks.check_integer("key_len", key_len, 1)
    leaves, tree = jax.tree.flatten(mask)
    first = [x[0] if x.ndim > rank else x for x, rank in zip(leaves, mask.ranks, strict=True)]
    queries, keys = (jnp.arange(size, dtype=jnp.int32) for size in (rows, columns))
    seen = jax.tree.unflatten(tree, first).visible(queries[:, None], keys[None])
    return np.asarray(jnp.broadcast_to(seen, (rows, columns)))


def _labels(name: str, labels: Sequence[object] | None, count: int) -> Sequence[object]:
    if labels is None:
        return range(count)
    if len(labels) != count:
        raise ValueError(f"{name}: wanted {count} labels, got {len(labels)}")
    return labels


def _label(panel: Any, rows: Sequence[object], keys: Sequence[object]) -> None:
    for axis, labels, name in ((panel.yaxis, rows, "query"), (panel.xaxis, keys, "key")):
        longest = max(len(str(x)) for x in labels)
        across = axis is panel.xaxis and (isinstance(labels, range) or longest <= 3)
        at = ticks(len(labels), _CHARACTERS // (longest + 1) if across else 16)
        rotation = 90 if axis is panel.xaxis and not across else 0
        axis.set_ticks(at, [str(labels[i]) for i in at], fontsize=7, rotation=rotation)
        axis.set_label_text(name, fontsize=8)


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
