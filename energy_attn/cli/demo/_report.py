"""What the demo prints: a table, and bytes as text."""

from typing import NamedTuple

import numpy as np


class Line(NamedTuple):
    """A line of the table.

    Attributes:
        what: what is measured.
        measured: the figure.
        beside: what it should be, or what to compare it with.
        holds: whether it is as it must be; None where nothing must be.
    """

    what: str
    measured: str
    beside: str = ""
    holds: bool | None = None


def table(lines: list[Line]) -> str:
    """The lines as text, columns aligned. Raises nothing."""
    lines = [Line("", "measured", "wanted, or to compare"), *lines]
    what = max(len(line.what) for line in lines)
    measured = max(len(line.measured) for line in lines)
    marks = {True: "✓", False: "✗", None: " "}
    rows = [
        f"{line.what:<{what}}  {line.measured:>{measured}}  {marks[line.holds]}  {line.beside}"
        for line in lines
    ]
    rows.insert(1, "─" * max(map(len, rows)))
    return "\n".join(row.rstrip() for row in rows)


def readable(text: np.ndarray | bytes) -> str:
    """Bytes as text; what is not UTF-8 as `\\xNN`. Raises nothing."""
    return bytes(text).decode("utf-8", "backslashreplace")
