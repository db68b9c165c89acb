"""The GPU that a program is lowered for."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import jax

from ...call._kernel import target_device

# Shared memory that one program may take of a multiprocessor, in KiB, by compute capability; other
# GPUs get the smallest.
_MEMORY = {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227}
_LEAST_MEMORY = 99


class GPUChip(NamedTuple):
    """A GPU; the defaults are those of an H100, for programs whose devices are not known.

    Attributes:
        memory: the bytes of shared memory that one program may take of a multiprocessor.
        multiprocessors: their number.
        kind: as in `jax.Device.device_kind`; None: not known.
    """

    memory: int = 227 * 1024
    multiprocessors: int = 132
    kind: str | None = None


def target_chip() -> GPUChip:
    """The GPU of the program being lowered, which need not be attached.

    While a call is traced this is the default; the call is checked again, and its tiles are chosen, when
    its program is lowered.
    """
    device = target_device()
    capability = getattr(device, "compute_capability", None)
    if device is None or capability is None:  # interpreted on another platform
        return GPUChip()
    memory = _MEMORY.get(capability, _LEAST_MEMORY) * 1024
    cores = getattr(device, "core_count", None) or GPUChip().multiprocessors
    return GPUChip(memory, cores, device.device_kind)


@contextlib.contextmanager
def named_gpu(platform: str | None) -> Iterator[None]:
    """Names a GPU to JAX if it has none, for lowering on another machine (`tests/cuda`).

    Versions before 0.11 assume compute capability 9.0 instead. The kernels do not depend on it, and XLA
    compiles them for the GPU of the program.
    """
    mesh = jax.sharding.get_abstract_mesh()
    default_device = jax.config.jax_default_device or jax.local_devices()[0]  # pyright: ignore[reportAttributeAccessIssue]
    devices = (default_device, mesh.abstract_device)
    has_gpu = platform != "cuda" or "gpu" in (getattr(x, "platform", x) for x in devices)
    if has_gpu or jax.__version_info__ < (0, 11):
        yield
        return
    gpu = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=gpu)):
        yield
