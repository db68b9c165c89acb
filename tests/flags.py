"""What XLA is told for tests: so many simulated devices, and programs that compile in a quarter of the time."""

import os

DEVICES = 8
# How far LLVM optimises. HLO, and with it what programs hold and send, is the same. Whoever asks for another level
# in XLA_FLAGS gets it: `make test-full OPTIMISE=3` compiles as users do.
LEVEL = "--xla_backend_optimization_level"


def flags(devices: int | None = DEVICES, given: str = "") -> str:
    """XLA_FLAGS for `devices` CPU devices (None: as many as XLA makes), before those that are given."""
    count = "" if devices is None else f"--xla_force_host_platform_device_count={devices}"
    return " ".join(filter(None, (count, "" if LEVEL in given else f"{LEVEL}=0", given)))


def environment(devices: int | None = None) -> dict[str, str]:
    """The environment of a process that is to have its own devices, but compiles as this suite does."""
    level = [flag for flag in os.environ["XLA_FLAGS"].split() if flag.startswith(LEVEL)]
    return os.environ | {"XLA_FLAGS": flags(devices, " ".join(level))}
