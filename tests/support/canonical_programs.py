"""Reproducible programs over meshes of devices that are not there, and what they send."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn import attention
from energy_attn.distributed import KVCache, SequenceParallel, collectives

BLOCK, HEADS, KEY_HEADS, WIDTH = 4096, 32, 8, 128
NODE = (
    HEADS * (WIDTH + 2) * 4
)  # bytes of a row's node: weighed values, a maximum and a total of each head


def step_over_a_cache(mesh: Mesh, blocks: int) -> jax.stages.Compiled:
    """One query over a cache of so many blocks a device."""
    parallel = SequenceParallel("device", "tree")

    def empty():
        sizes = 1, blocks * BLOCK * mesh.size, KEY_HEADS, WIDTH
        return KVCache.empty(*sizes, parallel=parallel, block_size=BLOCK, dtype=jnp.bfloat16)

    def placed(x):
        spec = P(None, "device") if x.ndim > 2 else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        cache = jax.tree.map(placed, jax.eval_shape(empty))
        query = jax.ShapeDtypeStruct(
            (1, 1, HEADS, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, P())
        )
        step = jax.jit(functools.partial(KVCache.attend, reproducible=True))
        return step.lower(cache, query).compile()


def gradients_over_a_mesh(mesh: Mesh) -> set[tuple[str, bool]]:
    """The collectives of a causal prompt and its gradients: their kinds, and whether they are of more than numbers."""
    parallel = SequenceParallel("device", "ring")

    def loss(*arrays):
        out = attention(*arrays, is_causal=True, parallel=parallel, reproducible=True)
        return out.astype(jnp.float32).sum()

    sharding = NamedSharding(mesh, P(None, "device"))
    with jax.set_mesh(mesh):
        shapes = [(1, 4096, heads, WIDTH) for heads in (8, 4, 4)]
        arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=sharding) for x in shapes]
        program = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arrays).compile()
    return {(x.kind, x.bytes > 4) for x in collectives(program)}


def sent_in_nodes(program: jax.stages.Compiled) -> float:
    """The bytes that a device gathers of each other, in nodes of a row."""
    return sum(x.bytes for x in collectives(program) if x.kind == "all-gather") / NODE
