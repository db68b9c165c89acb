"""The TPU that a program is lowered for: the memory of a core, and the size of its matrix units."""

from typing import NamedTuple

from ...call._kernel import target_device


class TPUChip(NamedTuple):
    """A TPU core; by default the smallest, for programs whose devices are not known.

    Attributes:
        memory: bytes of VMEM, its vector memory.
        columns: those of a matrix unit.
    """

    memory: int = 16 * 2**20
    columns: int = 128


_V5E, _V5P = TPUChip(128 * 2**20), TPUChip(64 * 2**20)
_V6E, _7X = TPUChip(128 * 2**20, 256), TPUChip(64 * 2**20, 256)
# by `jax.Device.device_kind`; older ones have no more than the smallest
_CHIPS = {
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": _7X,
}


def chip_of(kind: str | None) -> TPUChip:
    return TPUChip() if kind is None else _CHIPS.get(kind, TPUChip())


def target_chip() -> TPUChip:
    """The TPU of the program being lowered, which need not be attached; the smallest while tracing."""
    device = target_device()
    return chip_of(None if device is None else device.device_kind)
