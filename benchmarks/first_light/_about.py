"""The steps `about` and `roof`: the machine and its peak rates."""

import importlib.metadata
import platform
import subprocess
import time

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from energy_attn.kernels import local_attention

from ._bench import Bench, Job, normal
from ._record import Result

_PACKAGES = (
    *("energy_attn", "jax", "jaxlib", "equinox", "torch"),
    *("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    *("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-runtime", "fa4-jax"),
)
_SAYS = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
_COMMANDS = {
    "nvidia-smi": ["nvidia-smi", f"--query-gpu={_SAYS}", "--format=csv,noheader"],
    "ptxas": ["ptxas", "--version"],
}


def about(bench: Bench) -> None:
    """Versions, the device and its clocks; and which kernels take an ordinary call and compile."""
    with bench.record.guarded("about", "versions"):
        device = jax.devices()[0]
        device_info: Result = {
            "device": device.device_kind,
            "capability": getattr(device, "compute_capability", None),
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
        }
        bench.record.put("about", "versions", {**device_info, **_versions()})
    for name, command in _COMMANDS.items():
        with bench.record.guarded("about", name):
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            output = (done.stdout or done.stderr).strip().splitlines()
            bench.record.put("about", name, {"said": output[-1][:300]})
    shape = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)

    def compiles(name: str) -> Job:
        def attend(*arrays: Array) -> Array:
            return local_attention(*arrays, implementation=name, is_causal=True).out

        return Job(name, attend, (shape,) * 3, lambda _: {"compiles": True}, {"kernel": name})

    bench.measure("about", [compiles(name) for name in bench.kernels])


def _versions() -> Result:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def roof(bench: Bench) -> None:
    """The peak rates of copying and reading memory and of bfloat16 products, and the overhead of a program."""
    x = jnp.ones(2**31 // bench.shrink**2, jnp.bfloat16)

    def copy(x: Float[Array, " n"]) -> Array:
        return x + 1

    def read(x: Float[Array, " n"]) -> Array:
        return x.reshape(-1, 4096).astype(jnp.float32).sum(1)

    size, timed = x.nbytes, bench.timed
    moved = [
        timed("copy", copy, [x], lambda s: {"bytes_per_s": 2 * size / s}),
        timed("read", read, [x], lambda s: {"bytes_per_s": size / s}),
    ]
    bench.measure("roof", moved)
    del x, moved
    n = bench.length(8192)
    a, b = normal(1, (n, n)), normal(2, (n, n))
    multiply = timed("matmul", jnp.matmul, [a, b], lambda s: {"flop_per_s": 2 * n**3 / s})
    bench.measure("roof", [multiply, timed("nothing", copy, [jnp.zeros(8)])])
