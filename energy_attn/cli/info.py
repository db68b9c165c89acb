"""`python -m energy_attn info`: versions, devices, and the implementation of each kind of call."""

import argparse
import functools
import importlib.metadata
import os
import platform as python_platform
from typing import NamedTuple

import jax
import jax.numpy as jnp

from energy_attn.distributed import make_mesh
from energy_attn.kernels import Operands, Settings, implementations
from energy_attn.kernels.internal import (
    PLATFORMS,
    AssumedGPU,
    Device,
    explain,
    platform_here,
    tried,
    window_structure,
)

from ._command import refuse, sizes

_PACKAGES = ("energy_attn", "jax", "jaxlib", "equinox", "optax", "jaxtyping")
_OPTIONAL = ("flash-attn-jax", "fa4-jax", "libtpu", "matplotlib")


class Example(NamedTuple):
    """A call of attention: its purpose, shapes, dtype, and whether it is causal."""

    what: str
    query: tuple[int, int, int, int]
    key: tuple[int, int, int, int]
    dtype: str = "bfloat16"
    causal: bool = False


EXAMPLES = (
    Example("decode, one token", (1, 1, 32, 128), (1, 65536, 8, 128)),
    Example("decode, a draft of 16 tokens", (1, 16, 32, 128), (1, 65536, 8, 128)),
    Example("prefill", (1, 8192, 32, 128), (1, 8192, 8, 128), causal=True),
    Example("a chunk in float32", (1, 1024, 32, 128), (1, 65536, 8, 128), "float32", causal=True),
    Example("training", (8, 1024, 16, 64), (8, 1024, 16, 64), causal=True),
    Example("float64", (1, 256, 8, 64), (1, 256, 8, 64), "float64"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `info`."""
    add = parser.add_argument
    add("--platform", choices=PLATFORMS, help="explain for it; default: the machine's")
    text = "explain for GPUs of this compute capability; default: the machine's, or 9.0"
    add("--capability", type=_gpu, metavar="MAJOR.MINOR", help=text)
    shape = functools.partial(
        sizes, separator=",", expected="four sizes of at least 1", counts=(4,)
    )
    add("--query", type=shape, metavar="B,T,N,H", help="explain for a query of this shape")
    add("--key", type=shape, metavar="B,S,K,H", help="and keys of this one; default: query's")
    add("--dtype", default="bfloat16", choices=("float16", "bfloat16", "float32", "float64"))
    add("--causal", action="store_true", help="hide later keys")


def run(args: argparse.Namespace) -> int:
    """Prints everything, or explains the call in the options; returns 0, or 2 for a wrong option."""
    platform = args.platform or platform_here()
    if args.capability and platform != "cuda":
        return refuse("info", f"--capability is for --platform cuda, got {platform}")
    device = args.capability or (jax.devices()[0] if platform == platform_here() else None)
    calls = EXAMPLES
    if args.query or args.key:
        query, key = args.query or args.key, args.key or args.query
        calls = (Example("this call", query, key, args.dtype, args.causal),)
        if query[0] != key[0] or query[3] != key[3] or query[2] % key[2]:
            wanted = f"B and H of --query, and a K that divides {query[2]}"
            return refuse("info", f"--key wanted {wanted}, got {key} beside {query}")
    else:
        _describe()
    print(f"\nWhich is used on {platform} where none is named:")
    for call in calls:
        shapes = f"query {list(call.query)}, key and value {list(call.key)}"
        causal = ", causal" if call.causal else ""
        print(f"\n  {call.what}: {call.dtype}, {shapes}{causal}")
        print("\n".join(f"    {line}" for line in choice(call, platform, device)))
    return 0


def _gpu(text: str) -> AssumedGPU:
    numbers = text.split(".")
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"wanted two numbers, as in 9.0, got {text!r}")
    return AssumedGPU(text)


def _describe() -> None:
    mesh = make_mesh()
    mesh_shape = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    by_name = [name for name in implementations() if name not in tried()]
    facts = {
        "Python": f"{python_platform.python_version()} on {python_platform.platform()}",
        **{name: _version(name) for name in (*_PACKAGES, *_OPTIONAL)},
        "devices": _devices(),
        "mesh": f"{mesh_shape} (energy_attn.distributed.make_mesh())",
        "implementations": f"{', '.join(tried())}, tried in this order",
        **({"only by name": ", ".join(by_name)} if by_name else {}),
    }
    print("\n".join(f"{name:<17}{fact}" for name, fact in facts.items()))


def choice(call: Example, platform: str, device: Device | None = None) -> list[str]:
    """The kernels of a call and of its second derivatives on a platform, and why other kernels decline."""
    with jax.enable_x64(call.dtype == "float64"):
        chosen = explain(tried(), *_operands(call), platform, device)
    declined = [f"  as {name} declines: {reason}" for name, reason in chosen.declined]
    second_order = f"  second derivatives: {chosen.second_order}"
    return [chosen.name, *(declined or ["  as the first that is tried"]), second_order]


def _operands(call: Example) -> tuple[Settings, Operands]:
    query, key = (
        jax.ShapeDtypeStruct(shape, jnp.dtype(call.dtype)) for shape in (call.query, call.key)
    )
    settings = Settings(call.query[-1] ** -0.5, window_structure(right=0 if call.causal else None))
    return settings, Operands(query, key, key)  # pyright: ignore[reportArgumentType]  # shapes will do


def _devices() -> str:
    devices, processes = jax.devices(), jax.process_count()
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    process_text = "one process" if processes == 1 else f"{processes} processes"
    return f"{len(devices)} × {devices[0].platform} ({kinds}), {process_text}, {os.cpu_count()} CPU cores"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed (optional)"
