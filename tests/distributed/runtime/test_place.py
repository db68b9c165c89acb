"""Data into and out of arrays over the mesh, in one process; over several see test_processes.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from energy_attn.distributed import fetch, make_mesh, place

AXES = ("node", "device")


@pytest.mark.smoke
def test_place_and_fetch():
    x = np.arange(32.0).reshape(2, 16)
    sharding = NamedSharding(make_mesh((2, 4)), jax.P(None, AXES))
    placed = place({"x": x, "y": jnp.ones((1, 8), jnp.bfloat16)}, sharding)
    assert placed["x"].sharding == sharding
    assert placed["x"].addressable_shards[3].data.shape == (2, 2)
    assert placed["y"].dtype == jnp.bfloat16
    back = fetch(placed)
    assert isinstance(back["x"], np.ndarray)
    np.testing.assert_array_equal(back["x"], x)
    with jax.set_mesh(sharding.mesh):
        np.testing.assert_array_equal(fetch(place(x, jax.P(AXES[0]), replicated=True)), x)


def test_dtypes_follow_the_settings(user_settings):
    """NumPy's float64 is float32 in JAX, in all processes alike and without a warning."""
    placed = place(np.ones(8), NamedSharding(make_mesh(), jax.P(AXES)))
    assert placed.dtype == jnp.float32


@pytest.mark.parametrize(
    ("local", "spec", "error", "said"),
    [
        ([1.0], jax.P(), TypeError, "local: wanted a JAX or NumPy array, got"),
        (np.ones(8), "node", TypeError, "sharding: wanted a NamedSharding or a PartitionSpec"),
        (np.ones(8), jax.P("other"), ValueError, "sharding: wanted axes of the mesh in force"),
        (np.ones(8), jax.P(None, AXES), ValueError, "sharding: wanted at most 1 dimensions"),
        (np.ones(9), jax.P(AXES), ValueError, r"local: wanted this process's part .*float64\[9\]"),
    ],
)
def test_bad_arguments(unchecked, local, spec, error, said):
    with jax.set_mesh(make_mesh()), pytest.raises(error, match=f"^{said}"):
        place(local, spec)


def test_no_mesh():
    with pytest.raises(ValueError, match=r"sharding: .*jax\.set_mesh"):
        place(np.ones(8), jax.P(AXES))


def test_traced(unchecked):
    with pytest.raises(TypeError, match=r"^x: wanted an array outside jax\.jit"):
        jax.jit(lambda x: fetch(x))(jnp.ones(2))
    with pytest.raises(TypeError, match=r"^local: wanted an array outside jax\.jit"):
        jax.jit(lambda x: place(x, NamedSharding(make_mesh(), jax.P())))(jnp.ones(2))
    with pytest.raises(TypeError, match="^x: wanted a JAX or NumPy array"):
        fetch([1.0])
