"""Starts a program of several processes, which meet over plain sockets before JAX connects them."""

# JAX's client aborts its process, without an exception, when the coordinator cannot be reached or another process does
# not connect (https://github.com/jax-ml/jax/pull/39095 quotes its message), and its service crashes when the port is
# taken. Over plain sockets, at the coordinator's address, a missing process raises an exception.

import atexit
import contextlib
import os
import re
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import jax

from energy_attn.kernels.internal import checks, private_names

_GO = b"energy_attn go"
_NO = b"energy_attn no "
_LONGEST = 4096  # bytes of a line: the longest is a reason that names many processes
_PAUSE = 0.05  # seconds between attempts to connect


class Participant(NamedTuple):
    """The message of a process to the coordinator."""

    coordinator: str  # host:port
    process: int
    processes: int
    timeout: int  # seconds


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    cluster_detection_method: str | None = None,
    coordinator_bind_address: str | None = None,
    initialization_timeout: int = 30,
    heartbeat_timeout: int = 10,
    shutdown_timeout: int = 10,
) -> None:
    """Connects the processes of a job, so that `jax.devices()` has the devices of all processes.

    Call it once in each process, before anything that uses a device. JAX finds the arguments under SLURM and
    Open MPI, on Cloud TPU, and on Kubernetes (with the package `kubernetes`). Otherwise the environment
    variables `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` are
    read. Without any of these it is a program of one process, and the call does nothing.

    Before JAX connects, the processes meet at the coordinator's address and wait for each other, as JAX
    ends a process without an exception when another one is missing. All processes have to call this
    function, and none `jax.distributed.initialize`. A process with an uncaught exception exits at once with
    status 1, without the functions registered with `atexit` before this call. JAX would let it wait for
    the others, and the others for it.

    Args:
        coordinator_address: `host:port` of process 0, where it listens and the others reach it.
        num_processes: the number of processes, over all hosts.
        process_id: the number of this process, from 0.
        local_device_ids: the accelerators of this process; by default all of its host, or
            one where SLURM or Open MPI start several processes on a host.
        cluster_detection_method: a name by which JAX detects a cluster, such as `"mpi4py"`; `"deactivate"` for none.
        coordinator_bind_address: where process 0 listens; all of its addresses by default.
        initialization_timeout: seconds that the processes wait for each other.
        heartbeat_timeout: seconds without a heartbeat after which a process counts as lost. JAX
            then ends the others, with a message but without an exception.
        shutdown_timeout: seconds that a process waits for the others when it ends.

    Raises:
        TypeError: arguments of wrong types.
        ValueError: an address without a port, numbers out of range, or only some of the three
            required arguments.
        NotImplementedError: this version of JAX detects clusters differently; pass all three, or
            `cluster_detection_method="deactivate"`.
        RuntimeError: the coordinator cannot be reached, its port is taken, or a process did not
            connect within `initialization_timeout`: raised in every process that did. Also if it was called before,
            or a device has been used.

    Examples:
        >>> from energy_attn.distributed import initialize
        >>> initialize()  # alone: nothing happens
    """
    timeouts = {
        "initialization_timeout": initialization_timeout,
        "heartbeat_timeout": heartbeat_timeout,
        "shutdown_timeout": shutdown_timeout,
    }
    for name, seconds in timeouts.items():
        checks.check_integer(name, seconds, least=1)
    addresses = {
        "coordinator_address": coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "coordinator_bind_address": coordinator_bind_address
        or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"),
        "cluster_detection_method": cluster_detection_method,
    }
    for name, text in addresses.items():
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{name}: wanted a string or None, got {checks.received(text)}")
    args = addresses["coordinator_address"], num_processes, process_id, local_device_ids
    job = _detected(*args, cluster_detection_method, initialization_timeout)
    if job is None:
        return
    address, count, process, devices = job
    _, port = split_address("coordinator_address", address)
    bind = addresses["coordinator_bind_address"] or f"[::]:{port}"
    split_address("coordinator_bind_address", bind)
    if jax.distributed.is_initialized():
        raise RuntimeError("initialize: wanted one call in each process, got a second one")
    if _started():
        raise RuntimeError(
            "initialize: wanted the call before anything uses a device (arrays, jax.devices(), "
            "jax.process_count(), …); got it after JAX started its devices"
        )
    participant = Participant(address, process, count, initialization_timeout)
    if process == 0:
        coordinate(participant, bind)
    else:
        join(participant)
    _leave_on_failure()
    jax.distributed.initialize(
        address,
        count,
        process,
        local_device_ids=devices,
        cluster_detection_method="deactivate",
        initialization_timeout=initialization_timeout,
        heartbeat_timeout_seconds=heartbeat_timeout,
        shutdown_timeout_seconds=shutdown_timeout,
        coordinator_bind_address=bind,
    )


