"""A rendezvous before JAX's own runtime connects, so that a missing process raises an exception.

JAX's client aborts the process, without an exception, when the coordinator cannot be reached or another process
does not come; its service crashes when the port is taken. So the processes first meet over plain sockets at the
coordinator's address.
"""

import contextlib
import re
import selectors
import socket
import time
from typing import NamedTuple

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


def split_address(name: str, address: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 host stands in brackets."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{name}: wanted 'host:port', got {address!r}")
    return host.strip("[]"), int(port)


def coordinate(participant: Participant, bind: str) -> None:
    """Process 0: waits at the address `bind` until all others have come, then lets all go on.

    Raises `RuntimeError` naming the missing processes when time is up, and at once when two processes
    have the same number or different counts; the other processes then raise the same error.
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
        # Closed before any process continues, so that a port that is open afterwards is JAX's.
        listener.close()
        for connection in present:
            with contextlib.suppress(OSError):
                connection.sendall((_NO + reason.encode() if reason else _GO) + b"\n")
        if reason:
            raise RuntimeError(reason)
        # The side that closes first keeps the port in TIME_WAIT: it should be the other one.
        for connection in present:
            with contextlib.suppress(OSError):
                connection.settimeout(1)
                connection.recv(1)


def join(participant: Participant) -> None:
    """Any other process: reports to the coordinator and waits until all have come."""
    end = time.monotonic() + participant.timeout
    address = split_address("coordinator_address", participant.coordinator)
    hello = b"energy_attn %d %d\n" % (participant.process, participant.processes)
    last = "nothing was tried"
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as connection:
                connection.sendall(hello)
                # The coordinator may have started later: wait 2 s more for its answer.
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
    """Fills `present`; returns the reason of a failure, or an empty string when all have come.

    A process that disconnects (restarted by its host, say) is awaited again.
    """
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
                if not text or len(line) > _LONGEST:
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
