"""The devices that a command runs on: those there are, or simulated ones."""

import os
from typing import Any

import jax


def simulate_devices(count: int = 8) -> None:
    """Asks for so many CPU devices, unless the user has asked for something else.

    The flag is read when JAX starts its CPU backend, so it comes before that. On a machine with
    accelerators those stay the default devices. Raises nothing.
    """
    flag = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={count}".strip()


def enough_devices(count: int) -> list[Any]:
    """So many devices: the default ones if there are as many, else simulated ones.

    Raises `ValueError` if there are too few of both.
    """
    for devices in (jax.devices(), jax.devices("cpu")):
        if len(devices) >= count:
            return devices[:count]
    raise ValueError(f"wanted {count} devices, real or simulated, got {len(jax.devices())}")
