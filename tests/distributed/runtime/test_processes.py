"""Several processes, as on several machines: collectives cross process borders and no process holds all keys.

And what becomes of the rest when one of them fails: a message that names it, soon.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.flags import environment, free_port, launch
from tests.support.process import SCENARIOS

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 240  # for a machine that is busy; alone it takes a tenth of that
# A process of a job that meets in collectives until the end, and what happens to process 1.
JOB = """
import os, signal, sys
import jax
import numpy as np
from energy_attn.distributed import fetch, initialize, make_mesh, place

what, index = sys.argv[1], int(os.environ["JAX_PROCESS_ID"])
if what == "missing" and index == 1:
    sys.exit()
initialize(initialization_timeout=3 if what == "missing" else 30)
x = place(np.arange(4.0), jax.NamedSharding(make_mesh(), jax.P(("node", "device"))))
print("sum", fetch(x).sum(), flush=True)
if index == 1 and what == "raise":
    raise ValueError("the reason of it all")
if index == 1:
    os.kill(os.getpid(), getattr(signal, what))
try:
    while True:
        fetch(x)
except Exception as error:
    print("caught", type(error).__name__, flush=True)
    raise
"""

Found = list[dict[str, dict]]


def run_scenarios(processes: int, devices: int, *names: str) -> tuple[Found, str]:
    """What each process found in each scenario (the mesh under the name `""`), and what was said besides.

    A scenario that fails ends the run, so those after it are missing.
    """
    counts = ["-n", processes, "--devices", devices, "--timeout", SECONDS]
    done = launch(*counts, "--", "-m", "tests.support.process", *names)
    found, said = [{} for _ in range(processes)], []
    for line in done.stdout.splitlines():
        index, _, text = line[1:].partition("] ")
        if text.startswith("{"):
            row = json.loads(text)
            found[int(index)][row.get("scenario", "")] = row
        else:
            said.append(line)
    return found, "\n".join([f"status {done.returncode}", done.stderr, *said])


def check(ran: tuple[Found, str], name: str) -> None:
    """Right in every process, and the same in all to the last bit where that is said."""
    found, said = ran
    for process in found:
        assert name in process, said
        errors = process[name]["errors"]
        assert errors and max(errors.values()) < 1e-11, errors
    assert len({process[name].get("bits") for process in found}) == 1


def check_mesh(ran: tuple[Found, str], processes: int, devices: int) -> None:
    """Hosts on the slow axis, and a fold over all of them."""
    for process in ran[0]:
        assert process[""]["mesh"] == {"node": processes, "device": devices}, ran[1]
        rows = [[index] * devices for index in range(processes)]
        assert process[""]["processes of its rows"] == rows


@pytest.mark.smoke
def test_two_processes():
    """Collectives that end at a process's border, results that differ, a cache of which a process saves all or none.

    And, at the end, a process that is killed, without whom the other would wait for minutes.
    """
    ran = run_scenarios(2, 2, "decode gather", "cache", "vocabulary", "lost")
    check_mesh(ran, 2, 2)
    for name in ("decode gather", "cache", "vocabulary"):
        check(ran, name)
    assert all(process["decode gather"]["largest group"] == 4 for process in ran[0])
    assert ran[1].startswith("status 137\nlaunch: process 1 of 2 was killed by SIGKILL"), ran[1]


def test_reproducible():
    """Bits that follow the order in which processes arrive, or how many there are: those of one device are others."""
    found, said = run_scenarios(2, 2, "reproducible")
    for process in found:
        bits = process["reproducible"]
        assert bits["all"] == bits["one"] == found[0]["reproducible"]["one"], said


@pytest.fixture(scope="module")
def ran() -> tuple[Found, str]:
    return run_scenarios(2, 4, *SCENARIOS)


@pytest.mark.full
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_of_four_devices(ran, name):
    """Collectives that end at a process's border, parts laid end to end in a wrong order, results that differ."""
    check_mesh(ran, 2, 4)
    check(ran, name)
    if name in ("decode allreduce", "decode gather"):
        assert all(process[name]["largest group"] == 8 for process in ran[0])
    assert ran[1].startswith("status 0\n")


@pytest.mark.full
def test_four_processes_of_two_devices():
    """The same where a process has two neighbours."""
    ran = run_scenarios(4, 2, *SCENARIOS)
    for name in SCENARIOS:
        check(ran, name)


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        ("SIGKILL", 137, "process 1 of 2 was killed by SIGKILL"),
        ("SIGSTOP", 134, "process 0 of 2 was killed by SIGABRT"),  # by JAX, without a heartbeat
        ("raise", 1, "process 1 of 2 ended with status 1"),
        ("missing", 1, "process 0 of 2 ended with status 1"),
    ],
)
def test_a_lost_process_ends_the_run_and_is_named(what, status, said):
    """Survivors that wait for minutes, or a cause that drowns in what it leads to.

    By themselves they would wait for 10 s or more; the launcher's own limit, 124, is not what ends them.
    """
    done = launch("-n", 2, "--timeout", 60, "--", "-c", JOB, what)
    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stderr
    if what == "raise":
        assert "[1] ValueError: the reason of it all" in done.stdout
    if what == "missing":
        assert "process 1 of 2 did not come to the coordinator" in done.stdout
    else:
        assert "[0] sum 12.0" in done.stdout


# A program that knows nothing of this library, in an allocation whose own launcher has left its marks.
PLAIN = """
import jax, jax.numpy as jnp, numpy as np
jax.distributed.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("x",))
x = jax.make_array_from_callback(
    (jax.device_count(),), jax.NamedSharding(mesh, jax.P("x")), lambda i: np.arange(4.0)[i]
)
print(jax.process_index(), "of", jax.process_count(), jax.local_device_count(), float(jnp.sum(x)))
jax.distributed.shutdown()
"""
MARKS = {
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-9]", "SLURM_NTASKS": "9"},
    **{"SLURM_PROCID": "5", "SLURM_LOCALID": "5", "OMPI_VERSION": "5.0.7"},
}


@pytest.mark.full
def test_plain_jax_finds_the_others(monkeypatch):
    """`jax.distributed.initialize()` under the launcher: processes that JAX does not number, or those of a cluster."""
    for name, text in MARKS.items():
        monkeypatch.setenv(name, text)
    done = launch("-n", 2, "--devices", 2, "--timeout", SECONDS, "--", "-c", PLAIN)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = set(done.stdout.splitlines())
    assert {"[0] 0 of 2 2 6.0", "[1] 1 of 2 2 6.0"} <= lines, done.stdout


@pytest.mark.full
def test_without_a_supervisor_survivors_get_an_exception():
    """A lost peer that nobody watches over. JAX alone would wait in the collective, then abort without an exception."""
    coordinator = f"localhost:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, "-u", "-c", JOB, "SIGKILL"],
            cwd=ROOT,
            env=environment()
            | {
                "JAX_COORDINATOR_ADDRESS": coordinator,
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(index),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [1, -9], said
    assert "caught" in said[0] and "Gloo" in said[0]
