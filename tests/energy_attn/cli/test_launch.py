"""The launcher: what a process is given, and that nothing outlives the first failure. These programs import no JAX."""

import argparse
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest

from energy_attn.cli import _worker, launch

ROOT = Path(__file__).resolve().parents[3]
SLEEP = "import time; time.sleep(60)"
# The package as a folder alone: the launcher needs none of what its start imports, which takes a second.
LIGHT = f"""
import sys, types
package = types.ModuleType("energy_attn")
package.__path__ = [{str(ROOT / "energy_attn")!r}]
sys.modules["energy_attn"] = package
from energy_attn.cli import launch
"""


def run(*arguments: object) -> int:
    """`python -m energy_attn launch …`, in this process."""
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    return launch.run(parser.parse_args(list(map(str, arguments))))


def by_index(zero: str, one: str) -> str:
    """A program that does one thing in process 0 and another in process 1."""
    bodies = textwrap.indent(zero, "    "), textwrap.indent(one, "    ")
    return f"import os\nif os.environ['JAX_PROCESS_ID'] == '0':\n{bodies[0]}\nelse:\n{bodies[1]}"


def gone(pid: int) -> bool:
    """Whether a process is gone, waiting a little for the system to see to it."""
    for _ in range(250):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # nobody waits for an orphan in some containers
            return True
        time.sleep(0.02)
    return False


def wait_for(path: Path) -> str:
    for _ in range(1000):
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text()
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written")


@pytest.mark.smoke
def test_environment_of_each_process(monkeypatch, capfd):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_mine=1")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    code = "import os; e = os.environ; print(*(e['JAX_' + k] for k in %r), e['XLA_FLAGS'])"
    keys = ("NUM_PROCESSES", "PROCESS_ID", "LOCAL_DEVICE_IDS", "PLATFORMS")
    assert run("-n", 2, "--devices", 3, "--", "-c", code % (keys,)) == 0
    flags = (
        "--xla_mine=1 --xla_force_host_platform_device_count=3"
        " --xla_cpu_collective_timeout_seconds=300"
    )
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"[0] 2 0 0,1,2 cpu {flags}", f"[1] 2 1 3,4,5 cpu {flags}"]


def test_what_the_user_says_wins():
    given = {"XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=7", "JAX_PLATFORMS": "cuda"}
    got = launch.environment(given, 1, 0, 2)
    assert got["JAX_PLATFORMS"] == "cuda"
    assert got["XLA_FLAGS"].count("collective_timeout") == 1
    assert "--xla_cpu_collective_timeout_seconds=7" in got["XLA_FLAGS"]


def test_coordinator_is_this_machine_alone(capfd):
    """JAX's coordinator trusts whoever connects: on one machine nobody else should be able to."""
    code = "import os; print(os.environ['JAX_COORDINATOR_ADDRESS'], os.environ['JAX_COORDINATOR_BIND_ADDRESS'])"
    assert run("-n", 2, "--", "-c", code) == 0
    addresses = {word for line in capfd.readouterr().out.splitlines() for word in line.split()[1:]}
    assert len(addresses) == 1
    assert addresses.pop().startswith("127.0.0.1:")


def test_logs_and_prefixes(tmp_path, capfd):
    code = "import sys; print('out'); print('err', *sys.argv[1:], file=sys.stderr)"
    assert run("-n", 2, "--log-dir", tmp_path / "logs", "--", "-c", code, "-n", "--x") == 0
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == ["[0] err -n --x", "[0] out", "[1] err -n --x", "[1] out"]
    for index in range(2):
        log = (tmp_path / "logs" / f"process-{index}.log").read_text()
        assert log == "out\nerr -n --x\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
def test_full_disk(tmp_path, capfd):
    """A run that ends, or hangs, as the reader of its output died of a log that cannot be written."""
    (tmp_path / "process-0.log").symlink_to("/dev/full")
    code = "for i in range(3): print(i)"
    assert run("-n", 2, "--log-dir", tmp_path, "--", "-c", code) == 0
    shown = capfd.readouterr()
    assert len(shown.out.splitlines()) == 6
    file = tmp_path / "process-0.log"
    assert shown.err == f"launch: {file}: No space left on device; the run goes on without it\n"
    assert (tmp_path / "process-1.log").read_text() == "0\n1\n2\n"


def test_logs_that_cannot_be(tmp_path, capfd):
    """A traceback, after processes have been started."""
    path = tmp_path / "file"
    path.touch()
    assert run("-n", 1, "--log-dir", path, "--", "-c", f"open({str(path)!r}, 'w').write('x')") == 2
    assert capfd.readouterr().err == f"launch: {path}: File exists\n"
    assert path.read_text() == ""


