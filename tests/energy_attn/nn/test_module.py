"""`FreeEnergy` as an Equinox module, and `MultiheadAttention` in place of `eqx.nn.MultiheadAttention`.

Here Equinox's own layer is the judge: with the same weights, outputs and gradients must be the same.
"""

import functools
import warnings
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import SequenceParallel
from tests.support.arrays import drawn
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.problems import PROBLEMS, _make, cast
from tests.support.reference import dense, dense_vjp
from tests.support.selection import few, few_rows

T, S, HEADS = 5, 7, 3
# All different, so that no size can stand for another.
SIZES = dict(query_size=8, key_size=9, value_size=10, output_size=11, qk_size=4, vo_size=6)
BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
PROJECTIONS = ("query_proj", "key_proj", "value_proj", "output_proj")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def inputs():
    return normal(1, T, 8), normal(2, S, 9), normal(3, S, 10)


def masks():
    rng = np.random.default_rng(4)
    two, three = rng.random((T, S)) < 0.6, rng.random((HEADS, T, S)) < 0.6
    two[:, 0] = three[:, :, 0] = True  # Equinox gives a fully masked row the mean of the values
    return {"none": None, "two axes": jnp.asarray(two), "three axes": jnp.asarray(three)}


@functools.cache
def layers(**options):
    """Equinox's layer and ours with its weights."""
    options = {"num_heads": HEADS, **SIZES, **BIASES, **options}
    theirs = drawn(eqx.nn.MultiheadAttention, **options)
    return theirs, copied(drawn(ea.nn.MultiheadAttention, **options), theirs)


def copied(ours, theirs):
    def where(layer):
        return [getattr(layer, name) for name in PROJECTIONS]

    return eqx.tree_at(where, ours, where(theirs))


def weights(layer):
    return {name: getattr(layer, name) for name in PROJECTIONS}


# --- FreeEnergy


def test_fields_and_leaves():
    """A field that is traced and should not be, or a scale that cannot be trained because it is not a leaf."""
    energy = ea.FreeEnergy(
        scale=jnp.asarray(0.5), is_causal=True, local_window_size=(4, 0), implementation="blockwise"
    )
    assert jax.tree.leaves(energy) == [energy.scale]
    assert jax.tree.leaves(ea.FreeEnergy()) == []
    rebuilt = jax.tree.unflatten(jax.tree.structure(energy), [jnp.asarray(0.7)])
    assert (rebuilt.is_causal, rebuilt.local_window_size) == (True, (4, 0))
    assert hash(jax.tree.structure(energy)) == hash(jax.tree.structure(rebuilt))


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["decode_ragged", "everything"])
def test_attention_is_gradient(name):
    """Options that one of the two methods forgets: `.attention` is `jax.grad` of the call, to the bit."""
    problem = PROBLEMS[name]
    arrays, _ = cast(problem, jnp.float64)
    arrays.pop("source", None)
    options = dict(problem.options)
    names = {"scale", "is_causal", "local_window_size"} & set(options)
    fields = {name: options.pop(name) for name in names}
    energy = ea.FreeEnergy(**fields)
    query, key, value = (arrays[n] for n in ("query", "key", "value"))
    bias, mask = arrays.get("bias"), options.pop("mask", None)

    @eqx.filter_jit
    def run(energy):
        def total(source):
            found = energy(query, key, value, source=source, bias=bias, mask=mask, **options)
            return found.sum(), found

        zeros = np.zeros((*query.shape[:-1], value.shape[-1]))
        by_call = jax.grad(total, has_aux=True)(zeros)
        call = {"bias": bias, "mask": mask, **options}
        return by_call, energy.attention(query, key, value, return_energy=True, **call)

    by_call, by_method = run(energy)
    jax.tree.map(np.testing.assert_array_equal, by_call, by_method)
    exact = dense(problem if problem.source is None else _without_source(problem))
    close(by_method, exact, tolerance=1e-12)


def _without_source(problem):
    return type(problem)(**{**vars(problem), "source": None})


