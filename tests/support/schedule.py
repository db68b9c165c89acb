"""Schedules of compiled programs: what lies between the start of a transfer and its end."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn import attention
from energy_attn.distributed import SequenceParallel
from energy_attn.distributed.internal import waits as waits


def trained(mesh, method="ring", window=None, layout="zigzag", **options):
    """Causal attention over a mesh of eight devices, with gradients: 16384 tokens, 32 heads of 128 over 8 of keys."""
    parallel = SequenceParallel(mesh.axis_names, method, layout=layout, **options)
    sharding = NamedSharding(mesh, P(None, mesh.axis_names))
    query, key = (
        jax.ShapeDtypeStruct((1, 16384, heads, 128), jnp.bfloat16, sharding=sharding)
        for heads in (32, 8)
    )

    def both(query, key, value, cotangent):
        def out(*arrays):
            return attention(*arrays, is_causal=True, local_window_size=window, parallel=parallel)

        found, backward = jax.vjp(out, query, key, value)
        return found, backward(cotangent)

    with jax.set_mesh(mesh):
        return jax.jit(both).lower(query, key, key, query).compile()
