"""Schedules of compiled programs: what lies between the start of a transfer and its end."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn import attention
from energy_attn.distributed import SequenceParallel

KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "__cublas")


def shared_keys(ids, devices):
    """For each distance around contiguous shards, how many keys lie between those that packed documents share."""
    shards = ids.reshape(len(ids), devices, -1)
    for distance in range(1, devices):
        needed = np.zeros(shards.shape[2], bool)
        for i in range(distance, devices):
            there, own = shards[:, i - distance], shards[:, i]
            needed |= np.stack([np.isin(*x) for x in zip(there, own, strict=True)]).any(0)
        (places,) = np.nonzero(needed)
        yield int(places[-1] - places[0] + 1) if len(places) else 0


def trained(
    mesh, method="ring", window=None, layout="zigzag", mask=None, gradients=True, **options
):
    """Causal attention over a mesh of eight devices, with gradients: 16384 tokens, 32 heads of 128 over 8 of keys."""
    parallel = SequenceParallel(mesh.axis_names, method, layout=layout, **options)
    sharding = NamedSharding(mesh, P(None, mesh.axis_names))
    query, key = (
        jax.ShapeDtypeStruct((1, 16384, heads, 128), jnp.bfloat16, sharding=sharding)
        for heads in (32, 8)
    )

    def out(*arrays):
        window_size = {} if window is None else {"local_window_size": window}
        return attention(*arrays, mask=mask, is_causal=True, **window_size, parallel=parallel)

    def both(query, key, value, cotangent):
        found, backward = jax.vjp(out, query, key, value)
        return found, backward(cotangent)

    run, given = (both, [query]) if gradients else (out, [])
    with jax.set_mesh(mesh):
        return jax.jit(run).lower(query, key, key, *given).compile()


def waits(text: str, kind: str = "collective-permute") -> list[str]:
    """The collectives of a kind of a scheduled program beside which no attention is computed.

    Attention is a kernel, a matrix product, or whatever has one inside.
    """
    computations = _computations(text)
    found = []
    for lines in computations.values():
        busy = [i for i, line in enumerate(lines) if _has_products(line, computations)]
        for start, line in enumerate(lines):
            begun = re.search(rf"(%\S+) = .* {kind}(-start)?\(", line)
            if not begun:
                continue
            if not begun[2]:  # one that nothing can be beside
                found.append(begun[1])
                continue
            ends = rf"{kind}-done\([^%]*{re.escape(begun[1])}\)"
            end = next(i for i, later in enumerate(lines) if re.search(ends, later))
            if not any(start < i < end for i in busy):
                found.append(begun[1])
    return found


def _computations(text: str) -> dict[str, list[str]]:
    """The instructions of each computation, in their order; the program itself is `"ENTRY"`."""
    found = {}
    for part in text.split("\n\n"):
        head, *lines = part.strip().split("\n")
        name = re.match(r"(ENTRY|%\S+) .*\{$", head)
        if name:
            found[name[1]] = lines
    return found


def _has_products(line: str, computations: dict[str, list[str]]) -> bool:
    if re.search(r" (dot|convolution)\(", line) or any(name in line for name in KERNELS):
        return True
    called = re.findall(
        r"(?:calls|body|to_apply|true_computation|false_computation)=(%[\w.\-]+)", line
    )
    for branches in re.findall(r"branch_computations=\{([^}]*)\}", line):
        called += re.findall(r"%[\w.\-]+", branches)
    return any(_has_products(x, computations) for name in called for x in computations[name])
