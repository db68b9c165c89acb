"""Hosts on one machine: network namespaces joined by a switch with a set rate and latency.

Linux can shape what an interface sends (`tc`, token bucket) but few kernels come with the part that
delays it, so the switch is a process of this module. Each host's only interface is a TAP device
whose other end that process holds: it reads the frames that a host sends, holds each for the time
that a cable of the given rate and latency would take, and writes it to the host it is addressed to.

    with Network(4, mbit=1000, latency_ms=0.2) as network:
        subprocess.Popen(network.command(0, ["ping", "-c1", network.addresses[1]]))

It needs root, `/dev/net/tun`, `ip` and `tc`: `Network.missing()` says which is not there. The process with the
switch makes the namespaces and removes them. It ends when its standard input does, so they go even if the program
that wanted them is killed.
"""

import contextlib
import ctypes
import fcntl
import gc
import heapq
import json
import os
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_SECONDS_TO_START = 30.0
# <linux/if_tun.h>
_SET_INTERFACE, _SET_OFFLOADS = 0x400454CA, 0x400454D0
_TAP, _NO_PROTOCOL_INFORMATION, _WITH_OFFLOAD_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS = 0x01, 0x02
# `struct virtio_net_hdr` stands before each frame: flags, kind of segments, length of their
# headers, bytes of payload in each, and where a checksum is missing.
_OFFLOAD_HEADER = struct.Struct("=BBHHHH")
_LARGEST_FRAME = 1 << 17
_PR_SET_PDEATHSIG = 1
_PORT, _PINGS, _BULK = 7000, 30, 1 << 22  # of measurements by sockets


