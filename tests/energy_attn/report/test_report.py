"""The energy report of arrays, modules and models, for each layer and head; and its picture."""

import dataclasses
import functools
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.models import LlamaConfig
from tests.support.arrays import drawn
from tests.support.compare import close
from tests.support.llama import build
from tests.support.observables import exactly, measure
from tests.support.problems import PROBLEMS, Problem, cast
from tests.support.reference import dense
from tests.support.selection import few

FIELDS = ("energy", "entropy", "heat_capacity", "variance", "effective_keys")
CONFIG = LlamaConfig(11, 16, 8, 2, 4, 2, rope_theta=100.0)


def exact(problem):
    """The five numbers of each row, `[B, T, N]`, from the dense weights."""
    found, (_, energy) = exactly(problem), dense(problem)
    variance = np.trace(found["covariance"], axis1=-2, axis2=-1)
    effective = np.where(np.isfinite(energy), np.exp(found["entropy"]), 0)
    figures = energy, found["entropy"], found["heat capacity"], variance, effective
    return dict(zip(FIELDS, figures, strict=True))


def means(found):
    """Over the queries that see a key, `[1, N]`."""
    seen = np.isfinite(found["energy"])
    with np.errstate(invalid="ignore"):
        total = {name: np.where(seen, x, 0).sum((0, 1)) for name, x in found.items()}
    return {name: (x / seen.sum((0, 1)))[None] for name, x in total.items()}


def figures(report):
    """By their names."""
    return {name: getattr(report, name) for name in FIELDS}


@pytest.fixture(scope="module")
def model():
    """A small decoder whose heads differ: initial weights are too small for that."""
    return build(CONFIG)


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(1).integers(0, 11, (2, 7)), jnp.int32)


@pytest.mark.smoke
@pytest.mark.parametrize("name", few(["mask", "bias_rows"], "mask"))
def test_rows_and_means(name):
    """A number of another row, layer or unit; a mean that counts fully masked rows, or e^H of a mean H."""
    problem = PROBLEMS[name]
    arrays, _ = cast(problem, jnp.float64)

    @jax.jit
    def run(query, key, value, bias=None):
        F = measure(query, key, value, bias=bias, **problem.options)
        return ea.energy_report(F, per_query=True), ea.energy_report(F)

    each, mean = run(**arrays)
    wanted = exact(problem)
    close(figures(each), {n: x[None] for n, x in wanted.items()}, tolerance=1e-10)
    close(figures(mean), means(wanted), tolerance=1e-10)
    assert (np.exp(means(wanted)["entropy"]) < means(wanted)["effective_keys"] - 1e-3).any()


@pytest.mark.full
def test_no_query_sees_a_key():
    """NaN where no row sees a key, or in the gradient there."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 3, 2, 4))

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(q):
        found = ea.energy_report(measure(q, k, v, mask=jnp.zeros((3, 3), bool)))
        return sum(x.sum() for x in jax.tree.leaves(found) if x is not found.energy), found

    slope, found = gradient(q)
    assert np.isneginf(found.energy).all() and not slope.any()
    assert not any(x.any() for x in jax.tree.leaves(found)[1:])


def test_layer():
    """Options of the layer that do not reach its report, a batch axis too many, or other heads than it attends with."""
    options = {"scale": 0.7, "is_causal": True, "local_window_size": (3, 0)}
    layer = drawn(
        ea.nn.MultiheadAttention,
        **{"num_heads": 4, "query_size": 12, "num_kv_heads": 2, "dropout_p": 0.5},
        energy=ea.FreeEnergy(**options),
    )
    x = np.random.default_rng(1).standard_normal((2, 6, 12))
    mask = np.ones((4, 6, 6), bool)
    mask[1, :, 0] = False

    @eqx.filter_jit
    def run(layer, x, y, mask):
        halve = {"process_heads": lambda q, k, v: (q / 2, k, v)}
        one = x[1], y[1], x[1], mask
        return (
            ea.energy_report(layer, x, y, x, mask, **halve),
            ea.energy_report(layer, *one, per_query=True, **halve),
        )

    found, one = run(layer, x, x + 1, mask)
    query, key, value = heads(layer, x, x + 1, x)
    wanted = exact(Problem("layer", query / 2, key, value, mask=mask[None], **options))
    close(figures(found), means(wanted))
    close(figures(one), {name: x[1:] for name, x in wanted.items()})


def heads(layer, *inputs, at=()):
    """Projections, split, of inputs with a batch axis, by hand; `at`: which of stacked layers."""
    parts = ("query", layer.num_heads), ("key", layer.num_kv_heads), ("value", layer.num_kv_heads)
    weights = ((np.asarray(getattr(layer, f"{name}_proj").weight)[at], n) for name, n in parts)
    return [
        (x @ weight.T).reshape(*x.shape[:2], n, -1)
        for x, (weight, n) in zip(inputs, weights, strict=True)
    ]


def test_llama(model, tokens):
    """Layers out of order, or attention in the report that differs from the model's, and changes all that follows."""

    def attend(query, key, value, **options):  # also returns the arguments of attention
        return ea.attention(query, key, value, **options)[0], (query, key, value)

    @jax.jit
    def run(model, tokens):
        return (
            ea.energy_report(model, tokens, per_query=True),
            ea.energy_report(model, tokens, local_window_size=(1, 0)),
            model(tokens, return_energies=True, attend=attend).energies,
        )

    report, window, arrays = run(model, tokens)
    wanted = [exact(Problem("layer", *x, is_causal=True)) for x in zip(*arrays, strict=True)]
    close(figures(report), {name: np.stack([x[name] for x in wanted]) for name in FIELDS})
    # the first token sees itself alone, the last one at most all
    assert (report.entropy[:, :, 0] < 1e-12).all()
    assert (report.effective_keys <= np.arange(1, 8)[None, None, :, None] * (1 + 1e-9)).all()
    assert (window.effective_keys < 2).all()


