"""Standard output that nobody reads any more, or that knows fewer letters than we do."""

import contextlib
import os
from typing import TextIO


def write_line(stream: TextIO, text: str) -> None:
    """Writes a line at once, with escapes for what the stream's encoding lacks.

    Raises `OSError` where nobody reads it, or its disk is full.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def silence(stream: TextIO) -> None:
    """Lets go of what a stream still holds, and of all that comes. Raises nothing.

    Python would try to write it when it ends, and complain.
    """
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
