"""Attention in Flax's layers: `flax.nnx` and `flax.linen` with their own attention are the judge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import energy_attn as ea
from tests.support.compare import close, near

HEADS, WIDTH = 4, 16
# Two batch axes; nothing masked, a mask as NNX makes it, one of a single batch axis, and causality.
CALLS = ("plain", "float mask", "padding", "causal")


pytestmark = pytest.mark.usefixtures("user_settings")


def options(call):
    if call == "float mask":
        return {"mask": nnx.make_causal_mask(jnp.ones((2, 3, 7)))}
    if call == "padding":
        return {"mask": (jnp.arange(7) < jnp.array([4, 7, 2])[:, None])[None, :, None, None]}
    return {"is_causal": True} if call == "causal" else {}


def layer(attention_fn=nnx.dot_product_attention, **given):
    given = {"decode": False, "rngs": nnx.Rngs(0)} | given
    return nnx.MultiHeadAttention(HEADS, WIDTH, attention_fn=attention_fn, **given)


def inputs(dtype=jnp.float32):
    x = np.random.default_rng(0).standard_normal((2, 3, 7, WIDTH))
    return jnp.asarray(x, dtype)


def out_and_gradients(model, x, **given):
    def run(model, x):
        out = model(x, **given)
        return (out**2).sum(), out

    gradients, out = nnx.grad(run, argnums=(0, 1), has_aux=True)(model, x)
    return jax.device_get((out, jax.tree.leaves(gradients)))


def in_float64(tree):
    """A copy whose floating arrays are of 64 bits."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def judged(run, model, x, given):
    """What the judge returns in float32, and in float64 on the same data."""
    graph, state = nnx.split(model)
    with jax.enable_x64(True):
        exact = run(nnx.merge(graph, in_float64(state)), in_float64(x), **given)
    return run(model, x, **given), exact


@pytest.mark.parametrize(
    "call", [pytest.param("float mask", marks=pytest.mark.smoke), *CALLS[:1], *CALLS[2:]]
)
def test_is_nnx_own(call):
    """Another scale or order of heads; a mask of floats, or one of fewer batch axes, that hides other keys."""
    given = options(call)
    found = out_and_gradients(layer(ea.flax.attention_fn()), inputs(), **given)
    if call == "padding":  # NNX's own wants all batch axes
        given = {"mask": jnp.broadcast_to(given["mask"], (2, 3, HEADS, 7, 7))}
    near(found, *judged(out_and_gradients, layer(), inputs(), given))


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_is_nnx_own(broadcast):
    """Other weights that are dropped, or not divided by the chance."""
    rate = np.float32(0.3)  # by a rate of 64 bits the judge in float64 draws other weights
    given = {"broadcast_dropout": broadcast, "deterministic": False}
    ours, theirs = (
        layer(f, dropout_rate=rate, **given, rngs=nnx.Rngs(0))
        for f, rate in (
            (ea.flax.attention_fn(), float(rate)),
            (nnx.dot_product_attention, rate),
        )
    )
    found = out_and_gradients(ours, inputs(), **options("padding"))
    near(found, *judged(out_and_gradients, theirs, inputs(), options("padding")))


def test_decoding_is_nnx_own():
    """Slots of NNX's cache that are not filled yet."""
    steps = inputs()[:, 0, :3]
    found = []
    for f in (ea.flax.attention_fn(), nnx.dot_product_attention):
        model = layer(f, decode=True)
        model.init_cache((2, 8, WIDTH))
        found.append([model(x[:, None]) for x in steps.swapaxes(0, 1)])
    close(*found, tolerance=1e-6)


