"""The devices that a command runs on: real ones, or simulated ones."""

import os
from typing import Any

import jax

_MOST = 4096  # simulated devices: each takes memory and threads


def simulate_devices(count: int = 8) -> None:
    """Asks for `count` CPU devices, unless the user has asked for a number, or there are too many.

    JAX reads the flag when it starts its CPU backend. Accelerators stay the default devices.
    """
    if count > _MOST:
        return
    flag = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={count}".strip()


def enough_devices(count: int) -> list[Any]:
    """`count` of the default devices, or of simulated ones where there are fewer.

    Raises `ValueError` if there are too few of both.
    """
    for devices in (jax.devices(), jax.devices("cpu")):
        if len(devices) >= count:
            return devices[:count]
    raise ValueError(f"wanted {count} devices, real or simulated, got {len(jax.devices())}")