def test_learnable_scale():
    """A wrong gradient of the inverse temperature, by `filter_grad` under `filter_jit`, in an ensemble."""
    problem = PROBLEMS["value_narrower"]
    arrays, _ = cast(problem, jnp.float64)
    scales = jnp.asarray([0.2, 0.5, 1.3])

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(energy):
        return energy(**arrays).sum() + energy.attention(**arrays).sum()

    def exact(scale):
        at = type(problem)(**{**vars(problem), "scale": scale})
        out, lse = dense(at)
        dq = dense_vjp(at, np.ones_like(out), np.ones_like(lse))["query"]
        return np.sum(dq * problem.query) / scale  # scores are homogeneous in the query

    each = np.asarray([exact(float(scale)) for scale in scales])
    # each of an ensemble; a Python number is an option, not a parameter
    ensemble = eqx.filter_vmap(lambda scale: ea.FreeEnergy(scale=scale, is_causal=False))(scales)
    np.testing.assert_allclose(eqx.filter_vmap(gradient)(ensemble).scale, each, rtol=1e-12)
    assert eqx.filter_eval_shape(gradient, ea.FreeEnergy(scale=0.5)).scale is None


@pytest.mark.parametrize("parallel", [None, SequenceParallel("device", "tree", heads="node")])
def test_a_scale_for_each_head(parallel):
    """The scale of another head, of key heads, or of the heads of another device; a gradient summed over heads."""
    problem = _make("scales", S=8, N=4, K=2, T=3)
    arrays, _ = cast(problem, jnp.float64)
    scale = np.array([0.2, 0.5, -0.3, 1.3])

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(scale):
        F = ea.FreeEnergy(scale=scale, parallel=parallel)
        out, energy = F.attention(**arrays, return_energy=True)
        return energy.sum() + out.sum(), (out, energy)

    scaled = replace(problem, query=problem.query * scale[:, None], scale=1.0)
    out, lse = dense(scaled)
    exact = dense_vjp(scaled, np.ones_like(out), np.ones_like(lse))["query"]
    with jax.set_mesh(mesh_of("2x4")):
        found = gradient(jnp.asarray(scale))
    close(found, ((exact * problem.query).sum((0, 1, 3)), (out, lse)), tolerance=1e-12)
    with pytest.raises(ValueError, match=r"scale: wanted a scalar or shape \(4,\), got"):
        ea.FreeEnergy(scale=jnp.ones(2)).attention(**arrays)
    with pytest.raises(ValueError, match="scale: wanted finite numbers"):
        ea.FreeEnergy(scale=jnp.array([1.0, jnp.nan]))


# --- MultiheadAttention beside Equinox's


@pytest.mark.parametrize(
    "options", few([{**SIZES, **BIASES}, {}, {"dtype": jnp.float32}], {**SIZES, **BIASES})
)
def test_equal_keys_give_equal_parameters(options):
    """A model rebuilt from its seed with other weights: keys split in another order, or another initialiser."""
    options = {"num_heads": 4, "query_size": 12, **options}
    both = eqx.nn.MultiheadAttention, ea.nn.MultiheadAttention
    make = eqx.filter_jit(lambda key: [f(**options, key=key) for f in both])
    theirs, ours = make(jax.random.key(3))
    found, wanted = weights(ours), weights(theirs)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    for name in ("num_heads", "query_size", "key_size", "value_size", "output_size", "qk_size"):
        assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("options", "kinds"),
    few_rows(
        [
            ({}, ["two axes"]),  # of three axes: `test_batches`
            ({}, ["none", "two axes", "three axes"]),
            ({"num_heads": 4, "query_size": 12}, ["none"]),
        ]
    ),
    ids=["all", "masks", "short"],
)
def test_equal_weights_give_equal_outputs(options, kinds):
    """Outputs or gradients that differ from Equinox's: other heads, a size or bias mixed up, a mask lost."""
    if options:
        same = dict.fromkeys([*SIZES][1:]) | dict.fromkeys(BIASES, False)
        theirs, ours = layers(**options, **same)
        given = normal(1, T, 12), normal(2, S, 12), normal(3, S, 12)
    else:
        theirs, ours = layers()
        given = inputs()
    given_masks = {kind: masks()[kind] for kind in kinds}
    weight = normal(5, T, ours.output_size)

    @eqx.filter_jit
    def run(layer, given, given_masks):
        def loss(pair, mask):
            layer, given = pair
            out = layer(*given, mask)
            return (weight * out).sum(), out

        gradient = eqx.filter_grad(loss, has_aux=True)
        return {name: gradient((layer, given), mask) for name, mask in given_masks.items()}

    found, wanted = run(ours, given, given_masks), run(theirs, given, given_masks)
    for name in given_masks:
        (mine, dmine), out = found[name]
        (its, dits), exact = wanted[name]
        close((out, dmine), (exact, dits), f"out and inputs, mask {name}", 1e-12)
        close(weights(mine), weights(its), f"weights, mask {name}", 1e-12)


