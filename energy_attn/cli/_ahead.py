"""Compiles attention ahead of time for TPUs, without any TPU."""

import importlib.util
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from energy_attn.distributed import SequenceParallel, collectives, cost, make_mesh
from energy_attn.distributed.internal import network, waits

from .. import attention

# The dimensions of the torus of each kind of TPU.
_DIMENSIONS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2}
# Environment variables for libtpu without a TPU: a single host, no logs.
ALONE = {
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Compiled(NamedTuple):
    """Communication and memory of a program."""

    sent: float  # bytes that a device sends
    memory: int  # bytes of a device's arguments, results and temporaries
    exposed: dict[
        str, int
    ]  # collectives of each kind that overlap no products; in a loop, counted once


def compiled(
    chip: str, sizes: tuple[int, ...], shape: cost.Shape, method: str, gradients: bool
) -> Compiled:
    """Compiles the attention of one layer over a torus of these sizes."""
    if chip not in _DIMENSIONS:
        raise ValueError(
            f"--compile: wanted a TPU as --chip, {', '.join(_DIMENSIONS)}, got {chip!r}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "--compile: wanted libtpu, which compiles for TPUs without one, got none; "
            "install the extra energy_attn[tpu]"
        )
    names = tuple(f"axis{i}" for i in range(len(sizes)))
    mesh = make_mesh(sizes, names, devices=_devices(chip, sizes))
    sharding = NamedSharding(mesh, PartitionSpec(None, names))
    query, key, value = (
        jax.ShapeDtypeStruct((shape.batch, *x), jnp.dtype(shape.dtype), sharding=sharding)
        for x in (
            (shape.queries, shape.heads, shape.width),
            (shape.keys, shape.kv_heads, shape.width),
            (shape.keys, shape.kv_heads, shape.out_width),
        )
    )
    out = jax.ShapeDtypeStruct((*query.shape[:3], shape.out_width), query.dtype, sharding=sharding)
    checked: Any = {"method": method, "layout": shape.layout}
    parallel = SequenceParallel(names, **checked)
    window = None if shape.window is None else shape.window[0]

    def forward(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(
            query, key, value, is_causal=True, local_window_size=window, parallel=parallel
        )

    def both(cotangent: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        out, backward = jax.vjp(forward, *arrays)
        return out, backward(cotangent)

    with jax.set_mesh(mesh):
        arrays = (out, query, key, value) if gradients else (query, key, value)
        program = jax.jit(both if gradients else forward).lower(*arrays).compile()
    all_sent = collectives(program)
    sent = sum(network.part_sent(x.kind, x.group_size) * x.bytes * (x.count or 1) for x in all_sent)
    memory: Any = program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    text, kinds = program.as_text() or "", dict.fromkeys(x.kind for x in all_sent)
    return Compiled(sent, held, {kind: len(waits(text, kind)) for kind in kinds})


def _devices(chip: str, sizes: tuple[int, ...]) -> list[Any]:
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    # without a TPU, libtpu writes programs to JAX's cache that it cannot read again
    jax.config.update("jax_enable_compilation_cache", False)
    form = sizes + (1,) * (_DIMENSIONS[chip] - len(sizes))
    if len(sizes) > _DIMENSIONS[chip] or len(sizes) == 1:
        form = _form(math.prod(sizes), _DIMENSIONS[chip])
    name = f"{chip}:{'x'.join(map(str, form))}"
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except (RuntimeError, ValueError, NotImplementedError) as error:
        wanted = f"the sizes of a slice of {chip}, as libtpu knows them"
        raise ValueError(f"--axes: wanted {wanted}, got {name}: {error}") from error
    return [x for x in devices if getattr(x, "core_on_chip", 0) == 0]


def _form(count: int, dimensions: int) -> tuple[int, ...]:
    if dimensions == 1:
        return (count,)
    root = round(count ** (1 / dimensions))
    first = next(x for x in range(max(root, 1), 0, -1) if count % x == 0)
    return (first, *_form(count // first, dimensions - 1))
