"""`python -m energy_attn launch`: runs a program as several processes on this machine.

Each process simulates a host. When one of them dies, JAX lets the others wait, for minutes in a
collective, and then aborts them; here the first failure ends the run and is reported as its cause.
"""

import argparse
import collections
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TextIO

from . import _worker
from ._output import silence, write_line

_LAST = 30  # lines of the failing process that are shown again
_PAUSE = 0.02  # seconds between checks
_STOPPED = 1.0  # seconds that a process may be stopped; a breakpoint of a debugger is another state
_DRAIN = 2.0  # seconds to read the output of ended processes
_SETTLE = 0.2  # seconds for the readers to notice the processes that end together with a failure
_GOING = 1.0  # seconds that a process may take to end after it has closed its output
# Messages of gloo and the system in a process that lost a peer.
_BEREFT = ("closed by peer", "Connection reset by peer", "Broken pipe")
_TIMED_OUT = 124  # the exit status of timeout(1)
# After this time, losing a peer is an exception in the others; XLA's default is half an hour.
_COLLECTIVE_SECONDS = 300


class Failure(NamedTuple):
    """The reason why a run ended."""

    process: int | None  # None: the run as a whole
    what: str
    status: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `launch`."""
    parser.usage = (
        "python -m energy_attn launch -n N [--devices D] [--timeout S] [--log-dir DIR] "
        "-- script.py … | -m module …"
    )
    parser.add_argument("-n", type=_positive(int), required=True, help="processes")
    parser.add_argument(
        "--devices",
        type=_positive(int),
        default=1,
        help="devices of each process: simulated on the CPU, unless JAX_PLATFORMS names another",
    )
    parser.add_argument(
        "--timeout", type=_positive(float), help="seconds after which the run is ended"
    )
    parser.add_argument(
        "--log-dir", type=Path, help="where to keep process-0.log, process-1.log, …"
    )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="-- program",
        help="the arguments of `python`: script.py or -m module, and their own",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the program and returns the exit status of the first process that failed, or 0."""
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        print("launch: wanted a program: -- script.py …, or -- -m module …", file=sys.stderr)
        return 2
    environments = [environment(os.environ, args.n, i, args.devices) for i in range(args.n)]
    address = f"127.0.0.1:{_free_port()}"
    for mapping in environments:
        # Bound to this machine only: JAX's coordinator trusts every connection.
        mapping |= {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_COORDINATOR_BIND_ADDRESS": address,
            # by this JAX detects mpirun, the first cluster that it looks for
            "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{address}",
        }
    try:
        return supervise([sys.executable, "-u", *program], environments, args.timeout, args.log_dir)
    except OSError as error:
        print(f"launch: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def environment(
    base: Mapping[str, str], processes: int, index: int, devices: int
) -> dict[str, str]:
    """The environment of one process: its devices, and the variables that `initialize()` and JAX read."""
    flags = base.get("XLA_FLAGS", "").split()
    wanted = {
        "--xla_force_host_platform_device_count": devices,
        "--xla_cpu_collective_timeout_seconds": _COLLECTIVE_SECONDS,
    }
    for name, value in wanted.items():
        given = [flag for flag in flags if flag.split("=")[0] == name]
        if name.endswith("device_count"):  # --devices decides
            flags = [flag for flag in flags if flag not in given]
            given = []
        if not given:
            flags.append(f"{name}={value}")
    ids = range(index * devices, (index + 1) * devices)
    return {
        **base,
        "JAX_PLATFORMS": base.get("JAX_PLATFORMS") or "cpu",
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_PROCESS_ID": str(index),
        # Divides accelerators among processes; without effect on the CPU.
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, ids)),
        # jax.distributed.initialize() takes these numbers only from a cluster: Open MPI, whatever
        # cluster this runs in. With version 5 of Open MPI, JAX would import mpi4py.
        "OMPI_COMM_WORLD_SIZE": str(processes),
        "OMPI_COMM_WORLD_RANK": str(index),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(index),
        "OMPI_VERSION": "4",
        "XLA_FLAGS": " ".join(flags),
    }


class Output:
    """A stream for lines. If it fails (a full disk, a closed pipe), this is reported once, and the run
    goes on without it.
    """

    def __init__(self, name: str, stream: TextIO) -> None:
        self.name = name
        self.stream = stream
        self._lock = threading.Lock()
        self._failed = False

    def write(self, line: str) -> None:
        """Writes a whole line."""
        with self._lock:
            if self._failed:
                return
            try:
                write_line(self.stream, line)
            except OSError as error:
                self._failed = True
                silence(self.stream)
                _say(f"launch: {self.name}: {error.strerror}; the run goes on without it")


