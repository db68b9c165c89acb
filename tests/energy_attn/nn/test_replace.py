"""Equinox's attention layers in a model, replaced by ours and back: Equinox is the judge."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from tests.support.arrays import drawn
from tests.support.compare import close

T, S = 5, 7
ALL = {
    "num_heads": 3,
    "query_size": 8,
    "key_size": 9,
    "value_size": 10,
    "output_size": 11,
    "qk_size": 4,
    "vo_size": 6,
    **{f"use_{name}_bias": True for name in ("query", "key", "value", "output")},
}


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def inputs():
    return normal(1, T, 8), normal(2, S, 9), normal(3, S, 10)


class Model(eqx.Module):
    """Layers where people have them: in a list, in a dictionary, stacked for a scan, and shared."""

    blocks: list
    named: dict
    stacked: eqx.nn.MultiheadAttention
    tied: eqx.nn.MultiheadAttention
    head: eqx.nn.Linear


@pytest.fixture(scope="module")
def model():
    small = {"num_heads": 2, "query_size": 8}
    first = drawn(eqx.nn.MultiheadAttention, **ALL, dropout_p=0.3)

    def stacked(*, key):
        make = eqx.filter_vmap(lambda key: eqx.nn.MultiheadAttention(**small, key=key))
        return make(jax.random.split(key, 3))

    return Model(
        blocks=[first, eqx.nn.LayerNorm(8)],
        named={"cross": drawn(eqx.nn.MultiheadAttention, **small, inference=True, seed=1)},
        stacked=drawn(stacked, seed=2),
        tied=first,
        head=drawn(eqx.nn.Linear, in_features=8, out_features=2, seed=3),
    )


def test_every_layer_and_back(model):
    """A layer that is missed, a tied one that becomes two, a stacked one that is made anew, or something lost on
    the way back."""
    swapped = ea.replace_attention(model)
    ours = (swapped.blocks[0], swapped.named["cross"], swapped.stacked)
    assert all(type(x) is ea.nn.MultiheadAttention for x in ours)
    assert swapped.tied is swapped.blocks[0]
    assert swapped.named["cross"].dropout.inference and swapped.blocks[0].dropout.p == 0.3
    assert swapped.stacked.query_proj.weight.shape == (3, 8, 8)
    same = zip(jax.tree.leaves(swapped), jax.tree.leaves(model), strict=True)
    assert all(x is y for x, y in same)
    back = ea.restore_attention(swapped)
    assert bool(eqx.tree_equal(back, model))
    assert type(back.stacked) is eqx.nn.MultiheadAttention and back.tied is back.blocks[0]


def test_outputs_and_gradients(model):
    """A bias or a probability left behind, other random keys, or a gradient that does not reach a projection."""
    theirs = model.blocks[0]
    ours = ea.replace_attention(theirs)
    options = {"key": jax.random.key(7)}

    @eqx.filter_jit
    def both(layer, arrays):
        def total(given):
            layer, arrays = given
            out = layer(*arrays, **options)
            return (out * normal(9, *out.shape)).sum(), out

        (_, out), gradients = eqx.filter_value_and_grad(total, has_aux=True)((layer, arrays))
        return out, jax.tree.leaves(gradients)

    close(both(ours, inputs()), both(theirs, inputs()), tolerance=1e-12)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_masks_of_numbers(model, dtype):
    """Masks of ones and zeros, as notebooks make them, that are refused, or shown and hidden the other way round."""
    shown = jnp.asarray(np.arange(S) < 4, dtype)

    @eqx.filter_jit
    def run(layers, mask):
        return [layer(*inputs(), mask, key=jax.random.key(7)) for layer in layers]

    layers = [f(model.blocks[0]) for f in (ea.replace_attention, lambda x: x)]
    for shape in ((T, S), (ALL["num_heads"], T, S)):
        close(*run(layers, jnp.broadcast_to(shown, shape)), tolerance=1e-12)


def test_options_of_stacked_layers(model):
    """Arrays of options that a scan, or a map over layers, cuts along an axis that the layers alone have."""
    x, heads = normal(4, T, 8), np.arange(1, 3) / 4
    options = {
        "score": ea.scores.ALiBi(jnp.asarray(heads)),
        "mask": ea.masks.Causal() | ea.masks.Prefix(2),
        "sink": jnp.asarray(-heads),
    }

    def scanned(layers, x):
        arrays, static = eqx.partition(layers, eqx.is_array)

        def step(x, arrays):
            layer = eqx.combine(arrays, static)
            return x + layer(x, x, x, inference=True), None

        return jax.lax.scan(step, x, arrays)[0]

    def in_turn(layers, x):
        for layer in layers:
            x = x + layer(x, x, x, inference=True)
        return x

    @eqx.filter_jit
    def run(stacked, layers, x):
        def with_slopes(function, layers):
            def total(layers):
                out = function(layers, x)
                return (out * normal(9, *out.shape)).sum(), out

            (_, out), slopes = eqx.filter_value_and_grad(total, has_aux=True)(layers)
            return out, slopes

        def apart(layers):
            return jnp.stack([layer(x, x, x, inference=True) for layer in layers])

        mapped = eqx.filter_vmap(lambda layer: layer(x, x, x, inference=True))(stacked)
        found, wanted = with_slopes(scanned, stacked), with_slopes(in_turn, layers)
        return (*found, mapped), (*wanted, apart(layers))

    arrays, static = eqx.partition(model.stacked, eqx.is_array)
    theirs = [eqx.combine(jax.tree.map(lambda w, i=i: w[i], arrays), static) for i in range(3)]
    stacked = ea.replace_attention(model.stacked, **options)
    found, (out, slopes, apart) = run(stacked, ea.replace_attention(theirs, **options), x)
    together = jax.tree.map(lambda *some: jnp.stack(some), *slopes)
    close(found, (out, together, apart), tolerance=1e-12)
    assert stacked.energy.sink.shape == (3, 2)


def test_options_reach_every_layer(model):
    """Options that only the first layer gets."""
    x = normal(5, T, 8)
    swapped = ea.replace_attention([model.named, model.named["cross"]], is_causal=True)
    assert swapped[1] is swapped[0]["cross"]
    causal = jnp.asarray(np.tri(T, dtype=bool))

    @eqx.filter_jit
    def run(ours, theirs, x):
        return ours(x, x, x), theirs(x, x, x, mask=causal)

    close(*run(swapped[1], model.named["cross"], x), tolerance=1e-12)


def test_what_cannot_be_done_is_said(model):
    """A silent loss: a derived class whose method vanishes, a causal layer that attends to all, nothing replaced."""

    class Derived(eqx.nn.MultiheadAttention):
        pass

    derived = drawn(Derived, num_heads=2, query_size=8)
    with pytest.raises(TypeError, match=r"model\['x'\]: wanted equinox.nn.Mult.* got .* Derived"):
        ea.replace_attention({"x": derived})
    with pytest.raises(ValueError, match=r"wanted a pytree with equinox.nn.*in it, got Linear"):
        ea.replace_attention(model.head)
    with pytest.raises(TypeError, match="causal"):
        ea.replace_attention(model, causal=True)
    with pytest.raises(ValueError, match=r"pytree with energy_attn.nn.MultiheadAttention in it"):
        ea.restore_attention(model)
    for options in (
        {"is_causal": True},
        {"scale": 0.5},
        {"scale": jnp.asarray(0.5)},
        {"local_window_size": 0},
        {"mask": ea.masks.Causal()},
    ):
        (field,) = options
        with pytest.raises(ValueError, match=rf"model\.blocks\[0\]\.energy\.{field}: wanted"):
            ea.restore_attention(ea.replace_attention(model, **options))
    grouped = drawn(ea.nn.MultiheadAttention, num_heads=4, query_size=8, num_kv_heads=2)
    with pytest.raises(ValueError, match=r"model\[0\]: wanted as many key heads .* got 2 of 4"):
        ea.restore_attention([grouped])
    chosen = ea.replace_attention(model, implementation="blockwise")
    assert bool(eqx.tree_equal(ea.restore_attention(chosen), model))
