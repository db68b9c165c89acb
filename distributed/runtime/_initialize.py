"""The start of a program that runs as several processes."""

import atexit
import os
import sys
from collections.abc import Sequence
from types import TracebackType

import jax

from energy_attn.kernels.internal import checks, private_names

from ._rendezvous import Participant, coordinate, join, split_address


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

    Call it once in each process, before anything that uses a device. All arguments are optional
    where the job can be recognised: under SLURM, Open MPI, on Cloud TPU,
    and on Kubernetes (with the package `kubernetes`) JAX finds them. Otherwise the environment
    variables `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` are
    read. Without any of these it is a program of one process, and the call does nothing.

    Before JAX connects, the processes meet at the coordinator's address and wait for each other, as JAX
    ends a process without an exception when another does not come. So all of them must call this
    function, and none `jax.distributed.initialize`. A process that an exception ends exits at once with
    status 1 (functions registered with `atexit` before this call do not run); JAX would let it wait for
    the others, and they for it.

    Args:
        coordinator_address: `host:port` of process 0, where it listens and the others reach it.
        num_processes: how many processes there are, over all hosts.
        process_id: the number of this process, from 0.
        local_device_ids: the accelerators that this process uses; all of its host by default, and
            one of them where SLURM or Open MPI start several processes on a host.
        cluster_detection_method: the name of one of JAX's ways to find the arguments (`"mpi4py"`,
            for instance); `"deactivate"` for none.
        coordinator_bind_address: where process 0 listens; all of its addresses by default.
        initialization_timeout: seconds that the processes wait for each other.
        heartbeat_timeout: seconds without a heartbeat after which a process counts as lost. JAX
            then ends the others, with a message but without an exception.
        shutdown_timeout: seconds that a process waits for the others when it ends.

    Returns:
        None; see `jax.process_count()` and `jax.process_index()`.

    Raises:
        TypeError: arguments of wrong types.
        ValueError: an address without a port, numbers out of range, or only some of the three
            required arguments.
        NotImplementedError: this version of JAX recognises clusters differently; pass all three, or
            `cluster_detection_method="deactivate"`.
        RuntimeError: the coordinator cannot be reached, its port is taken, or a process did not
            come within `initialization_timeout`: raised in every process that came. Or it is too
            late: it was called before, or a device has been used.

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
    count = _number("num_processes", num_processes)
    process = _number("process_id", process_id)
    given = addresses["coordinator_address"], count, process, _device_ids(local_device_ids)
    if cluster_detection_method != "deactivate" and None in given:
        given = private_names("cluster").Environment.auto_detect_unset_distributed_params(
            *given, cluster_detection_method, initialization_timeout
        )
    address, count, process, devices = given
    arguments = {"coordinator_address": address, "num_processes": count, "process_id": process}
    if all(x is None for x in arguments.values()):
        return
    if address is None or count is None or process is None:
        missing = ", ".join(name for name, x in arguments.items() if x is None)
        passed = ", ".join(f"{name} = {x!r}" for name, x in arguments.items() if x is not None)
        raise ValueError(
            f"{missing}: wanted all of {', '.join(arguments)}, or none on a cluster that JAX "
            f"recognises; got None beside {passed}"
        )
    checks.check_integer("num_processes", count, least=1)
    if not 0 <= process < count:
        raise ValueError(f"process_id: wanted 0 to {count - 1}, got {process}")
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
    """Whether JAX has started its devices; False if unknown, as JAX checks it, too."""
    try:
        return private_names("devices").started()
    except NotImplementedError:
        return False


def _leave_on_failure() -> None:
    """Lets a process that an exception ends exit at once.

    Otherwise JAX waits at exit for the other processes, which wait for this one in a collective, until all
    are aborted and the exception is lost among their messages.
    """
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
