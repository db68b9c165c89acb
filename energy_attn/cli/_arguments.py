"""Arguments of commands, and the devices that they run on, real or simulated."""

import argparse
import os
import re
from typing import Any

import jax

MOST = 2**31 - 1  # of 32 bits, as JAX counts


def integer(text: str) -> int:
    return numbers(text, None, "an integer")[0]


def numbers(text: str, separator: str | None, expected: str) -> tuple[int, ...]:
    """Integers of 32 bits between separators; raises `ArgumentTypeError`, which says `expected`."""
    parts = [text] if separator is None else text.split(separator)
    try:
        found = tuple(map(int, parts))
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted {expected}, got {shown(text)}") from None
    if not all(-MOST <= x <= MOST for x in found):
        raise argparse.ArgumentTypeError(
            f"wanted {expected}, from {-MOST} to {MOST}, got {shown(text)}"
        )
    return found


def shown(text: str) -> str:
    return repr(text if len(text) < 60 else text[:57] + "...")


def count(text: str) -> int:
    """A number above 0, in units, of 1024 for K, or of 1024² for M; raises `ArgumentTypeError`."""
    found = re.fullmatch(r"([1-9]\d*)([KM]?)", text.upper())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"wanted a number above 0, as 32768, 32K or 1M, got {shown(text)}"
        )
    number = int(found[1][:20]) * 1024 ** ("", "K", "M").index(found[2])
    if number > MOST:
        raise argparse.ArgumentTypeError(
            f"wanted a number above 0 and at most {MOST}, got {shown(text)}"
        )
    return number


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
    """`count` of the default devices, or of simulated ones where there are fewer."""
    for devices in (jax.devices(), jax.devices("cpu")):
        if len(devices) >= count:
            return devices[:count]
    raise ValueError(f"wanted {count} devices, real or simulated, got {len(jax.devices())}")
