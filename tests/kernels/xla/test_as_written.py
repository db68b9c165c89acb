"""A wish for a layout, which is the identity to JAX."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from energy_attn import attention
from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.fold._tree import as_written
from tests.support.meshes import in_parts, mesh_of


def test_is_the_identity():
    """A missing or wrong rule: of either mode, of both, under `jax.vmap`."""
    x, change = np.random.default_rng(0).standard_normal((2, 3, 4))

    def f(x):
        return as_written(x) ** 3

    def second(x):
        return jax.jvp(jax.grad(lambda x: f(x).sum()), (x,), (jnp.asarray(change[0]),))[1]

    found = jax.jit(jax.vmap(second))(x)
    np.testing.assert_allclose(found, 6 * x * change[0], rtol=1e-14)
    np.testing.assert_array_equal(jax.jvp(f, (x,), (change,))[1], 3 * x**2 * change)


def test_is_not_serialised(monkeypatch):
    """A program of a ring for TPUs that JAX refuses to export, as its queries or heads are computed in parts."""
    in_parts(monkeypatch)
    query, key = (jax.ShapeDtypeStruct((1, 64, n, 128), jnp.bfloat16) for n in (4, 2))

    def train(*arrays):
        def loss(*arrays):
            parallel = SequenceParallel("device", "ring")
            return attention(*arrays, is_causal=True, parallel=parallel).sum()

        return jax.grad(loss, (0, 1, 2))(*arrays)

    with jax.set_mesh(mesh_of("8")):
        program = jax.export.export(jax.jit(train), platforms=("tpu",))(query, key, key)
    assert "tpu_custom_call" in program.mlir_module()