def _detected(
    address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: int | Sequence[int] | None,
    method: str | None,
    timeout: int,
) -> tuple[str, int, int, list[int] | None] | None:
    """The coordinator's address, the number of processes, this process's own, and its devices; None if alone."""
    count = _number("num_processes", num_processes)
    process = _number("process_id", process_id)
    devices = _device_ids(local_device_ids)
    if method != "deactivate" and None in (address, count, process, devices):
        detect = private_names("cluster").Environment.auto_detect_unset_distributed_params
        address, count, process, devices = detect(address, count, process, devices, method, timeout)
    arguments = {"coordinator_address": address, "num_processes": count, "process_id": process}
    if all(x is None for x in arguments.values()):
        return None
    if address is None or count is None or process is None:
        missing = ", ".join(name for name, x in arguments.items() if x is None)
        passed = ", ".join(f"{name} = {x!r}" for name, x in arguments.items() if x is not None)
        raise ValueError(
            f"{missing}: wanted all of {', '.join(arguments)}, or none on a cluster that JAX "
            f"recognises; got None with {passed}"
        )
    checks.check_integer("num_processes", count, least=1)
    if not 0 <= process < count:
        raise ValueError(f"process_id: wanted 0 to {count - 1}, got {process}")
    return address, count, process, devices


def _number(name: str, number: int | None) -> int | None:
    if number is not None:
        return checks.check_integer(name, number, least=0)
    text = os.environ.get(f"JAX_{name.upper()}")
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(f"JAX_{name.upper()}: wanted an integer from 0, got {text!r}")
    return int(text)


def _device_ids(ids: int | Sequence[int] | None) -> list[int] | None:
    if ids is None:
        text = os.environ.get("JAX_LOCAL_DEVICE_IDS")
        if not text:
            return None
        if not all(part.strip().isdecimal() for part in text.split(",")):
            raise ValueError(f"JAX_LOCAL_DEVICE_IDS: wanted integers and commas, got {text!r}")
        return [int(part) for part in text.split(",")]
    listed = ids if isinstance(ids, Sequence) and not isinstance(ids, str) else [ids]
    return [checks.check_integer("local_device_ids", x, least=0) for x in listed]


def _started() -> bool:
    try:
        return private_names("devices").started()
    except NotImplementedError:  # JAX checks it, too
        return False


def _leave_on_failure() -> None:
    """Lets a process with an uncaught exception exit at once."""
    # Otherwise JAX waits at exit for the other processes, which wait for this one in a collective, until all are
    # aborted, and the exception is lost among their messages.
    failed = False
    report = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal failed
        failed = True
        report(kind, error, trace)

    def leave() -> None:
        if failed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    sys.excepthook = note
    atexit.register(leave)  # after JAX's own, so it runs before that


