"""`python -m energy_attn info`: versions, devices, and the implementation of each kind of call."""

import argparse
import importlib.metadata
import os
import platform as python_platform
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp

from energy_attn.distributed import make_mesh
from energy_attn.kernels import implementations
from energy_attn.kernels.internal import (
    PLATFORMS,
    AssumedGPU,
    Device,
    Operands,
    Settings,
    explain,
    platform_here,
    tried,
    window_structure,
)

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
    parser.add_argument(
        "--platform", choices=PLATFORMS, default=None, help="explain for it; default: the machine's"
    )
    parser.add_argument(
        "--capability",
        type=_gpu,
        metavar="MAJOR.MINOR",
        help="explain for GPUs of this compute capability; default: the machine's, or 9.0",
    )
    parser.add_argument(
        "--query", type=_sizes, metavar="B,T,N,H", help="explain for a query of this shape"
    )
    parser.add_argument(
        "--key", type=_sizes, metavar="B,S,K,H", help="and keys of this one; default: query's"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("float16", "bfloat16", "float32", "float64")
    )
    parser.add_argument("--causal", action="store_true", help="hide later keys")


def run(args: argparse.Namespace) -> int:
    """Prints everything, or explains the call in the options; returns 0, or 2 for a wrong option."""
    platform = args.platform or platform_here()
    if args.capability and platform != "cuda":
        print(f"info: --capability is for --platform cuda, got {platform}", file=sys.stderr)
        return 2
    device = args.capability or (jax.devices()[0] if platform == platform_here() else None)
    calls = EXAMPLES
    if args.query or args.key:
        query, key = args.query or args.key, args.key or args.query
        calls = (Example("this call", query, key, args.dtype, args.causal),)
        if query[0] != key[0] or query[3] != key[3] or query[2] % key[2]:
            print(
                f"info: --key wanted B and H of --query, and a K that divides {query[2]}, "
                f"got {key} beside {query}",
                file=sys.stderr,
            )
            return 2
    else:
        _describe()
    print(f"\nWhich is used on {platform} where none is named:")
    for call in calls:
        print(f"\n  {call.what}: {_shapes(call)}")
        print("\n".join(f"    {line}" for line in choice(call, platform, device)))
    return 0


def _gpu(text: str) -> AssumedGPU:
    numbers = text.split(".")
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"wanted two numbers, as in 9.0, got {text!r}")
    return AssumedGPU(text)


def _sizes(text: str) -> tuple[int, int, int, int]:
    sizes = text.split(",")
    if len(sizes) != 4 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"wanted four sizes of at least 1, got {text!r}")
    one, two, three, four = map(int, sizes)
    return one, two, three, four


def _describe() -> None:
    mesh = make_mesh()
    mesh_shape = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    print(f"{'Python':<17}{python_platform.python_version()} on {python_platform.platform()}")
    for name in (*_PACKAGES, *_OPTIONAL):
        print(f"{name:<17}{_version(name)}")
    print(f"{'devices':<17}{_devices()}")
    print(f"{'mesh':<17}{mesh_shape} (energy_attn.distributed.make_mesh())")
    print(f"{'implementations':<17}{', '.join(tried())}, tried in this order")
    by_name = [name for name in implementations() if name not in tried()]
    if by_name:
        print(f"{'only by name':<17}{', '.join(by_name)}")


def choice(call: Example, platform: str, device: Device | None = None) -> list[str]:
    """The implementation for a call on a platform, and the reasons why those before it decline."""
    with jax.enable_x64(call.dtype == "float64"):
        chosen = explain(tried(), *_operands(call), platform, device)
    declined = [f"  as {name} declines: {reason}" for name, reason in chosen.declined]
    return [f"{chosen.name}", *(declined or ["  as the first that is tried"])]


def _operands(call: Example) -> tuple[Settings, Operands]:
    query, key = (
        jax.ShapeDtypeStruct(shape, jnp.dtype(call.dtype)) for shape in (call.query, call.key)
    )
    settings = Settings(call.query[-1] ** -0.5, window_structure(right=0 if call.causal else None))
    return settings, Operands(query, key, key)  # pyright: ignore[reportArgumentType]  # shapes will do


def _shapes(call: Example) -> str:
    sizes = f"query {list(call.query)}, key and value {list(call.key)}"
    return f"{call.dtype}, {sizes}" + (", causal" if call.causal else "")


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
