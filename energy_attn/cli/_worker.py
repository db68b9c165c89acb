"""`python _worker.py PARENT command…`: runs the command, and lets it die with its parent.

Without arguments: a guard over what such commands start.

A file by itself that imports nothing of ours: what it starts in stays the command's process.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PAUSE = 0.2  # seconds between looks at the parent


def main(parent: int, command: Sequence[str]) -> int:
    """Returns the command's exit status, where it does not take this process's place."""
    if sys.platform == "linux":
        # Survives exec; asked for before the parent is looked at, so that it cannot slip away.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return 1
        os.execv(command[0], list(command))
    return watch(parent, command)


def watch(parent: int, command: Sequence[str]) -> int:
    """For systems without such a signal: runs the command beside a look at the parent."""
    child = subprocess.Popen(command)
    while child.poll() is None and os.getppid() == parent:
        time.sleep(_PAUSE)
    child.kill()
    status = child.wait()
    if status < 0:
        os.kill(os.getpid(), -status)  # dies as the command did
    return status


def guard() -> None:
    """Ends the process groups that its input names, one a line, once that ends.

    The system closes it when the launcher is killed, which could end what it has started no more.
    """
    for group in [int(line) for line in sys.stdin]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]) if sys.argv[1:] else guard())
