"""A progress bar on standard error, or its replacement."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from energy_attn.kernels.internal import received

_WIDTH = 30
_LINES = 8  # in a log

# Called with the share done, from 0 to 1, and a note.
Progress = Callable[[float, str], Any]


@contextlib.contextmanager
def progress_of(what: str, wanted: bool | Progress | None) -> Iterator[Progress]:
    """A function to call with the share done and a note.

    `wanted`: a function, which is called; True: a bar, or a few lines where standard error is not a
    terminal; False: nothing; None: a bar if standard error is a terminal. Raises `TypeError` for
    anything else.
    """
    if wanted is None:
        wanted = sys.stderr.isatty()
    if callable(wanted):
        yield wanted
    elif not isinstance(wanted, bool):
        raise TypeError(f"progress: wanted True, False, None or a function, got {received(wanted)}")
    elif not wanted:
        yield lambda done, note: None
    elif not sys.stderr.isatty():
        yield _lines(what)
    else:

        def show(done: float, note: str) -> None:
            bar = "█" * round(done * _WIDTH)
            sys.stderr.write(f"\r\x1b[K{what} │{bar:<{_WIDTH}}│ {done:4.0%}  {note}")
            sys.stderr.flush()

        try:
            yield show
        finally:
            sys.stderr.write("\n")


def _lines(what: str) -> Progress:
    """A few plain lines, for a log."""
    shown = -1.0

    def show(done: float, note: str) -> None:
        nonlocal shown
        if done >= 1.0 or done - shown >= 1 / _LINES:
            shown = done
            sys.stderr.write(f"{what} {done:4.0%}  {note}\n")
            sys.stderr.flush()

    return show
