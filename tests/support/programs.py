"""What a compiled program is made of, and what it computes between the start and the end of a transfer."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn import attention, masks
from energy_attn.distributed import SequenceParallel, collectives, cost
from energy_attn.distributed.internal import waits as waits


def instructions(compiled) -> Counter:
    """How often each operation makes an array of each shape, in the optimised HLO."""
    pattern = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", re.MULTILINE)
    found = pattern.findall(compiled.as_text())
    return Counter((re.sub(r"\{[^}]*\}", "", shape), opcode) for shape, opcode in found)


def sent(program) -> list[tuple]:
    """What a program sends between devices, and between which."""
    return [(c.kind, c.bytes, c.count, c.groups) for c in collectives(program)]


def by_kind(found) -> Counter:
    """Bytes by kind of collective, all runs together, of collectives or of predicted transfers."""
    total = Counter()
    for c in found:
        total[c.kind] += c.bytes * c.count
    return total


def payload(program) -> Counter:
    return by_kind(collectives(program))


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


def check_documents(mesh):
    """A program for eight devices sends the keys, and gradients of keys, that packed documents share, and no others."""
    ids = np.searchsorted([3000, 7000, 7500, 12000, 14500], np.arange(16384), side="right")[None]
    packed = masks.Segments(np.asarray(ids, np.int32))
    program = trained(mesh, mask=packed, layout="contiguous")
    token = 2 * 8 * 128 * 2  # of keys and values, in sixteen bits
    # there, and as gradients back
    sent = sum(x.bytes * x.count for x in collectives(program) if x.kind == "collective-permute")
    assert sent == 2 * token * sum(shared_keys(ids, 8)) < 2 * token * 7 * 2048


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


AXES = ("node", "device")
SHARDED = P(None, AXES)


def shape_of(keys: int) -> cost.Shape:
    """The sizes of decoding in the paper: one query of 16 heads of 128."""
    return cost.Shape(1, 1, keys, 16, 16, 128)


@functools.cache
def decoding(mesh, f, keys: int, out_specs=None, donate=(), **options):
    """Decoding in the sizes of the paper over a mesh of nodes and devices, compiled."""
    arrays = [
        jax.ShapeDtypeStruct((1, n, 16, 128), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for n, spec in ((1, P()), (keys, SHARDED), (keys, SHARDED))
    ]
    run = jax.shard_map(
        functools.partial(f, axis_name=AXES, **options),
        mesh=mesh,
        in_specs=(P(), SHARDED, SHARDED),
        out_specs=out_specs or P(),
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        return jax.jit(run, donate_argnums=donate).lower(*arrays).compile()


def shards(program, keys: int, devices: int) -> float:
    """All memory that a program holds on a device, in shards of keys and values."""
    used = program.memory_analysis()
    total = used.argument_size_in_bytes + used.temp_size_in_bytes + used.output_size_in_bytes
    return (total - used.alias_size_in_bytes) / (2 * keys // devices * 16 * 128 * 2)


def cache_and_query(mesh, empty, query, dtype=jnp.bfloat16):
    """A cache as `empty()` makes it, with its tokens on the axis "device", and a query of a shape, without values."""

    def placed(x):
        spec = P(None, "device") if mesh.size > 1 and x.ndim > 2 else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        cache = jax.tree.map(placed, jax.eval_shape(empty))
    replicated = NamedSharding(mesh, P())
    return cache, jax.ShapeDtypeStruct(query, jnp.dtype(dtype), sharding=replicated)
