"""`python -m energy_attn info`: what is here, and which implementation would be used for what."""

import argparse
import importlib.metadata
import os
import platform
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .distributed import make_mesh
from .kernels import implementations
from .kernels._arguments import Operands, Settings
from .kernels._choice import platform_here
from .kernels._mask import Rule
from .kernels._registry import explain

_PACKAGES = ("energy_attn", "jax", "jaxlib", "equinox", "optax", "jaxtyping")
_OPTIONAL = ("flash-attn-jax", "libtpu", "matplotlib")


class Call(NamedTuple):
    """A typical call of attention: sizes, dtype, and whether it is causal."""

    what: str
    rows: int
    keys: int
    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    dtype: str = "bfloat16"
    causal: bool = False


CALLS = (
    Call("decode, one token", rows=1, keys=65536),
    Call("decode, a draft of 16 tokens", rows=16, keys=65536),
    Call("prefill", rows=8192, keys=8192, causal=True),
    Call("prefill, a chunk in float32", rows=1024, keys=65536, dtype="float32", causal=True),
    Call("training", rows=1024, keys=1024, batch=8, heads=16, kv_heads=16, width=64, causal=True),
    Call("float64", rows=256, keys=256, heads=8, width=64, dtype="float64"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: the command has no options."""


def run(args: argparse.Namespace) -> int:
    """Prints all that there is to say; returns 0."""
    mesh = make_mesh()
    mesh_shape = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    print(f"{'Python':<17}{platform.python_version()} on {platform.platform()}")
    for name in (*_PACKAGES, *_OPTIONAL):
        print(f"{name:<17}{_version(name)}")
    print(f"{'devices':<17}{_devices()}")
    print(f"{'mesh':<17}{mesh_shape} (energy_attn.distributed.make_mesh())")
    print(f"{'implementations':<17}{', '.join(implementations())}, tried in this order")
    print("\nWhich is used where none is named:")
    for call in CALLS:
        print(f"\n  {call.what}: {_shapes(call)}")
        print("\n".join(f"    {line}" for line in choice(call)))
    return 0


def choice(call: Call) -> list[str]:
    """Which implementation would be used for a call, and why not those before it.

    Only shapes are looked at; nothing is computed. Raises nothing.
    """
    with jax.enable_x64(call.dtype == "float64"):
        chosen = explain(implementations(), *_operands(call), platform_here())
    declined = [f"  as {name} declines: {reason}" for name, reason in chosen.declined]
    return [f"{chosen.name}", *(declined or ["  as the first that is tried"])]


def _operands(call: Call) -> tuple[Settings, Operands]:
    def array(shape: tuple[int, ...], dtype: str = call.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    keys = array((call.batch, call.keys, call.kv_heads, call.width))
    query = array((call.batch, call.rows, call.heads, call.width))
    settings = Settings(call.width**-0.5, Rule(is_causal=call.causal))
    return settings, Operands(query, keys, keys, None, None, None, None)  # pyright: ignore[reportArgumentType]  # shapes will do


def _shapes(call: Call) -> str:
    query = f"query [{call.batch}, {call.rows}, {call.heads}, {call.width}]"
    keys = f"keys [{call.batch}, {call.keys}, {call.kv_heads}, {call.width}]"
    return f"{call.dtype}, {query}, {keys}" + (", causal" if call.causal else "")


def _devices() -> str:
    devices, processes = jax.devices(), jax.process_count()
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    where = "one process" if processes == 1 else f"{processes} processes"
    return f"{len(devices)} × {devices[0].platform} ({kinds}), {where}, {os.cpu_count()} CPU cores"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed (optional)"
