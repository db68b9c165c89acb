"""A small version of the paper's setting: decode steps over hosts on an emulated network.

    python papers/tree_attention/latency.py --hosts 2,4,8 --keys 8192,32768 --out results

Each host is a process in its own network namespace; JAX's distributed runtime connects them over links of a set rate
and latency. A decode step in float32 with keys sharded over the hosts is timed by each merge strategy of the tree, by
the three all-reduces of the paper's listing, and by rings in which queries or keys travel. The results include what
the compiled programs send and what the cost model predicts; every answer is compared with float64.

Without root, or with `--loopback`, the hosts communicate over loopback, and the results say so.
"""

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _network import Network
from _report import draw_latency, integers, latency_table, machine, rows, write
from _worker import HEADS, WIDTH, Plan, Problem
from compare import automatic, predict

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.support import problems, reference

WORKER = Path(__file__).with_name("_worker.py")
# The error of an answer in float32, in roundings of the terms of its sum, is at most this.
ROUNDINGS = 16


def main() -> int:
    """Measures, prints tables, and writes JSON and a plot."""
    args = arguments()
    missing = "--loopback" if args.loopback else Network.missing()
    if missing:
        print(f"loopback, no emulated network: {missing}", flush=True)
    runs: list[dict[str, Any]] = []
    result = {
        "machine": machine(),
        "heads": HEADS,
        "width": WIDTH,
        "dtype": "float32",
        "steps_per_turn": args.steps,
        "runs": runs,
    }
    for hosts in args.hosts:
        link = {"mbit": args.mbit, "latency_ms": args.latency_ms}
        for run in measure(None if missing else Network(hosts, **link), hosts, args):
            run["network"] |= {} if missing else link
            runs.append(run)
            predict(result)
            print(latency_table(run), flush=True)
    write(args.out / f"{args.name}.json", result, draw_latency)
    wrong = [row["error"] > run["tolerance"] for run in runs for row in run["rows"]]
    if any(wrong):
        print(f"latency: {sum(wrong)} answers differ from float64", file=sys.stderr)
    return int(any(wrong))


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description="Decode steps over hosts on an emulated network.")
    add = parser.add_argument
    add("--hosts", type=integers, default=[2, 4, 8], help="numbers of hosts")
    add("--devices", type=int, default=1, help="devices of each host")
    add("--keys", type=integers, default=[2048, 8192, 32768], help="numbers of keys")
    add("--mbit", type=float, default=1000.0, help="rate of each host's link, Mbit/s")
    add("--latency-ms", type=float, default=0.2, help="from host to host, one way")
    add("--turns", type=int, default=30, help="timed turns of each method")
    add("--steps", type=int, default=4, help="decode steps of a turn")
    add("--method-seconds", type=float, default=40.0, help="slower methods get fewer turns")
    add("--seconds", type=int, default=900, help="time limit for each number of hosts")
    add("--loopback", action="store_true", help="no emulated network, even with root")
    add("--out", type=Path, default=Path("latency"), help="folder for the results")
    add("--name", default="latency", help="name of the files")
    args = parser.parse_args()
    for name in ("devices", "turns", "steps", "seconds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: wanted 1 or more, got {getattr(args, name)}")
    if args.mbit <= 0 or args.latency_ms < 0:
        parser.error(f"--mbit, --latency-ms: wanted a network, got {args.mbit}, {args.latency_ms}")
    for keys in args.keys:
        for hosts in args.hosts:
            if keys < 1 or hosts not in range(2, 201) or keys % (hosts * args.devices):
                parser.error(f"--hosts: wanted 2 to 200 that divide {keys} keys, got {hosts}")
    return args


def measure(network: Network | None, hosts: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures all lengths over a number of hosts, in one group of processes."""
    steps = [Problem(keys, hosts * args.devices) for keys in args.keys]
    answers = [answer(step) for step in steps]
    with tempfile.TemporaryDirectory() as name:
        by_keys = {str(x.keys): out for x, (out, _) in zip(steps, answers, strict=True)}
        np.savez(Path(name, "answers.npz"), allow_pickle=False, **by_keys)
        with network or contextlib.nullcontext():
            measured = network.measure() if network else None
            measurements = run_hosts(network, hosts, args, name)
    kind = "emulated network" if network else "loopback"
    eps = float(np.finfo(np.float32).eps)
    return [
        {
            "network": {"kind": kind, "measured": measured},
            "hosts": hosts,
            "devices": args.devices,
            "keys": step.keys,
            "auto": automatic(step.keys, hosts, args.devices),
            "tolerance": ROUNDINGS * eps * size,
            "rows": rows([host[i] for host in measurements]),
        }
        for i, (step, (_, size)) in enumerate(zip(steps, answers, strict=True))
    ]


def answer(step: Problem) -> tuple[np.ndarray, float]:
    """The output `[N, H]` in float64 by the judge of the tests, and the size of the terms of its sums."""
    shards = [step.shard(device) for device in range(step.devices)]
    arrays = step.query(), *(np.concatenate(x, axis=1) for x in zip(*shards, strict=True))
    whole = problems.Problem("latency", *(x.astype(np.float64) for x in arrays))
    out, lse = reference.dense(whole)
    return out[0, 0], reference.magnitudes(whole, 0 * out, 0 * lse)["out"]


def run_hosts(
    network: Network | None, hosts: int, args: argparse.Namespace, folder: str
) -> list[list[dict[str, Any]]]:
    """Runs all hosts and returns their measurements; stops all when one fails or time is up."""
    coordinator = f"{network.addresses[0] if network else '127.0.0.1'}:{free_port()}"
    sizes = hosts, args.devices, args.keys, args.turns, args.steps
    plan = Plan(0, *sizes, args.method_seconds, args.seconds, coordinator, folder)
    started: list[subprocess.Popen[bytes]] = []
    logs = [Path(folder, f"{host}.log") for host in range(hosts)]
    try:
        for host, log in enumerate(logs):
            worker_plan = json.dumps(plan._replace(host=host)._asdict())
            command = [sys.executable, str(WORKER), worker_plan]
            if network:
                command = network.command(host, command)
            with log.open("wb") as output:
                started.append(subprocess.Popen(command, stdout=output, stderr=output))
        end = time.monotonic() + args.seconds
        while any(worker.poll() is None for worker in started):
            if time.monotonic() > end or any(worker.poll() for worker in started):
                break
            time.sleep(0.1)
        codes = [worker.poll() for worker in started]
    finally:
        for worker in started:
            worker.kill()  # nothing to one that has ended
            worker.wait()
    if any(codes) or None in codes:
        logs_text = [
            f"--- host {i}, exit {codes[i]}\n{log.read_text()}" for i, log in enumerate(logs)
        ]
        raise SystemExit("\n".join([f"hosts failed, or took over {args.seconds} s:", *logs_text]))
    return [json.loads(Path(folder, f"{host}.json").read_text()) for host in range(hosts)]


def free_port() -> int:
    """Returns a free port of this machine; in a network namespace, all ports are free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
