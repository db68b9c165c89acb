"""Models of NNX that are recorded, and whose attention is replaced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import energy_attn as ea
from tests.support.compare import close, same

WIDTH = 16


pytestmark = pytest.mark.usefixtures("user_settings")


class Block(nnx.Module):
    def __init__(self, **given):
        given = {"decode": False, "rngs": nnx.Rngs(0)} | given
        self.norm = nnx.BatchNorm(WIDTH, rngs=given["rngs"])
        self.attend = nnx.MultiHeadAttention(4, WIDTH, **given)

    def __call__(self, x):
        return x + self.attend(self.norm(x))


class Model(nnx.Module):
    def __init__(self, **given):
        self.blocks = nnx.List([Block(**given) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def ours(**given):
    return Model(attention_fn=ea.flax.attention_fn(), **given)


def inputs():
    return jnp.asarray(np.random.default_rng(0).standard_normal((3, 7, WIDTH)), jnp.float32)


NAMES = [f"blocks[{i}].attend.attention_fn.energy" for i in range(2)]
# A model that is the function, an argument of nnx.jit or closed over; recorded within other transformations.
RECORDED = {
    "the model": lambda model, x: ea.record(model, "entropy")(x),
    "an argument of nnx.jit": lambda model, x: ea.record(nnx.jit(lambda m, x: m(x)), "entropy")(
        model, x
    ),
    "inside nnx.jit": lambda model, x: nnx.jit(lambda m, x: ea.record(m, "entropy")(x))(model, x),
    "closed over": lambda model, x: ea.record(nnx.jit(lambda x: model(x)), "entropy")(x),
    "inside jax.jit": lambda model, x: jax.jit(lambda x: ea.record(model, "entropy")(x))(x),
}


@pytest.mark.parametrize(
    "where", [pytest.param("the model", marks=pytest.mark.smoke), *list(RECORDED)[1:]]
)
def test_record(where):
    """Variables of another level of tracing; a name that does not say which layer it was."""
    model, x = ours(), inputs()
    model.eval()
    out, seen = RECORDED[where](model, x)
    close(out, model(x), tolerance=1e-5)
    if where != "closed over":
        assert list(seen) == NAMES
    assert len(seen) == 2 and all(y["entropy"].shape == (3, 7, 4) for y in seen.values())


def test_what_a_recorded_call_changes():
    """Dropout that repeats, or statistics of a batch that are lost, once a model is recorded."""
    given = {"dropout_rate": 0.3, "deterministic": False}
    x, models = inputs(), [ours(**given, rngs=nnx.Rngs(0)) for _ in range(2)]
    for _ in range(2):
        close(ea.record(models[0], "entropy")(x)[0], models[1](x), tolerance=1e-5)
    close(*(jax.tree.leaves(nnx.state(m, nnx.BatchStat)) for m in models), tolerance=1e-5)


def test_replace_and_restore():
    """A model that is changed in place, other weights, or an energy that is lost."""
    model, x = Model(), inputs()
    model.eval()
    wanted = model(x)
    new = ea.replace_attention(model)
    close(new(x), wanted, tolerance=1e-5)
    assert all(b.attend.attention_fn is nnx.dot_product_attention for b in model.blocks)
    same(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (new, model)))
    back = ea.restore_attention(new)
    same(back(x), wanted)
    assert list(ea.record(new, "entropy")(x)[1]) == NAMES
    assert ea.energy_report(new, x).energy.shape[0] == 2


def test_options_of_each_layer():
    """A sink, or causality, that is lost; a sink that NNX holds as a constant of the program."""
    model, x = Model(), inputs()
    sink = jnp.linspace(-1.0, 1.0, 4)
    new = ea.replace_attention(model, is_causal=True, sink=sink)
    layer = new.blocks[1].attend
    q, k, v = (y(x) for y in (layer.query, layer.key, layer.value))
    wanted = ea.attention(q, k, v, is_causal=True, sink=sink)
    close(layer(x), layer.out(wanted), tolerance=1e-6)
    leaves = jax.tree.leaves(nnx.state(layer, nnx.Not(nnx.Param)))
    assert [y.shape for y in leaves] == [(4,)]
    with pytest.raises(
        ValueError, match=r"model.blocks\[0\].attend.attention_fn.energy.is_causal: wanted False"
    ):
        ea.restore_attention(new)


@pytest.mark.parametrize("name", ["scale", "sink"])
def test_stacked_layers(name):
    """One layer's numbers for all layers of a scan; or ones that are refused where a recording names the energy."""

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(key))

    def run(layers, x):
        step = nnx.scan(lambda x, layer: x + layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return step(x, layers)

    def one(layers, i):
        graph, state = nnx.split(layers)
        return nnx.merge(graph, jax.tree.map(lambda y: y[i], state))

    x, given = inputs(), {name: jnp.linspace(0.2, 0.9, 4)}
    new = ea.replace_attention(make(jax.random.split(jax.random.key(0), 2)), **given)
    out, seen = ea.record(run, "energy")(new, x)
    (found,) = seen.values()
    wanted = []
    for i in range(2):
        layer = one(new, i)
        q, k, v = (y(x) for y in (layer.query, layer.key, layer.value))
        mixed, energy = ea.attention(q, k, v, return_energy=True, **given)
        wanted.append(energy)
        x = x + layer.out(mixed)
    close((out, found["energy"]), (x, jnp.stack(wanted)), tolerance=1e-5)


def test_a_model_without_energies():
    """An error that shows what runs in the model's place, and not the next step."""
    with pytest.raises(ValueError, match=r"after replace_attention\(model\), got one with modules"):
        ea.record(Model())(inputs())


def test_what_a_call_stores():
    """An intermediate that is new to the model, which a recorded call cannot name or loses."""

    class Storing(Block):
        def __call__(self, x):
            self.seen = nnx.Intermediate(x)
            return super().__call__(x)

    model, x = Storing(attention_fn=ea.flax.attention_fn()), inputs()
    ea.record(model, "entropy")(x)
    same(model.seen.get_value(), x)


def test_what_is_refused():
    """A layer whose attention is not Flax's, which would be lost; a model without any."""

    class Mine(nnx.MultiHeadAttention):
        pass

    with pytest.raises(TypeError, match="model.: wanted flax.nnx.MultiHeadAttention itself"):
        ea.replace_attention(Mine(2, 8, decode=False, rngs=nnx.Rngs(0)))
    with pytest.raises(
        TypeError, match=r"blocks\[0\].attend.attention_fn: wanted flax.nnx.dot_product"
    ):
        ea.replace_attention(ours())
    with pytest.raises(
        TypeError, match=r"blocks\[0\].attend.attention_fn: wanted one of energy_attn.flax"
    ):
        ea.restore_attention(Model())
    with pytest.raises(ValueError, match="wanted one with flax.nnx.MultiHeadAttention"):
        ea.replace_attention(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
