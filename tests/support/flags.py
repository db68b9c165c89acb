"""XLA's flags for tests (simulated devices, cheap compilation), and other processes that have them."""

import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

DEVICES = 8
# How far LLVM optimises. HLO is the same. Whoever asks for another level in XLA_FLAGS gets it, and programs compiled
# as users' are: `make test-full OPTIMISE=3`.
LEVEL = "--xla_backend_optimization_level"
# Whether MLIR's passes write fusions; without them programs compile in half the time, and single operations are not
# wrapped in fusions: what programs hold and send is the same. From JAX 0.11 on they always do, and XLA ends with
# "Unknown flag in XLA_FLAGS".
EMITTERS = "--xla_cpu_use_fusion_emitters"
INSTRUCTIONS = "--xla_cpu_max_isa"  # the CPU that programs are for
OLD = tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11)
# Of one program, `jax.jit(compiler_options=USUAL)`: as XLA compiles users'.
USUAL = {"xla_backend_optimization_level": 3} | (
    {"xla_cpu_use_fusion_emitters": True} if OLD else {}
)
CHEAP = f"{LEVEL}=0 {EMITTERS}=false" if OLD else f"{LEVEL}=0"


def flags(devices: int | None = DEVICES, given: str = "") -> str:
    """XLA_FLAGS for `devices` CPU devices (None: as many as XLA makes), before those that are given."""
    count = "" if devices is None else f"--xla_force_host_platform_device_count={devices}"
    return " ".join(filter(None, (count, "" if LEVEL in given else CHEAP, given)))


def environment(devices: int | None = None) -> dict[str, str]:
    """The environment of a process that is to have its own devices, but compiles as this suite does."""
    kept = [
        x for x in os.environ["XLA_FLAGS"].split() if x.startswith((LEVEL, EMITTERS, INSTRUCTIONS))
    ]
    return os.environ | {"XLA_FLAGS": flags(devices, " ".join(kept))}


ROOT = Path(__file__).resolve().parents[2]


def spawn(*arguments, devices=None, **variables):
    """Runs Python in another process and returns its output; one that fails says why."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(devices) | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_module(*arguments, **variables):
    """Runs `python -m energy_attn` with these arguments, as a user without float64 would."""
    inherited = {name: x for name, x in environment().items() if name != "JAX_ENABLE_X64"}
    return subprocess.run(
        [sys.executable, "-m", "energy_attn", *arguments],
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=500,
    )


def launch(*arguments: object, timeout: float = 270) -> subprocess.CompletedProcess:
    """Runs `python examples/cluster/launch.py …`."""
    return subprocess.run(
        [sys.executable, "examples/cluster/launch.py", *map(str, arguments)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