@pytest.mark.full
def test_llama_with_a_cache(model, tokens):
    """A decode step: its queries, and all keys of the cache."""

    @jax.jit
    def run(model, tokens):
        cache = model(tokens[:, :4], cache=model.empty_cache(2, 9)).cache
        whole = ea.energy_report(model, tokens, per_query=True)
        return whole, ea.energy_report(model, tokens[:, 4:], None, cache, per_query=True)

    whole, rest = run(model, tokens)
    close(figures(rest), {name: x[:, :, 4:] for name, x in figures(whole).items()}, tolerance=1e-10)


class Own(eqx.Module):
    """A model of one's own: two layers of three heads in a loop, and one of two heads behind another."""

    loop: ea.nn.MultiheadAttention
    last: dict

    def __init__(self, *, key):
        def layer(key, heads=3):
            return ea.nn.MultiheadAttention(heads, 6, dtype=jnp.float64, is_causal=True, key=key)

        self.loop = eqx.filter_vmap(layer)(jax.random.split(key))
        self.last = {"a": layer(key, 2)}

    def __call__(self, x):
        def attend(layer, x):
            return x + layer(x, x, x)

        arrays, static = eqx.partition(self.loop, eqx.is_array)

        def step(x, y):
            return attend(eqx.combine(y, static), x), None

        return attend(self.last["a"], jax.lax.scan(step, x, arrays)[0])


def test_any_model():
    """Layers in another order or of another batch, numbers where there are no heads, or a mean over layers."""
    model, x = drawn(Own), np.random.default_rng(5).standard_normal((4, 5, 6))

    run = eqx.filter_jit(lambda model, x: ea.energy_report(eqx.filter_vmap(model), x))
    found = run(model, x)
    wanted = {name: np.full((3, 3), np.nan) for name in FIELDS}
    layers = (model.loop, 0), (model.loop, 1), (model.last["a"], ())
    for i, (layer, at) in enumerate(layers):
        problem = Problem("layer", *heads(layer, x, x, x, at=at), is_causal=True)
        for name, numbers in means(exact(problem)).items():
            wanted[name][i, : layer.num_heads] = numbers
        x = x + dense(problem)[0].reshape(4, 5, 6) @ np.asarray(layer.output_proj.weight)[at].T
    for name, table in wanted.items():
        np.testing.assert_allclose(getattr(found, name), table, rtol=1e-10, err_msg=name)
    assert found.names == ("loop.energy[0]", "loop.energy[1]", "last['a'].energy")


def test_rows_of_any_model():
    """Rows of layers whose shapes differ put together, an option that does not reach the function, an empty report."""
    one, x = drawn(ea.nn.MultiheadAttention, num_heads=2, query_size=6), np.ones((5, 6))

    def traced(function, **options):
        run = functools.partial(ea.energy_report, function, per_query=True, **options)
        return eqx.filter_eval_shape(run, x)

    def twice(x, times):
        assert times == 2
        return one(x, x, one(x, x, x))

    rows = traced(twice, times=2)
    assert rows.entropy.shape == (2, 5, 2) and rows.names == ("FreeEnergy", "FreeEnergy#2")
    with pytest.raises(ValueError, match=r"per_query: wanted rows of one shape .*\(5,\), \(1, 5\)"):
        traced(lambda x: jax.vmap(one)(*[one(x, x, x)[None]] * 3))
    with pytest.raises(ValueError, match="wanted one that calls a FreeEnergy"):
        traced(jnp.sin)