def test_grouped_heads_and_dtypes():
    """Keys of fewer heads; a dtype of the computation that is not that of the arrays."""
    q, k = inputs().reshape(2, 3, 7, 8, 2), inputs().reshape(2, 3, 7, 8, 2)[..., :4, :]
    attend = ea.flax.attention_fn()
    close(attend(q, k, k), nnx.dot_product_attention(q, k, k), tolerance=1e-6)
    found = attend(q, k, k, dtype=jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    close(found.astype(jnp.float32), nnx.dot_product_attention(q, k, k), tolerance=2e-2)
    assert attend(q, k.astype(jnp.bfloat16), k).dtype == jnp.float32


def test_linen():
    """A signature of which Linen passes on nothing that the layer has."""
    x, mask = inputs()[0], linen.make_causal_mask(jnp.ones((3, 7)))
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    found = []
    for f in (ea.flax.attention_fn(), linen.dot_product_attention):
        model = linen.MultiHeadDotProductAttention(HEADS, dropout_rate=0.3, attention_fn=f)
        found.append(model.init_with_output(rngs, x, mask=mask, deterministic=False))
    close(*found, tolerance=1e-5)


def test_an_energy_of_the_users():
    """Options that are lost between the layer and the energy: a window, a sink that is trained."""
    x, sink = inputs()[0], jnp.linspace(-1.0, 1.0, HEADS)
    energy = ea.FreeEnergy(is_causal=True, local_window_size=2, sink=sink)
    model = layer(nnx.data(ea.flax.attention_fn(energy)))
    q, k, v = (y(x) for y in (model.query, model.key, model.value))
    wanted = model.out(energy.attention(q, k, v))
    close(model(x), wanted, tolerance=1e-6)
    close(nnx.jit(lambda m, x: m(x))(model, x), wanted, tolerance=1e-6)


def test_fully_masked_rows_are_zero():
    """The mean of the values, or a NaN."""
    q = inputs()[0].reshape(3, 7, HEADS, -1)
    assert not ea.flax.attention_fn()(q, q, q, mask=jnp.zeros((1, 1, 7))).any()


@pytest.mark.parametrize("shape", [(6, 7), (3, 2, 7), (7,)])
def test_other_batch_axes_are_refused(shape, unchecked):
    """Rows of a batch that are paired by their number in memory."""
    x = inputs().reshape(2, 3, 7, HEADS, -1)
    other = jnp.ones((*shape, *x.shape[-2:]))
    for k, v in ((other, other), (other, x), (x, other)):
        with pytest.raises(ValueError, match=r"(key|value): wanted shape \(2, 3, "):
            ea.flax.attention_fn()(x, k, v)


@pytest.mark.parametrize(
    ("lead", "queries", "keys"), [((0, 2), 7, 7), ((2,), 0, 7), ((2, 1), 7, 0)]
)
def test_empty(lead, queries, keys):
    """A division by the size of an array."""
    q, k = (jnp.ones((*lead, n, HEADS, 3)) for n in (queries, keys))
    mask = jnp.ones((*lead, 1, queries, keys))
    found = ea.flax.attention_fn()(q, k, k, mask=mask)
    assert found.shape == q.shape and not found.any() == (keys == 0 or not q.size)


def test_sixteen_bits():
    """Outputs or gradients that err by more than NNX's own in bfloat16, both from those in float32."""

    def found(attend, dtype):
        found = out_and_gradients(layer(attend, dtype=dtype), inputs(), is_causal=True)
        return [np.asarray(x, np.float32) for x in jax.tree.leaves(found)]

    exact = found(nnx.dot_product_attention, None)
    ours, theirs = (
        [np.abs(x - y).max() for x, y in zip(found(f, jnp.bfloat16), exact, strict=True)]
        for f in (ea.flax.attention_fn(), nnx.dot_product_attention)
    )
    assert all(x < 2 * y for x, y in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"module": layer}, "module: wanted None .sow_weights=False"),
        ({"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum: wanted None"),
        ({"dropout_rate": 0.5}, "dropout_rng: wanted a key"),
        ({"dropout_rate": 1.5}, "dropout_rate: wanted a probability, got 1.5"),
        ({"mask": np.ones((2, 1, 7, 7))}, r"mask: wanted .* to \(3, 4, 7, 7\), got bool"),
        ({"mask": np.where(np.eye(7), 0, -np.inf)}, r"mask: wanted .*write mask=\(mask == 0\)"),
        ({"bias": np.ones((1, 1, 1, 7, 7))}, r"bias: wanted .* to \(3, 4, 7, 7\), got"),
    ],
)
def test_what_is_refused(given, message, unchecked):
    """Weights that are said to be stored, or a mask of other rows."""
    q = inputs()[0].reshape(3, 7, HEADS, -1)
    with pytest.raises(ValueError, match=message):
        ea.flax.attention_fn()(q, q, q, **given)


@pytest.mark.parametrize("dtype", [None, jnp.float32])
@pytest.mark.parametrize("name", ["query", "key", "value", "bias"])
def test_imaginary_parts_are_refused(name, dtype, unchecked):
    """A complex array of which the real part is attended."""
    x = inputs()[0].reshape(3, 7, HEADS, -1)
    given = {"query": x, "key": x, "value": x, "bias": jnp.ones((1, 1, 7, 7))}
    given[name] = given[name] + 1j
    with pytest.raises(TypeError, match=f"{name}: wanted a float16, .* got complex64"):
        ea.flax.attention_fn()(**given, dtype=dtype)


def test_dropout_of_other_weights_is_refused():
    """Weights of Tsallis, of which those of Gibbs were dropped."""
    q = inputs()[0].reshape(3, 7, HEADS, -1)
    attend = ea.flax.attention_fn(ea.FreeEnergy(regulariser=ea.Tsallis(1.5)))
    with pytest.raises(NotImplementedError, match="regulariser: wanted None"):
        attend(q, q, q, dropout_rate=0.5, dropout_rng=jax.random.key(0))


def test_options(unchecked):
    """An option that nobody reads."""
    with pytest.raises(TypeError, match="energy: wanted a FreeEnergy"):
        ea.flax.attention_fn(0.5)
    with pytest.raises(ValueError, match=r"energy: wanted either .* got both, is_causal="):
        ea.flax.attention_fn(ea.FreeEnergy(), is_causal=True)