def split_address(name: str, address: str) -> tuple[str, int]:
    """Host and port of `host:port`, with brackets around an IPv6 host."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{name}: wanted 'host:port', got {address!r}")
    return host.strip("[]"), int(port)


def coordinate(participant: Participant, bind: str) -> None:
    """Process 0: waits at the address `bind` for all others, then lets all continue.

    Raises `RuntimeError` naming the processes that are missing after the timeout, and at once when two processes
    have the same number or different counts. The other processes raise the same error.
    """
    end = time.monotonic() + participant.timeout
    with contextlib.ExitStack() as opened:
        try:
            listener = opened.enter_context(_listen(*split_address("bind", bind)))
        except OSError as error:
            raise RuntimeError(
                f"coordinator_address: process 0 cannot listen at {bind} ({_message_of(error)}). Check that "
                "no other program, such as an earlier run, has that port, and that the address is this host's"
            ) from error
        present: dict[socket.socket, int] = {}
        reason = _gather(listener, present, participant, end, opened)
        # closed before any process continues, so that a port that is open afterwards is JAX's
        listener.close()
        for connection in present:
            with contextlib.suppress(OSError):
                connection.sendall((_NO + reason.encode() if reason else _GO) + b"\n")
        if reason:
            raise RuntimeError(reason)
        # the side that closes first keeps the port in TIME_WAIT: it should be the other side
        for connection in present:
            with contextlib.suppress(OSError):
                connection.settimeout(1)
                connection.recv(1)


def join(participant: Participant) -> None:
    """Any other process: reports to the coordinator and waits for all processes."""
    end = time.monotonic() + participant.timeout
    address = split_address("coordinator_address", participant.coordinator)
    hello = b"energy_attn %d %d\n" % (participant.process, participant.processes)
    last = "nothing was tried"
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as connection:
                connection.sendall(hello)
                # the coordinator may have started later, so that its answer comes up to 2 s after the timeout
                connection.settimeout(left + 2)
                line = connection.makefile("rb").readline(_LONGEST).rstrip()
            if line == _GO:
                _wait_for_port(address, end)
                return
            if line.startswith(_NO):
                raise RuntimeError(line.removeprefix(_NO).decode())
            last = "something answered that is not energy_attn's initialize(), or is JAX already"
        except OSError as error:
            last = _message_of(error)
        time.sleep(_PAUSE)
    raise RuntimeError(
        f"coordinator_address: process {participant.process} of {participant.processes} could not meet process 0 "
        f"at {participant.coordinator} within {participant.timeout} s (last attempt: {last}). Check that "
        "process 0 calls initialize(), that this is its address and no firewall closes it"
    )


def _gather(
    listener: socket.socket,
    present: dict[socket.socket, int],
    participant: Participant,
    end: float,
    opened: contextlib.ExitStack,
) -> str:
    """Fills `present`; returns the reason of a failure, or an empty string when all processes have connected."""
    unread: dict[socket.socket, bytes] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(present) < participant.processes - 1 and (left := end - time.monotonic()) > 0:
            for ready, _ in selector.select(left):
                if ready.fileobj is listener:
                    connection = opened.enter_context(listener.accept()[0])
                    unread[connection] = b""
                    selector.register(connection, selectors.EVENT_READ)
                    continue
                connection = ready.fileobj
                assert isinstance(connection, socket.socket)
                try:
                    text = connection.recv(_LONGEST)
                except OSError:
                    text = b""
                line = unread[connection] = unread[connection] + text
                if (
                    not text or len(line) > _LONGEST
                ):  # disconnected, such as by a restart: awaited again
                    selector.unregister(connection)
                    present.pop(connection, None)
                    connection.close()
                elif hello := re.fullmatch(rb"energy_attn (\d{1,9}) (\d{1,9})\n", line):
                    process, count = map(int, hello.groups())
                    wrong = _wrong(process, count, present, participant)
                    present[connection] = process
                    if wrong:
                        return wrong
    missing = sorted(set(range(1, participant.processes)) - set(present.values()))
    if not missing:
        return ""
    names = ", ".join(map(str, missing[:20])) + (", …" if len(missing) > 20 else "")
    return (
        f"process {names} of {participant.processes} did not come to the coordinator at "
        f"{participant.coordinator} within {participant.timeout} s. Check that it was started, what it wrote "
        "before it ended, that it calls initialize() with this address, and that it can reach it"
    )


def _wrong(
    process: int, count: int, present: dict[socket.socket, int], participant: Participant
) -> str:
    if count != participant.processes:
        return (
            f"num_processes: wanted the same number in all processes, got {participant.processes} in "
            f"process 0 and {count} in process {process}"
        )
    if process in present.values() or not 0 < process < count:
        return (
            f"process_id: wanted a different one in each process, 0 to {count - 1}, got {process} "
            "in two of them"
        )
    return ""


def _listen(host: str, port: int) -> socket.socket:
    everywhere = host in ("", "::", "0.0.0.0")
    if everywhere and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    if everywhere:
        return socket.create_server(("", port), backlog=1024)
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=1024)


def _wait_for_port(address: tuple[str, int], end: float) -> None:
    """Waits until JAX's service listens, as its client waits a second between attempts."""
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
            return
        time.sleep(_PAUSE)


def _message_of(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