def test_bad_input(unchecked, model, tokens):
    """A message that does not name the wrong argument."""
    layer = drawn(ea.nn.MultiheadAttention, num_heads=2, query_size=4, dtype=jnp.float32)
    x = jnp.asarray(np.zeros((2, 3, 4), np.float32))
    one, fewer = (jnp.asarray(np.zeros(shape, np.float32)) for shape in ((3, 4), (1, 3, 4)))
    F = measure(x, x, x)
    for call, error, words in (
        (lambda: ea.energy_report("model", x), TypeError, "model: wanted .* got str"),
        (lambda: ea.energy_report(F, per_query=1), TypeError, "per_query: wanted True"),
        (lambda: ea.energy_report(x, x, x), TypeError, "model: wanted a Gibbs"),
        (lambda: ea.energy_report(layer, x, fewer, x), ValueError, r"key_: wanted shape \(2"),
        (lambda: ea.energy_report(layer, one, one, [1.0]), TypeError, "value: wanted"),
        (lambda: ea.energy_report(model, x), TypeError, "tokens: wanted an integer"),
        (lambda: ea.energy_report(model, tokens, causal=True), TypeError, "causal"),
    ):
        with pytest.raises(error, match=words):
            call()


Q = np.ones((3, 2, 4), np.float32)


def report_of(values):
    """A report of these figures."""
    shapes = jax.eval_shape(lambda: ea.energy_report(measure(*map(jnp.asarray, (Q, Q, Q)))))
    figures = zip(FIELDS, map(jnp.asarray, values), strict=True)
    return dataclasses.replace(shapes, **dict(figures))


@pytest.mark.full
def test_picture(tmp_path):
    """A map upside down or of another quantity, numbers that cannot be told from their cell, a file not written."""
    pytest.importorskip("matplotlib")
    values = np.arange(15.0).reshape(5, 3, 1) * np.asarray([1.0, -1.0])
    values[0, 1, 1] = -np.inf
    report = report_of(values)
    shown = values[[0, 1, 4, 2, 3]]
    figure = ea.plot.energy_report(report, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    maps = [panel for panel in figure.axes if panel.images]
    for panel, wanted in zip(maps, shown, strict=True):
        (image,) = panel.images
        shown = np.where(np.isfinite(wanted), wanted, -np.inf)
        np.testing.assert_array_equal(image.get_array().filled(-np.inf), shown)
        assert image.origin == "upper"
        assert (panel.get_xlabel(), panel.get_ylabel()) == ("head", "layer")
        said = {(t.get_position()[1], t.get_position()[0]): t.get_text() for t in panel.texts}
        assert said == {i: f"{x:.3g}" for i, x in np.ndenumerate(wanted) if np.isfinite(x)}
        assert {t.get_color() for t in panel.texts} == {"black", "white"}
    assert maps[0].get_yticklabels()[1].get_text() == "1"
    named = dataclasses.replace(report, names=("a", "b.energy", "c"))
    panels = [panel for panel in ea.plot.energy_report(named).axes if panel.images]
    ticks = [[t.get_text() for t in panel.get_yticklabels()] for panel in panels]
    assert ticks[0] == ticks[3] == ["a", "b.energy", "c"] and ticks[1] == ["0", "1", "2"]
    # beyond a hundred heads there are no numbers
    wide = report_of(np.zeros((5, 10, 20)))
    assert not any(panel.texts for panel in ea.plot.energy_report(wide).axes)


def test_picture_refuses(monkeypatch, unchecked):
    """A picture of something else, or a traceback out of matplotlib where it is not installed."""
    rows = report_of(np.ones((5, 1, 3, 2)))
    with pytest.raises(TypeError, match="report: wanted the result of energy_attn.energy_report"):
        ea.plot.energy_report(rows.energy)
    with pytest.raises(ValueError, match="per_query"):
        ea.plot.energy_report(rows)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        ea.plot.energy_report(report_of(np.ones((5, 1, 2))))


@pytest.mark.parametrize(
    ("inputs", "options", "says"),
    [
        (("measure", Q), {}, "inputs: wanted no inputs for a Gibbs; too many"),
        (("layer", Q), {}, "inputs: wanted query, key_, value, .* for a Multi.*; missing"),
        (("model",), {}, "inputs: wanted tokens, .* for a Llama; missing .* 'tokens'"),
        (("measure",), {"mask": None}, "inputs: wanted no inputs for a Gibbs; .* 'mask'"),
    ],
)
def test_other_inputs(inputs, options, says, unchecked, model):
    """An error that names a function of ours, and not what is wanted."""
    layer = ea.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    models = {"measure": measure(Q, Q, Q), "layer": layer, "model": model}
    with pytest.raises(TypeError, match=says):
        ea.energy_report(models[inputs[0]], *inputs[1:], **options)
