"""What the demo prints: a progress bar and a table."""

import sys
import time
from types import TracebackType
from typing import NamedTuple

import numpy as np

_WIDTH = 30
_LINES = 8  # of progress, where there is no terminal


class Progress:
    """A progress bar on standard error; a few plain lines where that is no terminal."""

    def __init__(self, what: str):
        self._what, self._stream = what, sys.stderr
        self._live = self._stream.isatty()
        self._shown, self._last = -1.0, 0.0

    def __enter__(self) -> "Progress":
        return self

    def show(self, done: float, note: str) -> None:
        """Shows that `done` of 1 is done, and a note. Raises nothing."""
        done = min(done, 1.0)
        if self._live:
            now = time.perf_counter()
            if now - self._last < 0.1 and done < 1.0:
                return
            self._last = now
            bar = "█" * round(done * _WIDTH)
            self._stream.write(f"\r\x1b[K{self._what} │{bar:<{_WIDTH}}│ {done:4.0%}  {note}")
        elif done >= 1.0 or done - self._shown >= 1 / _LINES:
            self._shown = done
            self._stream.write(f"{self._what} {done:4.0%}  {note}\n")
        self._stream.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._stream.write("\n")


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