class Worker:
    """One process; its output is passed on with its number before each line."""

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        shown: Output,
        log: Output | None,
    ) -> None:
        self.index = index
        self.last: collections.deque[str] = collections.deque(maxlen=_LAST)
        self.closed = math.inf  # the time when its output ended
        self._shown = shown
        self._log = log
        self._stopped_since: float | None = None
        # -I and -S: _worker.py starts faster without site packages.
        shim = [sys.executable, "-I", "-S", _worker.__file__, str(os.getpid())]
        self.process = subprocess.Popen(
            [*shim, *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A process group of its own: it is killed with everything that it starts, and not by the
            # Ctrl-C that the supervisor gets.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def failure(self) -> Failure | None:
        """Its failure, or None."""
        status = self.process.poll()
        if status is None:
            return self._stopped()
        if status < 0:
            return Failure(self.index, f"was killed by {_signal_name(-status)}", 128 - status)
        return Failure(self.index, f"ended with status {status}", status) if status else None

    def end(self) -> None:
        """Kills it and everything that it started, by SIGKILL, as JAX handles SIGTERM."""
        # The group may have ended; for processes not yet waited for, macOS raises PermissionError.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def drain(self) -> None:
        """Waits until its output has been passed on."""
        self._reader.join(_DRAIN)

    def _stopped(self) -> Failure | None:
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return None  # it has just ended, or the system has no /proc
        if stat.rpartition(")")[2].split()[0] != "T":
            self._stopped_since = None
            return None
        now = time.monotonic()
        self._stopped_since = self._stopped_since or now
        if now - self._stopped_since < _STOPPED:
            return None
        return Failure(self.index, "is stopped (SIGSTOP, or SIGTSTP)", 128 + signal.SIGSTOP)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip("\n")
                self.last.append(line)
                self._shown.write(f"[{self.index}] {line}")
                if self._log is not None:
                    self._log.write(line)
        self.closed = time.monotonic()


def supervise(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    timeout: float | None = None,
    log_dir: Path | None = None,
) -> int:
    """Runs the command once in each environment; the first failure ends all processes and is reported.

    A failure is an exit status other than 0, death by a signal, or a process that stays stopped for
    a second. Ctrl-C, SIGTERM and SIGHUP end the processes, with everything that they started; if this
    process is killed, a guard does.

    Args:
        command: an executable with its path, and arguments.
        environments: one for each process.
        timeout: seconds after which the run has failed.
        log_dir: a folder, created if needed, for a file with the output of each process.

    Returns:
        The exit status: 0, that of the first failure (128 + n for signal n), 124 after the timeout,
        128 + n when signal n ended the run.

    Raises:
        OSError: the command cannot be started, or the folder cannot be written.
    """
    begin = time.monotonic()
    shown = Output("standard output", sys.stdout)
    logs = [] if log_dir is None else _open_logs(log_dir, len(environments))
    workers: list[Worker] = []
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in handled}
    failure = None
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", _worker.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        for index, mapping in enumerate(environments):
            log = logs[index] if logs else None
            workers.append(Worker(index, command, mapping, shown, log))
            assert guard.stdin is not None
            guard.stdin.write(f"{workers[-1].process.pid}\n".encode())
            guard.stdin.flush()
        while failure is None and any(w.process.poll() is None for w in workers):
            time.sleep(_PAUSE)
            failure = _first(workers)
            if failure is None and asked:
                name = _signal_name(asked[0])
                failure = Failure(None, f"was ended by {name}", 128 + asked[0])
            if failure is None and timeout is not None and time.monotonic() - begin > timeout:
                failure = Failure(None, f"took longer than {timeout:g} s", _TIMED_OUT)
        failure = failure or _first(workers)
        seconds = time.monotonic() - begin
        running = [w.index for w in workers if w.process.poll() is None]
    finally:
        for worker in workers:
            worker.end()
        guard.kill()
        guard.communicate()
        for worker in workers:
            worker.drain()
        for log in logs:
            log.stream.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if failure is None:
        return 0
    _report(failure, workers, running, seconds)
    return failure.status


def _first(workers: Sequence[Worker]) -> Failure | None:
    """The failure that came before the others, or None.

    The peers of a process that dies follow within milliseconds, and may end before it does, as it may
    have more to clean up. But the system closes its output before its connections, so the output that
    ended first belongs to the cause. Both outputs may end between two checks; then a process killed by
    a signal comes before one that ended by itself, except for SIGABRT, by which JAX ends a process that
    lost a peer. A process whose last lines are about a lost peer comes after the others.
    """
    if not any(w.failure() for w in workers):
        return None
    time.sleep(_SETTLE)
    ending = [w for w in workers if w.closed < math.inf]
    for worker in ending:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(_GOING)
    failures = [(w, failure) for w in workers if (failure := w.failure())]

    def order(found: tuple[Worker, Failure]) -> tuple[bool, bool, float]:
        worker, _ = found
        status = worker.process.poll() or 0
        bereft = any(words in line for line in list(worker.last) for words in _BEREFT)
        return status >= 0 or status == -signal.SIGABRT, bereft, worker.closed

    return min(failures, key=order)[1] if failures else None


def _report(
    failure: Failure, workers: Sequence[Worker], running: Sequence[int], seconds: float
) -> None:
    who = "the run" if failure.process is None else f"process {failure.process} of {len(workers)}"
    others = [str(i) for i in running if i != failure.process]
    text = f"launch: {who} {failure.what}, after {seconds:.1f} s"
    if others:
        text += f"; still running and ended with it: {', '.join(others)}"
    if failure.process is not None and workers[failure.process].last:
        lines = "\n".join(f"    {line}" for line in workers[failure.process].last)
        text += f"\nlaunch: the last lines of process {failure.process}:\n{lines}"
    _say(text)


def _open_logs(folder: Path, number: int) -> list[Output]:
    folder.mkdir(parents=True, exist_ok=True)
    files = (folder / f"process-{index}.log" for index in range(number))
    return [Output(str(file), file.open("w", encoding="utf-8")) for file in files]


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        write_line(sys.stderr, text)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _positive(kind: type[int] | type[float]):
    def convert(text: str) -> int | float:
        number = kind(text)
        if not number > 0:
            raise ValueError
        return number

    convert.__name__ = f"positive {kind.__name__}"  # argparse names it in its error
    return convert
