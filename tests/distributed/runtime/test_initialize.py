"""How processes find each other, and what they are told when they do not. No JAX runtime is started here."""

import contextlib
import socket
import threading
from collections.abc import Callable

import jax
import pytest

from energy_attn.distributed import initialize
from energy_attn.distributed.runtime import _initialize
from tests.support.flags import free_port

JOB = {"coordinator_address": "localhost:1", "num_processes": 2, "process_id": 0}
VARIABLES = ("COORDINATOR_ADDRESS", "COORDINATOR_BIND_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[007-008],other",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    """An environment that no launcher has touched."""
    for name in (*VARIABLES, "LOCAL_DEVICE_IDS", "COORDINATOR_PORT"):
        monkeypatch.delenv(f"JAX_{name}", raising=False)
    for name in SLURM:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch) -> list[dict]:
    """What `initialize` would pass to the rendezvous and to JAX, on a JAX that has not started."""
    calls: list[dict] = []

    def connect(address, count, process, **options):
        calls.append({"address": address, "count": count, "process": process, **options})

    monkeypatch.setattr(_initialize, "_started", lambda: False)
    replaced = {
        "coordinate": lambda participant, bind: calls.append({"held": bind}),
        "join": lambda participant: calls.append({"answered": participant}),
        "_leave_on_failure": lambda: None,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(_initialize, name, function)
    monkeypatch.setattr(jax.distributed, "initialize", connect)
    return calls


def test_alone_does_nothing(started):
    initialize()
    initialize()
    assert started == []


def test_arguments_reach_jax(started):
    initialize("host:1234", 4, 2, local_device_ids=[4, 5], heartbeat_timeout=7)
    meeting, call = started
    assert meeting == {"answered": _initialize.Participant("host:1234", 2, 4, 30)}
    assert (call["address"], call["count"], call["process"]) == ("host:1234", 4, 2)
    assert call["local_device_ids"] == [4, 5]
    assert call["heartbeat_timeout_seconds"] == 7
    assert call["shutdown_timeout_seconds"] == 10
    assert call["initialization_timeout"] == 30


def test_environment_of_the_launcher(started, monkeypatch):
    for name, text in zip(VARIABLES, ("h:1", "127.0.0.1:1", "2", "0"), strict=True):
        monkeypatch.setenv(f"JAX_{name}", text)
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "2,3")
    initialize()
    held, call = started
    assert held == {"held": "127.0.0.1:1"}
    assert call["coordinator_bind_address"] == "127.0.0.1:1"
    assert (call["address"], call["count"], call["process"]) == ("h:1", 2, 0)
    assert call["local_device_ids"] == [2, 3]


@pytest.mark.smoke
def test_slurm_is_recognised(started, monkeypatch):
    """JAX's own detection, asked through a function that is not public: one of our first things to break."""
    for name, text in SLURM.items():
        monkeypatch.setenv(name, text)
    initialize()
    meeting, call = started
    assert meeting["answered"].coordinator.startswith("node007:")
    assert (call["count"], call["process"], call["local_device_ids"]) == (4, 3, [1])


def test_explicit_arguments_win_over_the_cluster(started, monkeypatch):
    for name, text in SLURM.items():
        monkeypatch.setenv(name, text)
    initialize("mine:5", process_id=0)
    assert started[1]["address"] == "mine:5"
    assert (started[1]["count"], started[1]["process"]) == (4, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"num_processes": 4}, ValueError, "coordinator_address, process_id: wanted all of"),
        (JOB | {"process_id": 2}, ValueError, "process_id: wanted 0 to 1, got 2"),
        (JOB | {"process_id": -1}, ValueError, "process_id: wanted at least 0"),
        (JOB | {"num_processes": 0}, ValueError, "num_processes: wanted at least 1"),
        (JOB | {"num_processes": 2.0}, TypeError, "num_processes: wanted an integer"),
        (JOB | {"coordinator_address": "host"}, ValueError, "coordinator_address: wanted 'host:"),
        (JOB | {"coordinator_address": "h:99999"}, ValueError, "coordinator_address: wanted"),
        (JOB | {"coordinator_address": 1234}, TypeError, "coordinator_address: wanted a string"),
        (JOB | {"coordinator_bind_address": "x"}, ValueError, "coordinator_bind_address: wanted"),
        (JOB | {"local_device_ids": "0,1"}, TypeError, "local_device_ids: wanted an integer"),
        (JOB | {"heartbeat_timeout": 0}, ValueError, "heartbeat_timeout: wanted at least 1"),
        (JOB | {"initialization_timeout": 0.5}, TypeError, "initialization_timeout: wanted an"),
    ],
)
def test_bad_arguments(started, unchecked, arguments, error, said):
    with pytest.raises(error, match=f"^{said}"):
        initialize(**arguments)
    assert started == []