def test_reader_that_goes(tmp_path):
    """`| head`, and an encoding that lacks letters: the run goes on, what it still writes goes nowhere."""
    done = tmp_path / "done"
    code = (
        "import sys\nsys.stdout.buffer.write('ü\\n'.encode())\n"
        f"for i in range(9999): print(i)\nopen({str(done)!r}, 'w')"
    )
    start = f"{LIGHT}\nsys.exit(launch.supervise([sys.executable, '-c', {code!r}], [{{}}]))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", start]
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        assert launcher.stdout.readline() == "[0] \\xfc\n"
        launcher.stdout.close()
        said = launcher.stderr.read()
    assert said == "launch: standard output: Broken pipe; the run goes on without it\n"
    assert launcher.returncode == 0 and done.exists()


def test_module_and_script(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    assert run("-n", 1, "--", script, "a") == 0
    assert run("-n", 1, script, "b") == 0  # without --
    assert run("-n", 1, "--", "-m", "platform") == 0
    assert capfd.readouterr().out.splitlines()[:2] == ["[0] ['a']", "[0] ['b']"]


def test_first_failure_ends_the_rest_and_is_shown(tmp_path, capfd):
    pid = tmp_path / "pid"
    zero = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
        f"open({str(pid)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}\\n')\n"
        f"{SLEEP}"
    )
    one = (
        "import sys, time\n"
        f"while not os.path.exists({str(pid)!r}) or not open({str(pid)!r}).read(): time.sleep(0.01)\n"
        "print('the reason')\nsys.exit(3)"
    )
    assert run("-n", 2, "--timeout", 50, "--", "-c", by_index(zero, one)) == 3
    said = capfd.readouterr().err
    assert said.startswith("launch: process 1 of 2 ended with status 3, after ")
    assert "still running and ended with it: 0\n" in said
    assert said.endswith("launch: the last lines of process 1:\n    the reason\n")
    assert all(gone(int(p)) for p in pid.read_text().split())


SIGSEGV = "os.kill(os.getpid(), 11)"
# As the system does for a process with much to clear away: output, connections, and long after that it is gone.
SLOW_EXIT = "os.close(1); os.close(2); connection.close(); time.sleep(0.6); os._exit(7)"

# A busy system may show the effect before the cause; but the effect says what it is one of.
SLOWER = "connection.close(); time.sleep(0.1); os._exit(7)"
LOST = "print('Gloo: Connection closed by peer', flush=True); os._exit(1)"


@pytest.mark.parametrize(
    ("death", "effect", "status", "said"),
    [
        pytest.param(
            *(SIGSEGV, "os._exit(1)", 139, "process 1 of 2 was killed by SIGSEGV"),
            marks=pytest.mark.full,
        ),
        (SIGSEGV, "os.abort()", 139, "process 1 of 2 was killed by SIGSEGV"),
        (SLOW_EXIT, "time.sleep(0.2); os._exit(1)", 7, "process 1 of 2 ended with status 7"),
        (SLOWER, LOST, 7, "process 1 of 2 ended with status 7"),
    ],
)
def test_the_cause_is_named_and_not_its_effect(tmp_path, capfd, death, effect, status, said):
    """A process that dies slowly, and a peer that fails over it at once and is gone sooner."""
    port = tmp_path / "port"
    zero = f"""
import socket, time
while not os.path.exists({str(port)!r}) or not open({str(port)!r}).read().endswith("."):
    time.sleep(0.01)
with socket.create_connection(("127.0.0.1", int(open({str(port)!r}).read()[:-1]))) as peer:
    peer.sendall(b"x")
    try: peer.recv(1)
    finally: {effect}
"""
    one = f"""
import socket, time
ballast = bytearray(os.urandom(4096)) * 50000
with socket.create_server(("127.0.0.1", 0)) as server:
    open({str(port)!r}, "w").write(f"{{server.getsockname()[1]}}.")
    connection, _ = server.accept()
    connection.recv(1)
    {death}
"""
    assert run("-n", 2, "--timeout", 50, "--", "-c", by_index(zero, one)) == status
    assert said in capfd.readouterr().err


class Ended(launch.Worker):
    """A process that has ended, as the supervisor sees it."""

    def __init__(self, index, status, closed, *last):
        self.index, self.closed, self.last = index, closed, last
        self.process = types.SimpleNamespace(poll=lambda: status, wait=lambda _: status)
        self.found = launch.Failure(index, f"status {status}", abs(status))

    def failure(self):
        return self.found