def test_batches():
    """`jax.vmap` over a batch and its masks that mixes rows."""
    theirs, ours = layers()
    batch = [np.stack([x, -x, 2 * x]) for x in inputs()]
    three = np.asarray(masks()["three axes"])
    given = (*batch, np.stack([three, three[::-1], np.ones_like(three)]))
    both = eqx.filter_jit(lambda *x: [jax.vmap(layer)(*x) for layer in (ours, theirs)])
    found, wanted = both(*given)
    close(found, wanted, tolerance=1e-12)


def test_process_heads():
    """Heads handed to `process_heads` in another layout than Equinox's: rotary embeddings would rotate heads."""
    theirs, ours = layers()
    rotary = eqx.nn.RotaryPositionalEmbedding(embedding_size=SIZES["qk_size"], dtype=jnp.float64)

    def process_heads(query, key, value):
        rotate = jax.vmap(rotary, in_axes=1, out_axes=1)
        return rotate(query), rotate(key), value * 2

    @eqx.filter_jit
    def run(ours, theirs, given):
        both = [layer(*given, process_heads=process_heads) for layer in (ours, theirs)]
        return *both, theirs(*given)

    found, wanted, plain = run(ours, theirs, inputs())
    close(found, wanted, tolerance=1e-12)
    assert not np.allclose(wanted, plain)


@pytest.mark.full
def test_dropout():
    """A dropout that one of the places that turn it off does not; that it drops as Equinox: `test_replace.py`."""
    theirs, ours = layers(dropout_p=0.4)
    plain = layers()[1](*inputs())
    for layer in (ours, eqx.nn.inference_mode(ours)):
        close(layer(*inputs(), key=jax.random.key(7), inference=True), plain, tolerance=1e-12)
    close(eqx.nn.inference_mode(ours)(*inputs()), plain, tolerance=1e-12)
    assert not np.allclose(ours(*inputs(), key=jax.random.key(7)), plain)
    assert eqx.nn.inference_mode(eqx.nn.inference_mode(ours), value=False) == ours
    for layer in (ours, theirs):
        with pytest.raises(RuntimeError, match="key"):
            layer(*inputs())
        with pytest.raises(RuntimeError, match="key"):
            eqx.nn.inference_mode(layer)(*inputs(), inference=False)
        with pytest.warns(match="deterministic"):
            close(layer(*inputs(), deterministic=True), plain, tolerance=1e-12)


def test_dropout_of_everything():
    """A head whose every weight is dropped: 0/0, where Equinox's output is zero; gradients too."""
    theirs, ours = layers(dropout_p=0.9)
    mask = jnp.asarray(np.arange(S) == 0)[None].repeat(T, 0)

    def loss(given, layer):
        out = layer(*given, mask, key=jax.random.key(0))
        return (out**2).sum(), out

    @eqx.filter_jit
    def run(given, ours, theirs):
        return [jax.grad(loss, has_aux=True)(given, layer) for layer in (ours, theirs)]

    (dmine, mine), (dits, its) = run(inputs(), ours, theirs)
    close(mine, its, tolerance=1e-12)
    close(dmine, dits)


# --- MultiheadAttention, what Equinox's has not


