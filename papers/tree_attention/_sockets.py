"""What plain sockets find of a network: run on each host by `Network.measure`, as

python _sockets.py answer ADDRESS
python _sockets.py ask ADDRESS
python _sockets.py around MINE NEXT ...
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
# Small messages, then a large one.
PORT, PINGS, BULK = 7000, 30, 1 << 22


def answer(address: str) -> dict[str, float]:
    """The host that is measured from: sends pings back, and says when it has all of a bulk."""
    with socket.create_server((address, PORT)) as server:
        line, _ = server.accept()
    with line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            line.sendall(line.recv(1))
        for _ in range(2):
            missing = BULK
            while missing > 0:
                missing -= len(line.recv(min(missing, 1 << 20)))
            line.sendall(b"!")
    return {}


def ask(address: str) -> dict[str, float]:
    """Round trip and rate to a host that answers, by plain sockets."""
    with _connect(address) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(PINGS):
            start = time.perf_counter()
            line.sendall(b"?")
            line.recv(1)
            trips.append(time.perf_counter() - start)
        seconds = 0.0
        for _ in range(2):  # the first lets the connection find the rate
            start = time.perf_counter()
            line.sendall(bytes(BULK))
            line.recv(1)
            seconds = time.perf_counter() - start
    return {
        "round_trip_ms": round(1e3 * statistics.median(trips), 3),
        "mbit": round(8e-6 * BULK / seconds, 1),
    }


def _connect(address: str) -> socket.socket:
    until = time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=SECONDS)
        except ConnectionRefusedError:  # the other host has not come so far
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def around(mine: str, following: str, *_: str) -> dict[str, float]:
    """The rate at which this host sends to the next while all of them do."""
    with socket.create_server((mine, PORT)) as server:
        line = _connect(following)
        before, _ = server.accept()
    with line, before:
        rates = []
        for _ in range(4):
            line.sendall(b"?")  # all begin when the one before has come so far
            before.recv(1)
            sending = threading.Thread(target=line.sendall, args=(bytes(BULK),))
            start = time.perf_counter()
            sending.start()
            missing = BULK
            while missing > 0:
                missing -= len(before.recv(min(missing, 1 << 20)))
            rates.append(8e-6 * BULK / (time.perf_counter() - start))
            sending.join()
    # the first lets the connection find the rate
    return {"mbit_together": round(statistics.median(rates[1:]), 1)}


if __name__ == "__main__":
    die_with_parent()
    signal.alarm(int(2 * SECONDS))
    what, *addresses = sys.argv[1:]
    print(
        json.dumps({"answer": answer, "ask": ask, "around": around}[what](*addresses)), flush=True
    )
