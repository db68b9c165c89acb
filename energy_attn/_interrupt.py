"""Ctrl-C ends `python -m energy_attn` at once and with one line, from the first import on."""

import contextlib
import os
import signal
import sys
import threading


def _is_command() -> bool:
    """Whether this process is `python -m energy_attn`, which imports the package before it runs `__main__`."""
    arguments = getattr(sys, "argv", [])
    return arguments[:1] == ["-m"] and sys.orig_argv[-len(arguments)] in (
        __package__,
        f"-m{__package__}",
    )


def _watch() -> None:
    """Ends the process on Ctrl-C, in a thread: the main one may be in XLA, which crashes if an exception ends it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_end, args=(reader,), daemon=True).start()


def _end(reader: int) -> None:
    """Waits for Ctrl-C, says so, and ends the process, whatever its other threads do."""
    while os.read(reader, 1) != bytes([signal.SIGINT]):
        pass
    with contextlib.suppress(OSError):
        # behind what a terminal shows of Ctrl-C
        os.write(2, b"\n" * os.isatty(2) + b"energy_attn: interrupted\n")
    os._exit(128 + signal.SIGINT)


# a command in the background ignores the signal, and is to go on
if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    _watch()
