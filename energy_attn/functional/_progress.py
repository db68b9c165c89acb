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
def progress_of(what: str, option: bool | Progress | None) -> Iterator[Progress]:
    """A context that yields a function to call with the share done and a note, from `progress=`.

    A function is returned; True: a bar, or a few lines where standard error is not a terminal; False: nothing;
    None: a bar if standard error is a terminal. Raises `TypeError` for anything else.
    """
    if callable(option):
        yield option
        return
    if not isinstance(option, bool | None):
        raise TypeError(
            f"progress: wanted True, False, None or a function, got {checks.received(option)}"
        )
    is_terminal, shown = option is not False and sys.stderr.isatty(), -1.0
    option = is_terminal if option is None else option

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
        yield show if option else lambda done, note: None
    finally:
        if option and is_terminal:
            sys.stderr.write("\n")
