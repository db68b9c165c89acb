"""`python _worker.py PARENT command…`: runs the command, and ends it with its parent.

Without arguments: a guard over the process groups of such commands.

A script that imports nothing of the package, because its process becomes that of the command.
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
_PAUSE = 0.2  # seconds between checks of the parent


def main(parent: int, command: Sequence[str]) -> int:
    """Replaces this process by the command, or returns its exit status where that is not possible."""
    if sys.platform == "linux":
        # Survives exec. Requested before the check of the parent, which may end in between.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return 1
        os.execv(command[0], list(command))
    return watch(parent, command)


def watch(parent: int, command: Sequence[str]) -> int:
    """For systems without that signal: runs the command, and polls whether the parent lives."""
    child = subprocess.Popen(command)
    while child.poll() is None and os.getppid() == parent:
        time.sleep(_PAUSE)
    child.kill()
    status = child.wait()
    if status < 0:
        os.kill(os.getpid(), -status)  # end by the same signal
    return status


def guard() -> None:
    """Kills the process groups that its input names, one on each line, when the input ends.

    The system closes the input when the launcher is killed and can no longer end its processes.
    """
    for group in [int(line) for line in sys.stdin]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]) if sys.argv[1:] else guard())