def test_grouped_heads():
    """Heads that read the wrong key/value head, or lose its gradients: repeating the projections for Equinox must give
    the same."""
    options = {"num_heads": 6, "query_size": 12, "use_key_bias": True, "use_value_bias": True}
    ours = drawn(ea.nn.MultiheadAttention, **options, num_kv_heads=2)
    assert ours.key_proj.weight.shape == (2 * 2, 12)
    theirs = drawn(eqx.nn.MultiheadAttention, **options)

    def repeated(x):  # [2 · width, ...] to [6 · width, ...]
        return jnp.repeat(x.reshape(2, 2, *x.shape[1:]), 3, axis=0).reshape(12, *x.shape[1:])

    def as_theirs(ours):
        alike = [
            ours.query_proj,
            *(jax.tree.map(repeated, x) for x in (ours.key_proj, ours.value_proj)),
            ours.output_proj,
        ]
        names = PROJECTIONS
        return eqx.tree_at(lambda layer: [getattr(layer, name) for name in names], theirs, alike)

    @eqx.filter_jit
    def run(ours, given):
        def loss(ours, turn):
            out = turn(ours)(*given)
            return jnp.sin(out).sum(), out

        gradient = eqx.filter_grad(loss, has_aux=True)
        return gradient(ours, lambda layer: layer), gradient(ours, as_theirs)

    found, wanted = run(ours, (normal(1, T, 12), normal(2, S, 12), normal(3, S, 12)))
    close(found, wanted)


@pytest.mark.full
def test_causal_positions_and_energies():
    """Causality, positions or energies that do not reach the kernel, or reach it for the wrong head."""
    causal = ea.nn.MultiheadAttention(3, 12, is_causal=True, key=jax.random.key(0))
    theirs = copied_to_equinox(causal)
    x = normal(1, 6, 12)
    out, energy = causal(x, x, x, return_energy=True)
    close(out, theirs(x, x, x, jnp.tril(jnp.ones((6, 6), bool))))
    close(causal(x, x, x), out)
    # the same rows and keys in another order, which their positions give back
    order = np.random.default_rng(0).permutation(6)
    shuffled = jnp.asarray(order, jnp.int32)
    again = causal(x[order], x, x, query_positions=shuffled, return_energy=True)
    close(again, (out[order], energy[order]))
    again = causal(x, x[order], x[order], key_positions=shuffled, return_energy=True)
    close(again, (out, energy))
    # an absent key is one that is masked
    positions = jnp.arange(6, dtype=jnp.int32).at[2].set(-1)
    mask = jnp.tril(jnp.ones((6, 6), bool)).at[:, 2].set(False)
    close(causal(x, x, x, key_positions=positions), theirs(x, x, x, mask))
    # energies are log-sums of the scores of each head
    query, key = (jax.vmap(f)(x).reshape(6, 3, 4) for f in (causal.query_proj, causal.key_proj))
    scores = jnp.einsum("tnh,snh->nts", query, key) / 2
    scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool))[None], scores, -jnp.inf)
    close(energy, jax.nn.logsumexp(scores, axis=-1).T)


def copied_to_equinox(ours):
    theirs = eqx.nn.MultiheadAttention(ours.num_heads, ours.query_size, key=jax.random.key(9))
    return copied(theirs, ours)


def test_energies_are_those_before_dropout():
    """Energies that depend on what was dropped: they would jump from step to step."""
    _, ours = layers(dropout_p=0.4)

    @eqx.filter_jit
    def run(ours, given, key):
        options = {"key": key}, {"inference": True}
        return [ours(*given, **option, return_energy=True)[1] for option in options]

    close(*run(ours, inputs(), jax.random.key(0)), tolerance=1e-12)


def test_warns_once_and_of_nothing_else():
    """A layer that warns at every call: users switch warnings off and miss those that matter."""
    _, ours = layers()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eqx.filter_eval_shape(ours, *inputs())
    with pytest.warns(DeprecationWarning, match="inference") as found:
        eqx.filter_eval_shape(ours, *inputs(), deterministic=False)
    assert len(found) == 1


@pytest.mark.full
def test_options_make_the_energy():
    """An option that the layer takes and does not hand on, or one that an `energy` beside it overrides."""
    options = {"scale": 0.3, "is_causal": True, "local_window_size": (3, 0)}
    layer = ea.nn.MultiheadAttention(2, 8, **options, key=jax.random.key(0))
    given = ea.nn.MultiheadAttention(2, 8, energy=ea.FreeEnergy(**options), key=jax.random.key(0))
    assert eqx.tree_equal(layer, given)
    with pytest.raises(ValueError, match=r"energy: wanted either .* got both, is_causal="):
        energy = ea.FreeEnergy()
        ea.nn.MultiheadAttention(2, 8, energy=energy, is_causal=True, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"causal: wanted a known option .did you mean is_causal"):
        ea.nn.MultiheadAttention(2, 8, causal=True, key=jax.random.key(0))
