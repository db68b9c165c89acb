"""The indices of blocks, in the program of a plain call's gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from energy_attn.kernels import local_attention
from energy_attn.kernels.xla._index import add_at, entry, numbers


def test_entries():
    x = jnp.arange(24.0).reshape(2, 3, 4)
    at = numbers(2)[1], numbers(3)[2]
    np.testing.assert_array_equal(entry(x, *at), x[1, 2])
    np.testing.assert_array_equal(add_at(x, x[0, 0], *at), x.at[1, 2].add(x[0, 0]))


def test_no_index_is_checked_for_being_negative():
    """Three operations and five constants for each axis of each slice, of which only JAX's own loops need some."""
    x = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.float32)

    def total(*arrays):
        return local_attention(*arrays, implementation="blockwise").out.sum()

    text = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(x, x, x).as_text()
    assert text.count("SIGNED") <= 8
