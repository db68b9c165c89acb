"""Starts a program as several processes on this machine, which find each other as the hosts of a cluster do.

    python examples/cluster/launch.py -n 2 --devices 4 -- examples/cluster/decode.py

After `--` comes what would come after `python`. Each process has CPU devices of its own, simulated;
with `JAX_PLATFORMS=cuda` they divide the machine's GPUs. Output appears with the process's number
before each line. JAX lets the others wait where a process dies; here the first failure ends them all.
"""

import argparse
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time

_PAUSE = 0.05  # seconds between looks at the processes
_SETTLE = 0.2  # seconds in which those that end together with a failure are seen to end


def main() -> int:
    """Runs the program; returns the exit status of the process that failed first, 124 after the timeout, or 0."""
    parser = argparse.ArgumentParser(
        usage="launch.py -n N [--devices D] [--timeout S] -- script.py … | -m module …"
    )
    parser.add_argument("-n", type=int, required=True, help="processes")
    parser.add_argument("--devices", type=int, default=1, help="of each process")
    parser.add_argument("--timeout", type=float, default=math.inf, help="seconds")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- program")
    args = parser.parse_args()
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if args.n < 1 or args.devices < 1 or not program:
        parser.error("wanted one or more processes, one or more devices, and a program")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with socket.create_server(("127.0.0.1", 0)) as server:  # a port that nobody listens on
        address = f"127.0.0.1:{server.getsockname()[1]}"
    end, workers = time.monotonic() + args.timeout, []
    try:
        for index in range(args.n):
            variables = environment(args.n, index, args.devices, address)
            workers.append(Worker(index, [sys.executable, "-u", *program], variables))
        while any(worker.process.poll() is None for worker in workers):
            time.sleep(_PAUSE)
            if any(worker.process.poll() for worker in workers):
                break
            if time.monotonic() > end:
                print(f"launch: took longer than {args.timeout:g} s", file=sys.stderr)
                return 124
        return _status(workers)
    finally:
        for worker in workers:
            worker.end()


def environment(processes: int, index: int, devices: int, address: str) -> dict[str, str]:
    """The variables that `energy_attn.distributed.initialize()` and `jax.distributed.initialize()` read.

    A cluster's scheduler sets its own, which both recognise, so that the program stays as it is: with
    Slurm `srun --label --kill-on-bad-exit=1` takes the place of this file (`slurm.sbatch`), on
    Kubernetes a JobSet (`jobset.yaml`). On hosts without either, start the program once on each with
    `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`, and as `JAX_COORDINATOR_ADDRESS` a port of process 0's host
    that all of them reach; leave out the others.
    """
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={devices}"]
    if "--xla_cpu_collective_timeout_seconds" not in flags[0]:
        # After it a lost peer is an exception in the others; XLA waits for half an hour.
        flags.append("--xla_cpu_collective_timeout_seconds=300")
    return {
        **os.environ,
        "XLA_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS") or "cpu",
        "JAX_COORDINATOR_ADDRESS": address,
        # This machine alone: JAX's coordinator trusts whoever connects.
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_PROCESS_ID": str(index),
        # Divides GPUs among the processes; without effect on CPUs.
        "JAX_LOCAL_DEVICE_IDS": ",".join(str(index * devices + i) for i in range(devices)),
        # jax.distributed.initialize() takes numbers from a cluster only, and asks first whether this is
        # Open MPI's mpirun. With version 5 of that, it would import mpi4py.
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{address}",
        "OMPI_COMM_WORLD_SIZE": str(processes),
        "OMPI_COMM_WORLD_RANK": str(index),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(index),
        "OMPI_VERSION": "4",
    }


class Worker:
    """One process, whose lines are passed on with its number in front."""

    def __init__(self, index: int, command: list[str], variables: dict[str, str]) -> None:
        self.index, self.closed = index, math.inf  # the time when its output ended
        self.process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it is killed with all that it has started
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def end(self) -> None:
        """Kills it by SIGKILL, as JAX handles SIGTERM, and waits for the last of its output."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join(1)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines, contextlib.suppress(BrokenPipeError):  # `| head`
            for line in lines:
                sys.stdout.buffer.write(b"[%d] %s\n" % (self.index, line.rstrip(b"\n")))
                sys.stdout.buffer.flush()
        self.closed = time.monotonic()


def _status(workers: list[Worker]) -> int:
    """The exit status of the first process that failed; prints which.

    The peers of a process that dies fail within milliseconds, and may be gone before it. But the
    system closes its output before its connections: the output that ended first is the cause's. On a busy machine
    that may be seen late; none fails by SIGKILL because another did.
    """
    time.sleep(_SETTLE)
    failed = [worker for worker in workers if worker.process.poll()]
    if not failed:
        return 0
    killed = [x for x in failed if x.process.returncode == -signal.SIGKILL]
    first = min(killed or failed, key=lambda worker: worker.closed)
    status = first.process.returncode
    said = f"ended with status {status}"
    if status < 0:
        said, status = f"was killed by {signal.Signals(-status).name}", 128 - status
    print(f"launch: process {first.index} of {len(workers)} {said}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
