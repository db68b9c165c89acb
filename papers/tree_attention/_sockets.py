"""Measures a network by plain sockets: python _sockets.py HOST ADDRESS ...

The first host times messages to the second and back, then large ones that every host sends to the next at once.
"""

import json
import signal
import socket
import statistics
import sys
import threading
import time

from _network import die_with_parent

SECONDS = 30.0
PORT, PINGS, BULK = 7000, 30, 1 << 22


def measure(host: int, addresses: list[str]) -> dict[str, float]:
    """The measurements of this host; the first alone times round trips."""
    with socket.create_server((addresses[host], PORT)) as server:
        following = _connect(addresses[(host + 1) % len(addresses)])
        previous, _ = server.accept()
    trips, rates = [0.0], []
    with following, previous:
        for end in (following, previous):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS * (host < 2)):
            start = time.perf_counter()
            if host == 0:
                following.sendall(b"?")
                following.recv(1)
            else:
                previous.sendall(previous.recv(1))
            trips.append(time.perf_counter() - start)
        for _ in range(4):
            following.sendall(b"?")  # all begin together
            previous.recv(1)
            sending = threading.Thread(target=following.sendall, args=(bytes(BULK),))
            start = time.perf_counter()
            sending.start()
            missing = BULK
            while missing > 0:
                missing -= len(previous.recv(min(missing, 1 << 20)))
            rates.append(8e-6 * BULK / (time.perf_counter() - start))
            sending.join()
    return {
        "round_trip_ms": round(1e3 * statistics.median(trips), 3),
        # without the first, in which the connection finds the rate
        "mbit": round(statistics.median(rates[1:]), 1),
    }


def _connect(address: str) -> socket.socket:
    until = time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=SECONDS)
        except ConnectionRefusedError:  # the other host does not listen yet
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    die_with_parent()
    signal.alarm(int(2 * SECONDS))
    print(json.dumps(measure(int(sys.argv[1]), sys.argv[2:])), flush=True)
