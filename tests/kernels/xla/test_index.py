"""The indices of blocks, in the program of a plain call's gradient."""

import jax
import jax.numpy as jnp

from energy_attn.kernels import local_attention


def test_no_index_is_checked_for_being_negative():
    """Three operations and five constants for each axis of each slice, of which only JAX's own loops need some."""
    x = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.float32)

    def total(*arrays):
        return local_attention(*arrays, implementation="blockwise").out.sum()

    text = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(x, x, x).as_text()
    assert text.count("SIGNED") <= 8
