"""The GPU that a program is lowered for."""

from typing import NamedTuple

from ...call._target import target_device

# Shared memory that one program may take of a multiprocessor, in KiB, by compute capability; other
# GPUs get the smallest.
_MEMORY = {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227}
_LEAST_MEMORY = 99


class Chip(NamedTuple):
    """A GPU; the defaults are those of an H100, for programs whose devices are not known.

    Attributes:
        memory: the bytes of shared memory that one program may take of a multiprocessor.
        multiprocessors: their number.
        kind: as in `jax.Device.device_kind`; None: not known.
    """

    memory: int = 227 * 1024
    multiprocessors: int = 132
    kind: str | None = None


def target_chip() -> Chip:
    """The GPU of the program being lowered, which need not be attached.

    While a call is traced this is the default; the call is checked again, and its tiles are chosen, when
    its program is lowered.
    """
    device = target_device()
    capability = getattr(device, "compute_capability", None)
    if device is None or capability is None:  # interpreted on another platform
        return Chip()
    memory = _MEMORY.get(capability, _LEAST_MEMORY) * 1024
    cores = getattr(device, "core_count", None) or Chip().multiprocessors
    return Chip(memory, cores, device.device_kind)