class Network:
    """Hosts that each have one interface, of `mbit` Mbit/s both ways, `latency_ms` from all others.

    Attributes:
        addresses: of each host. They exist inside the namespaces only.
    """

    def __init__(self, hosts: int, *, mbit: float, latency_ms: float) -> None:
        self._rate = {"mbit": mbit, "latency_ms": latency_ms}
        self.addresses = [_address(host) for host in range(hosts)]
        # named after this process, so that two programs do not meet; 15 letters are allowed
        self._names = [f"ea{os.getpid()}-{host}" for host in range(hosts)]

    @staticmethod
    def missing() -> str | None:
        """The first missing requirement; None if a network can be made."""
        if not sys.platform.startswith("linux") or os.geteuid() != 0:
            return "root on Linux"
        if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
            return "/dev/net/tun"
        return next((tool for tool in ("ip", "tc") if shutil.which(tool) is None), None)

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on a host; it keeps its process id."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def measure(self) -> dict[str, float]:
        """Round trip between two hosts, and the rate of each while every host sends to the next, by plain sockets.

        Nothing else should run on the hosts.
        """
        program = [sys.executable, __file__]
        started = [
            subprocess.Popen(
                self.command(host, [*program, str(host), *self.addresses]),
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in range(len(self.addresses))
        ]
        try:
            outputs = [process.communicate(timeout=2 * _SECONDS_TO_START)[0] for process in started]
            return json.loads(outputs[0])
        finally:
            for process in started:
                process.kill()  # nothing to one that has ended
                process.communicate()

    def __enter__(self) -> "Network":
        plan = {"names": self._names, **self._rate}
        self._switch = subprocess.Popen(
            [sys.executable, __file__, json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the program; this one goes after it
        )
        assert self._switch.stdout is not None
        ready, _, _ = select.select([self._switch.stdout], [], [], _SECONDS_TO_START)
        if not ready or self._switch.stdout.readline() != "ready\n":
            self.__exit__()
            raise RuntimeError("the switch of the emulated network did not start")
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._switch.communicate(timeout=_SECONDS_TO_START)
        except subprocess.TimeoutExpired:
            self._switch.kill()
            self._switch.communicate()
        if self._switch.returncode != 0:
            _remove(self._names)  # it may not have come to that


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _address(host: int) -> str:
    return f"10.99.0.{host + 1}"


def _hardware_address(host: int) -> bytes:
    return bytes((2, 0, 0, 0, 0, host))  # "locally administered"


def _run(*command: str, stdin: str | None = None) -> None:
    subprocess.run(command, check=True, input=stdin, text=True, stdout=subprocess.DEVNULL)


def _remove(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
        shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)


@contextlib.contextmanager
def _hosts(names: Sequence[str], mbit: float) -> Iterator[list[int]]:
    """Makes the namespaces; gives the switch's ends of their interfaces; removes all in the end."""
    ports: list[int] = []
    try:
        for host, name in enumerate(names):
            ports.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            _make_host(host, name, ports[-1], len(names), mbit)
        yield ports
    finally:
        _remove(names)
        for port in ports:
            os.close(port)


def _make_host(host: int, name: str, port: int, hosts: int, mbit: float) -> None:
    flags = _TAP | _NO_PROTOCOL_INFORMATION | _WITH_OFFLOAD_HEADER
    fcntl.ioctl(port, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), flags))
    # lets TCP send large segments, so that the switch does not handle every 1500 bytes
    fcntl.ioctl(port, _SET_OFFLOADS, _CHECKSUMS | _SEGMENTS)
    _run("ip", "netns", "add", name)
    # gloo binds the address of the machine's host name, which has to be this host's own
    folder = Path("/etc/netns", name)
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{_address(host)} {socket.gethostname()}\n")
    # a file descriptor keeps its interface when that moves to another namespace
    _run("ip", "link", "set", "dev", name, "netns", name)
    peers = [other for other in range(hosts) if other != host]
    # Segments of at most half a millisecond, or small messages wait for large ones.
    piece = int(min(65536, max(3000, mbit * 1e6 / 8 * 0.5e-3)))
    lines = [
        # Between devices of one host: by default a window is one segment of 64 kB, acknowledged after 40 ms.
        "link set lo mtu 1500 up",
        f"link set {name} address {_hardware_address(host).hex(':')} gso_max_size {piece}",
        f"link set {name} name eth0",
        f"addr add {_address(host)}/24 dev eth0",
        "link set eth0 up",
        *[
            f"neigh add {_address(other)} lladdr {_hardware_address(other).hex(':')} dev eth0"
            " nud permanent"
            for other in peers
        ],
    ]
    _run("ip", "-netns", name, "-batch", "-", stdin="\n".join(lines) + "\n")
    # Data over the rate waits at the sender, where TCP notices it; in the switch, acknowledgements would queue
    # behind megabytes of data.
    bucket = f"rate {mbit:.6g}mbit burst {piece + 4096} limit 32m"
    _run("tc", "-netns", name, *"qdisc add dev eth0 root tbf".split(), *bucket.split())
    # available in every kernel
    setting = "/proc/sys/net/ipv4/tcp_congestion_control"
    _run("ip", "netns", "exec", name, "sh", "-c", f"echo reno > {setting}")


