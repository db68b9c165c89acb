"""The example that starts a program as several processes of this machine. These processes import no JAX."""

import os
import runpy
from pathlib import Path
from types import SimpleNamespace

from tests.support.flags import launch

SCRIPT = Path(__file__).parents[2] / "examples" / "cluster" / "launch.py"

# Process 1 fails once the other, which would sleep on, has started a process of its own: the pipe's second end.
PROGRAM = """
import os, subprocess, sys, time
print("of", os.environ["JAX_NUM_PROCESSES"], flush=True)
if os.environ["JAX_PROCESS_ID"] == "0":
    child = "import sys, time; pipe = open(sys.argv[1], 'w'); pipe.write('x'); pipe.flush(); time.sleep(60)"
    subprocess.run([sys.executable, "-c", child, sys.argv[1]])
with open(sys.argv[1]) as pipe:
    pipe.read(1)
    sys.exit("the reason")
"""


def test_the_first_failure_ends_both(tmp_path):
    """Output that does not say whose it is; a process that waits on when the other fails, or what it has started."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as held:
        done = launch("-n", 2, "--timeout", 50, "--", "-c", PROGRAM, pipe)
        assert done.returncode == 1, done.stderr
        assert set(done.stdout.splitlines()) == {"[0] of 2", "[1] of 2", "[1] the reason"}
        assert done.stderr == "launch: process 1 of 2 ended with status 1\n"
        assert held.read() == ""  # its end, as nobody has it open for writing any more


def test_a_killed_process_is_named_before_its_peer(monkeypatch, capsys):
    """The error of the peer, whose output a busy machine sees end first."""

    def ended(index, status, closed):
        process = SimpleNamespace(poll=lambda: status, returncode=status)
        return SimpleNamespace(index=index, closed=closed, process=process)

    monkeypatch.setattr("time.sleep", lambda _: None)
    status = runpy.run_path(str(SCRIPT))["_status"]([ended(0, 1, 3.0), ended(1, -9, 4.0)])
    assert status == 137
    assert capsys.readouterr().err == "launch: process 1 of 2 was killed by SIGKILL\n"
