"""The kernels whose scores are all in memory: `decode` and `reference`."""

import jax
import jax.numpy as jnp
import numpy as np

from energy_attn.distributed import collectives
from energy_attn.kernels import local_attention
from tests.support.meshes import mesh_of


def test_a_tangent_gathers_no_keys():
    """A loop over blocks of keys in a tangent that XLA partitions: keys and values are gathered."""
    mesh = mesh_of("8")
    query = jax.ShapeDtypeStruct((1, 1, 4, 64), jnp.float32)
    key = jax.ShapeDtypeStruct(
        (1, 4096, 4, 64),
        jnp.float32,
        sharding=jax.NamedSharding(mesh, jax.P(None, mesh.axis_names)),
    )

    def state(*arrays):
        return tuple(local_attention(*arrays, implementation="decode"))

    arrays = query, key, key
    run = jax.jit(lambda arrays, along: jax.jvp(state, arrays, along))
    assert {x.kind for x in collectives(run.lower(arrays, arrays).compile())} == {"all-reduce"}


def test_float16_cotangents_do_not_underflow():
    """Weights that are rounded before they are divided by a total of thousands, in the kernel that judges others."""
    rng = np.random.default_rng(0)
    shapes = (1, 4, 2, 16), (1, 4096, 2, 16), (1, 4096, 2, 16), (1, 4, 2, 16)
    query, key, value, weights = (rng.standard_normal(x).astype(np.float16) for x in shapes)

    def gradient(dtype):
        def loss(query):
            arrays = (jnp.asarray(x, dtype) for x in (query, key, value))
            out = local_attention(*arrays, scale=0.1, implementation="reference").out
            return (out.astype(jnp.float32) * weights.astype(np.float32) * 1e-3).sum()

        return np.asarray(jax.grad(loss)(jnp.asarray(query, dtype)), np.float64)

    wanted = gradient(jnp.float32)
    error = np.linalg.norm(gradient(jnp.float16) - wanted) / np.linalg.norm(wanted)
    assert error < 0.004
