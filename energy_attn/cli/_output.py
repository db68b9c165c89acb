"""Standard output that is closed, or whose encoding lacks characters."""

import contextlib
import os
from typing import TextIO


def write_line(stream: TextIO, text: str) -> None:
    """Writes and flushes a line, with escapes for characters that the encoding lacks.

    Raises `OSError` where the stream is closed, or its disk is full.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def silence(stream: TextIO) -> None:
    """Drops what a stream has buffered and whatever is written later.

    Python would try to flush the buffer when it exits, and print an error.
    """
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