@pytest.mark.parametrize(
    ("name", "text"), [("JAX_PROCESS_ID", "one"), ("JAX_LOCAL_DEVICE_IDS", "0;1")]
)
def test_bad_environment(started, monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"^{name}: wanted .*'{text}'"):
        initialize("h:1", 2)


def test_too_late():
    """JAX's own error, after minutes in which others wait, or none: devices of this process alone."""
    jax.devices()
    with pytest.raises(RuntimeError, match="before anything uses a device"):
        initialize(**JOB)


def test_second_call(started, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="got a second one"):
        initialize(**JOB)


class Rendezvous:
    """A rendezvous in threads, and the result of each: None or its error's text."""

    def __init__(self, processes: int, timeout: int = 20) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.results: dict[str, str | None] = {}
        self._callers = processes, timeout
        self._threads: list[threading.Thread] = []
        self.accepts = threading.Event()

    def start(self, name: str, process: int, processes: int | None = None) -> None:
        participant = _initialize.Participant(
            self.address, process, processes or self._callers[0], self._callers[1]
        )
        if process:
            self._run(name, lambda: _initialize.join(participant))
        else:
            self._run(name, lambda: self._hold(participant))

    def finish(self) -> dict[str, str | None]:
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        return self.results

    def connection(self) -> socket.socket:
        """A connection to the coordinator, once it listens."""
        host, port = self.address.split(":")
        for _ in range(500):
            with contextlib.suppress(OSError):
                return socket.create_connection((host, int(port)), 1)
            threading.Event().wait(0.01)
        raise AssertionError("nobody listens")

    def _hold(self, participant: _initialize.Participant) -> None:
        _initialize.coordinate(participant, self.address)
        # JAX's service takes the port now; the others go on when it is there.
        host, port = self.address.split(":")
        with socket.create_server((host, int(port))) as service:
            service.settimeout(5)
            for _ in range(participant.processes - 1):
                service.accept()[0].close()

    def _run(self, name: str, call: Callable[[], None]) -> None:
        def body() -> None:
            try:
                call()
                self.results[name] = None
            except RuntimeError as error:
                self.results[name] = str(error)

        self._threads.append(threading.Thread(target=body, daemon=True))
        self._threads[-1].start()


MEETINGS = {  # of so many, in so many seconds: who comes, with another count, and what is said to each
    "late, before there is a coordinator": (3, 20, [(2,), (0,), (1,)], None),
    "missing": (4, 1, [(0,), (1,)], "process 2, 3 of 4 did not come"),
    "twice": (3, 20, [(0,), (1,), (1,)], "process_id: wanted a different one in each"),
    "counts": (2, 20, [(0,), (1, 3)], "num_processes: wanted the same number in all"),
}


@pytest.mark.parametrize("what", MEETINGS)
def test_meetings(what):
    """A process that waits for ever, or is not told of what is wrong with another one."""
    processes, timeout, who, said = MEETINGS[what]
    meeting = Rendezvous(processes, timeout)
    for i, participant in enumerate(who):
        meeting.start(str(i), *participant)
    found = meeting.finish()
    assert len(found) == len(who)
    for text in found.values():
        assert text is None if said is None else text is not None and text.startswith(said)


def test_nobody_at_the_address():
    meeting = Rendezvous(2, timeout=1)
    meeting.start("alone", 1)
    text = meeting.finish()["alone"]
    assert text is not None
    assert text.startswith(
        f"coordinator_address: process 1 of 2 could not meet process 0 at {meeting.address}"
    )
    assert "within 1 s" in text and "refused" in text


def test_port_taken():
    """JAX's service crashes on it, without a word to Python."""
    meeting = Rendezvous(2)
    host, port = meeting.address.split(":")
    with socket.create_server((host, int(port))):
        with pytest.raises(RuntimeError, match="^coordinator_address: process 0 cannot listen at"):
            _initialize.coordinate(
                _initialize.Participant(meeting.address, 0, 2, 5), meeting.address
            )


def test_strangers_and_restarted_processes():
    """A health check of the cluster's, a port scanner, a process that its host restarts: none of them counts."""
    meeting = Rendezvous(3)
    meeting.start("0", 0)
    with meeting.connection() as scanner, meeting.connection() as restarted:
        scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
        restarted.sendall(b"energy_attn 1 3\n")
    meeting.start("1", 1)
    meeting.start("2", 2)
    assert meeting.finish() == {"0": None, "1": None, "2": None}


def test_something_else_answers():
    meeting = Rendezvous(2, timeout=1)
    host, port = meeting.address.split(":")
    with socket.create_server((host, int(port))) as other:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    other.accept()[0].close()

        threading.Thread(target=serve, daemon=True).start()
        meeting.start("1", 1)
        text = meeting.finish()["1"]
    assert text is not None and "could not meet process 0" in text
