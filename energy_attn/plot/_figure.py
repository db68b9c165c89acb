"""What all pictures share: a figure without a window, ticks and colour bars."""

from os import PathLike
from typing import Any


def new_figure(name: str, width: float, height: float) -> Any:
    """A matplotlib `Figure` of this size in inches; raises `ImportError` by the name of the picture without it."""
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
    """The bar of what is drawn in a panel, or in several."""
    bar = figure.colorbar(drawn, ax=panel, pad=0.02, **options)
    bar.set_label(label)
    bar.outline.set_visible(False)


def saved(figure: Any, path: str | PathLike[str] | None) -> Any:
    """The figure, written to a path if there is one."""
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
