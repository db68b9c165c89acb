"""The device that a program is lowered for, which decides what kernels take, and how large blocks may be."""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import jax

from .._private import private_names

Capability = tuple[int, int]  # as NVIDIA counts them: (9, 0) for H100 and H200


class AssumedGPU(NamedTuple):
    """A GPU of which nothing is known but its compute capability."""

    compute_capability: str
    device_kind: str | None = None


Device = jax.Device | AssumedGPU

_DEVICE: ContextVar[Device | None] = ContextVar("device", default=None)


def target_device() -> Device | None:
    """One of the devices that the program being lowered is for, all of a kind; None: not known.

    It need not be there: a program may be compiled ahead of time. Not known are those of an exported
    program, which other devices may run, and of a program for several platforms; and those of any program
    while it is traced. So a call is checked twice.
    """
    return _DEVICE.get()


@contextlib.contextmanager
def lowered_for(device: Device | None) -> Iterator[None]:
    """Where kernels are traced for a program for such devices."""
    token = _DEVICE.set(device)
    try:
        yield
    finally:
        _DEVICE.reset(token)


def capability_of(device: object) -> Capability | None:
    """The compute capability of a device; None where it has none."""
    said = getattr(device, "compute_capability", None)
    if not isinstance(said, str):
        return None
    major, _, minor = said.partition(".")
    return int(major), int(minor or 0)


def target_capability() -> Capability | None:
    """The compute capability of the GPU that the program being lowered is for; None: not known."""
    return capability_of(target_device())


def check_capability(name: str, least: Capability, below: Capability | None = None) -> None:
    """Raises `NotImplementedError` on a GPU, if it is known, that a kernel is not for."""
    found = target_capability()
    if found is None or (found >= least and (below is None or found < below)):
        return
    end = "on" if below is None else f"to below {_text(below)}"
    raise NotImplementedError(
        f"{name}: wanted a GPU of compute capability from {_text(least)} {end}, got {_text(found)}"
    )


@functools.cache
def cuda_version(library: str) -> int | None:
    """The version of "cudnn" or "cuda_runtime" here, as 12080 for CUDA 12.8; None if there is none."""
    try:
        return getattr(private_names("cuda_versions").versions, f"{library}_get_version")()
    except Exception:  # of various kinds, without CUDA or cuDNN
        return None


def _text(found: Capability) -> str:
    return ".".join(map(str, found))