def wire_size(frame: bytes) -> int:
    """The bytes of a frame, each segment that it stands for with headers of its own."""
    size = len(frame) - _OFFLOAD_HEADER.size
    _, segmented, header, payload, _, _ = _OFFLOAD_HEADER.unpack_from(frame)
    if not segmented:
        return size
    return size + (-(-(size - header) // payload) - 1) * header


class Cables:
    """The arrival times of frames that hosts send to each other; callers pass the time in seconds.

    A frame occupies the cable from its sender and that to its receiver, each for size / rate, and
    the second not before the first; it arrives `latency_ms` after its last bit has left the second.
    """

    def __init__(self, hosts: int, *, mbit: float, latency_ms: float) -> None:
        self._seconds_per_byte, self._latency = 8e-6 / mbit, 1e-3 * latency_ms
        self._free_from, self._free_to = [0.0] * hosts, [0.0] * hosts

    def arrival(self, now: float, sender: int, receiver: int, size: int) -> float:
        """When a frame that is sent now arrives."""
        lasts = size * self._seconds_per_byte
        begin = max(now, self._free_from[sender])
        self._free_from[sender] = begin + lasts
        begin = max(begin, self._free_to[receiver])
        self._free_to[receiver] = begin + lasts
        return begin + lasts + self._latency


def _forward(ports: Sequence[int], cables: Cables) -> None:
    """Forwards frames until standard input ends."""
    sender = {port: host for host, port in enumerate(ports)}
    host_of = {_hardware_address(host): host for host in range(len(ports))}
    waiting: list[tuple[float, int, int, bytes]] = []  # due, frame's number, to, frame
    frames = 0
    offset = _OFFLOAD_HEADER.size
    stop = sys.stdin.fileno()
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, frame = heapq.heappop(waiting)
            # a host that cannot take a frame loses it, and TCP sends it again
            with contextlib.suppress(OSError):
                os.write(target, frame)
            now = time.monotonic()
        timeout = max(0.0, waiting[0][0] - now) if waiting else None
        readable, _, _ = select.select([stop, *ports], [], [], timeout)
        now = time.monotonic()
        for port in readable:
            if port == stop:
                return
            try:
                frame = os.read(port, _LARGEST_FRAME)
            except BlockingIOError:
                continue
            receiver = host_of.get(frame[offset : offset + 6])
            if receiver is None:  # an interface's announcements to everybody
                continue
            frames += 1
            due = cables.arrival(now, sender[port], receiver, wire_size(frame))
            heapq.heappush(waiting, (due, frames, ports[receiver], frame))


def _stop(*_: object) -> None:
    raise SystemExit(1)  # by way of every `finally`


def _main(plan: dict[str, Any]) -> None:
    """The switch: makes the hosts of a plan, prints "ready", and forwards frames until its input ends."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _stop)
    with _hosts(plan["names"], plan["mbit"]) as ports:
        # ahead of the hosts' own work, which shares the cores with it
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
        gc.disable()  # nothing here makes cycles
        print("ready", flush=True)
        _forward(ports, Cables(len(ports), mbit=plan["mbit"], latency_ms=plan["latency_ms"]))


def measure_sockets(host: int, addresses: list[str]) -> dict[str, float]:
    """Measures the network as one host by plain sockets: `python _network.py HOST ADDRESS ...`.

    The first host times messages to the second and back, then every host sends large ones to the next at once.
    """
    with socket.create_server((addresses[host], _PORT)) as server:
        following = _connect(addresses[(host + 1) % len(addresses)])
        previous, _ = server.accept()
    trips, rates = [0.0], []
    with following, previous:
        for end in (following, previous):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS * (host < 2)):
            start = time.perf_counter()
            if host == 0:
                following.sendall(b"?")
                following.recv(1)
            else:
                previous.sendall(previous.recv(1))
            trips.append(time.perf_counter() - start)
        for _ in range(4):
            following.sendall(b"?")  # all hosts start together
            previous.recv(1)
            sending = threading.Thread(target=following.sendall, args=(bytes(_BULK),))
            start = time.perf_counter()
            sending.start()
            missing = _BULK
            while missing > 0:
                missing -= len(previous.recv(min(missing, 1 << 20)))
            rates.append(8e-6 * _BULK / (time.perf_counter() - start))
            sending.join()
    return {
        "round_trip_ms": round(1e3 * statistics.median(trips), 3),
        # without the first, in which the connection finds the rate
        "mbit": round(statistics.median(rates[1:]), 1),
    }


def _connect(address: str) -> socket.socket:
    until = time.monotonic() + _SECONDS_TO_START
    while True:
        try:
            return socket.create_connection((address, _PORT), timeout=_SECONDS_TO_START)
        except ConnectionRefusedError:  # the other host does not listen yet
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    if sys.argv[2:]:
        die_with_parent()
        signal.alarm(int(2 * _SECONDS_TO_START))
        print(json.dumps(measure_sockets(int(sys.argv[1]), sys.argv[2:])), flush=True)
    else:
        _main(json.loads(sys.argv[1]))
