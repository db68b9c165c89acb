"""The output of the demo: a table, and bytes as text."""

from typing import NamedTuple

import numpy as np


class Line(NamedTuple):
    """A line of the table.

    Attributes:
        what: the quantity.
        measured: its value.
        beside: the value wanted, or one to compare with.
        holds: whether the value is right; None where no value is wanted.
        kernel: the kernels that ran; empty where the value is the same with any.
    """

    what: str
    measured: str
    beside: str = ""
    holds: bool | None = None
    kernel: str = ""


def table(lines: list[Line]) -> str:
    """The lines as text, with aligned columns."""
    lines = [Line("", "measured", "wanted, or to compare", kernel="kernel"), *lines]
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