@pytest.mark.parametrize(
    ("cause", "effect"),
    [
        ((-9, 2.0), (1, 1.0)),  # both outputs end between two looks, in either order
        ((-11, 2.0), (-6, 1.0)),  # JAX aborts what has lost a peer
        ((7, 2.0), (1, 1.0, "recv: Connection reset by peer", "at exit")),
        ((3, 1.0), (3, 2.0)),
        ((-9, 1.0), (-9, 2.0)),
    ],
)
@pytest.mark.parametrize("first", [0, 1])
def test_what_comes_first_where_both_have_ended(cause, effect, first, monkeypatch):
    """An effect that is named as the cause, by how each of two processes ended and when its output did."""
    monkeypatch.setattr(launch, "_SETTLE", 0.0)
    pair = [Ended(first, *cause), Ended(1 - first, *effect)]
    workers = sorted(pair, key=lambda worker: worker.index)
    assert launch._first(workers) == pair[0].found


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_stopped_process_is_named(capfd):
    one = "import signal\nos.kill(os.getpid(), signal.SIGSTOP)"
    status = run("-n", 2, "--timeout", 50, "--", "-c", by_index(SLEEP, one))
    assert status == 128 + signal.SIGSTOP
    assert "process 1 of 2 is stopped (SIGSTOP" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_process_that_goes_on_is_left_alone():
    """A stop that is soon over: somebody looks at the process with a debugger's tool."""
    one = (
        "import signal, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import os, signal, sys, time; time.sleep(0.3); "
        "os.kill(int(sys.argv[1]), signal.SIGCONT)', str(os.getpid())])\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(1.2)"
    )
    assert run("-n", 2, "--timeout", 50, "--", "-c", by_index("pass", one)) == 0


def test_time_limit(capfd):
    assert run("-n", 2, "--timeout", 0.5, "--", "-c", SLEEP) == 124
    said = capfd.readouterr().err
    assert said.startswith("launch: the run took longer than 0.5 s")
    assert said.rstrip().endswith("still running and ended with it: 0, 1")


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        pytest.param(
            signal.SIGKILL,
            -9,
            marks=pytest.mark.skipif(sys.platform != "linux", reason="the others look later"),
        ),
    ],
)
def test_workers_die_with_the_launcher(tmp_path, number, status):
    """Ctrl-C, a scheduler's SIGTERM, and the SIGKILL that leaves no chance to clean up, with what workers started."""
    code = (
        "import os, subprocess, sys, time; "
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); "
        f"open({str(tmp_path)!r} + '/' + os.environ['JAX_PROCESS_ID'], 'w')"
        ".write(f'{os.getpid()} {child.pid}\\n'); time.sleep(60)"
    )
    start = (
        f"{LIGHT}\nworkers = [{{'JAX_PROCESS_ID': x}} for x in '01']\n"
        f"sys.exit(launch.supervise([sys.executable, '-c', {code!r}], workers))"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", start], cwd=ROOT, stderr=subprocess.DEVNULL, text=True
    )
    pids = [int(pid) for name in "01" for pid in wait_for(tmp_path / name).split()]
    launcher.send_signal(number)
    assert launcher.wait(30) == status
    assert all(map(gone, pids))


def test_parent_is_watched_where_the_system_does_not(tmp_path):
    """What takes the signal's place outside of Linux: a look at the parent, and the command's own end passed on."""

    def watched(body: str) -> str:
        command = [sys.executable, "-c", body]
        return (
            f"import os, runpy, sys; watch = runpy.run_path({_worker.__file__!r})['watch']; "
            f"sys.exit(watch(os.getppid(), {command!r}))"
        )

    for body, status in (
        ("import sys; sys.exit(5)", 5),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ):
        done = subprocess.run([sys.executable, "-c", watched(body)])
        assert done.returncode == status
    pid = tmp_path / "pid"
    body = f"import os; open({str(pid)!r}, 'w').write(f'{{os.getpid()}}\\n'); {SLEEP}"
    command = [sys.executable, "-c", watched(body)]
    parent = f"import subprocess, time; subprocess.Popen({command!r}); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", parent]) as started:
        child = int(wait_for(pid))
        started.kill()
    assert gone(child)


def test_orphan_does_not_start(tmp_path):
    """The launcher died before its process could ask for the signal."""
    path = tmp_path / "ran"
    command = [sys.executable, "-c", f"open({str(path)!r}, 'w')"]
    done = subprocess.run([sys.executable, _worker.__file__, str(os.getpid() + 1), *command])
    assert done.returncode != 0
    assert not path.exists()


@pytest.mark.parametrize("arguments", [["--", "x.py"], ["-n", "0", "--", "x.py"], ["-n", "two"]])
def test_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2
    assert "-n" in capsys.readouterr().err


def test_no_program(capsys):
    assert run("-n", 2) == 2
    assert "wanted a program" in capsys.readouterr().err


def test_program_that_does_not_exist(capfd):
    assert run("-n", 1, "--", "no_such_file.py") == 2
    assert "no_such_file.py" in capfd.readouterr().err
