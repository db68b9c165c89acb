"""Data into and out of arrays over the mesh, in one process; over several see test_processes.py."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from energy_attn.distributed import fetch, make_mesh, place
from tests.support.complaints import refused

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


def test_a_tree_that_was_read_lies_like_the_old_one():
    """All weights on one device after a resume, whose next step is compiled anew, or for one device."""
    mesh = make_mesh((2, 4))
    layer = eqx.nn.MLP(8, 8, 8, 0, key=jax.random.key(0)).layers[0]
    split = {"weight": jax.P(None, "device"), "bias": jax.P("device")}
    layer = eqx.tree_at(
        lambda x: (x.weight, x.bias),
        layer,
        tuple(
            place(getattr(layer, n), NamedSharding(mesh, s), replicated=True)
            for n, s in split.items()
        ),
    )
    keys = jax.device_put(
        jax.random.split(jax.random.key(1), 8), NamedSharding(mesh, jax.P("node"))
    )
    state = {"layer": layer, "count": jnp.zeros((), jnp.int32), "step": 7, "act": jax.nn.relu}

    @jax.jit
    def step(arrays, keys):
        return jax.tree.map(lambda x: x + 1, arrays), keys

    def arrays(state):
        return eqx.filter(state, eqx.is_array)

    want, _ = step(arrays(state), keys)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, state)
    file.seek(0)
    read = eqx.tree_deserialise_leaves(file, state)
    assert len(read["layer"].weight.sharding.device_set) == 1
    for like in (state, eqx.filter_eval_shape(lambda: state) | {"layer": abstract(layer)}):
        placed = place(read | {"keys": keys[:]}, like=like | {"keys": keys})
        keys_there = placed.pop("keys")
        assert placed["step"] == 7 and placed["act"] is jax.nn.relu
        assert keys_there.sharding == keys.sharding
        for x, y in zip(
            jax.tree.leaves(arrays(placed)), jax.tree.leaves(arrays(state)), strict=True
        ):
            assert x.sharding == y.sharding and x.committed == y.committed
        got, _ = step(arrays(placed), keys_there)
        assert eqx.tree_equal(got, want)
    assert step._cache_size() == 1
    step(arrays(read), keys[:])
    assert step._cache_size() == 2  # what the others did not need


def abstract(tree):
    """The shapes of arrays, and where they lie."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


OTHERS = {
    r"ValueError tree: wanted a leaf \['b'\] as in like, got none": {"a": np.ones(8, np.float32)},
    r"ValueError tree: wanted a leaf \['b'\].*, got \['c'\]": {"a": np.ones(8, np.float32), "c": 1},
    r"ValueError tree\['a'\]: .*float32\[8\] .* float32\[4\]": {
        "a": np.ones(4, np.float32),
        "b": 1,
    },
    r"ValueError tree\['a'\]: .*float32\[8\] .* int32\[8\]": {"a": np.ones(8, np.int32), "b": 1},
    r"TypeError tree\['a'\]: wanted a JAX or NumPy array, got float 1.0": {"a": 1.0, "b": 1},
}


@pytest.mark.parametrize("wanted", OTHERS)
def test_a_tree_of_another_form(wanted):
    """Weights of another model, placed as far as they go."""
    like = {"a": place(np.ones(8, np.float32), NamedSharding(make_mesh(), jax.P(AXES))), "b": 1}
    with refused(wanted):
        place(OTHERS[wanted], like=like)


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
