"""A progress bar on standard error, or its replacement."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from energy_attn.kernels.internal import checks

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
    if callable(wanted):
        yield wanted
        return
    if not isinstance(wanted, bool | None):
        raise TypeError(
            f"progress: wanted True, False, None or a function, got {checks.received(wanted)}"
        )
    is_terminal, shown = wanted is not False and sys.stderr.isatty(), -1.0
    wanted = is_terminal if wanted is None else wanted

    def show(done: float, note: str) -> None:
        nonlocal shown
        if is_terminal:
            bar = "█" * round(done * _WIDTH)
            sys.stderr.write(f"\r\x1b[K{what} │{bar:<{_WIDTH}}│ {done:4.0%}  {note}")
        elif done >= 1.0 or done - shown >= 1 / _LINES:
            shown = done
            sys.stderr.write(f"{what} {done:4.0%}  {note}\n")
        sys.stderr.flush()

    try:
        yield show if wanted else lambda done, note: None
    finally:
        if wanted and is_terminal:
            sys.stderr.write("\n")
