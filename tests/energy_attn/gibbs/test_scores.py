"""Scores in measures: all that follows from F follows from that of a score; energies that are learnt."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import energy_attn as ea
from energy_attn import scores
from tests.support.measures import answers
from tests.support.scores import CASES

CASE = CASES["function"]
B, T, N, H, V = 2, 6, 4, 3, 2


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


ARRAYS = {
    "query": normal(0, B, T, N, H),
    "key": normal(1, B, T, 2, H),
    "value": normal(2, B, T, 2, V),
}
PARAMETERS = jax.tree.map(jnp.asarray, CASE.parameters)


def close(found, wanted, tolerance=1e-10):
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def energy_of(arrays, parameters):
    energy = ea.FreeEnergy(score=CASE.make(parameters), is_causal=True, scale=H**-0.5)
    return energy.at(**arrays)


def as_bias(arrays, parameters):
    """The same measure of a plain energy: the scores written out, as its bias."""
    query, key = arrays["query"], jnp.repeat(arrays["key"], 2, 2)
    raw = H**-0.5 * jnp.einsum("btnh,bsnh->bnts", query, key)
    b, h, i, j = np.ogrid[:B, :N, :T, :T]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        bias = CASE.dense(raw, b, h, i, j, parameters)
    given = arrays | {"query": 0 * query}
    return ea.FreeEnergy(is_causal=True).at(**given, bias=bias)


ALONG = [normal(10 + i, B, T, N, V) for i in range(4)]
QUESTIONS = {
    "observables": lambda F: answers(F, ALONG),
    "tilted": lambda F: few(F.tilt(ALONG[0]).tilt(ALONG[1] / 3)),
    "joined": lambda F: few(F.tilt(ALONG[0]) | F),
    # at a point inside the hull of the values that a row sees
    "bayes": lambda F: F.conjugate(0.9 * F.attention() + 0.1 * F.tilt(ALONG[0]).attention()).value,
}
FULL = pytest.mark.full


def few(F):
    return F(ALONG[2]), F.entropy(), F.score_moments(), F.covariance(ALONG[0])


@pytest.mark.parametrize(
    "question",
    [
        "tilted",
        "bayes",
        pytest.param("observables", marks=FULL),
        pytest.param("joined", marks=FULL),
    ],
)
def test_measures(question):
    """A question that is asked of the products, or of a score that a source has gone through."""
    ask = QUESTIONS[question]

    def run(measure):
        def total(arrays, parameters):
            found = ask(measure(arrays, parameters))
            return sum(jnp.sin(x).sum() for x in jax.tree.leaves(found)), found

        return jax.jit(jax.grad(total, (0, 1), has_aux=True))

    tolerance = 1e-5 if question == "bayes" else 1e-9
    close(*(run(f)(ARRAYS, PARAMETERS) for f in (energy_of, as_bias)), tolerance)


def test_samples():
    """Draws from the products' own softmax."""
    F, G = (f(ARRAYS, PARAMETERS) for f in (energy_of, as_bias))
    key = jax.random.key(0)
    np.testing.assert_array_equal(F.sample(key=key, count=50), G.sample(key=key, count=50))


def test_learnt():
    """Parameters that an optimiser does not find in a module, or that do not learn: a slope is found again."""
    truth = ea.FreeEnergy(score=scores.ALiBi(jnp.asarray([0.5, 0.1, 0.2, 1.0])), is_causal=True)
    target = truth.attention(**ARRAYS)
    module = ea.FreeEnergy(score=scores.ALiBi(jnp.zeros(N)), is_causal=True)
    optimiser = optax.adam(0.05)
    given = optimiser.init(eqx.filter(module, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(module, given):
        loss = eqx.filter_value_and_grad(
            lambda m: jnp.square(m.attention(**ARRAYS) - target).mean()
        )
        value, gradient = loss(module)
        with jax.numpy_dtype_promotion("standard"):
            updates, given = optimiser.update(gradient, given)
        return value, eqx.apply_updates(module, updates), given

    losses = []
    for _ in range(150):
        value, module, given = step(module, given)
        losses.append(float(value))
    assert losses[-1] < 1e-4 * losses[0]


def test_layers():
    """A layer whose energy has a score that it forgets; numbers in it that are taken for parameters."""
    energy = ea.FreeEnergy(score=scores.SoftCap(0.5))
    layer = ea.MultiheadAttention(num_heads=2, query_size=4, key=jax.random.key(0), energy=energy)
    plain = eqx.tree_at(lambda x: x.energy, layer, ea.FreeEnergy())
    x = normal(3, 5, 4)
    x = x.astype(layer.query_proj.weight.dtype)
    assert not np.allclose(layer(x, x, x), plain(x, x, x))
    assert jax.tree.leaves(eqx.filter(layer.energy, eqx.is_array)) == []
    traced = jax.jit(lambda layer: layer.energy.attention(*[x[:, None]] * 3))
    np.testing.assert_allclose(
        eqx.filter_jit(traced)(layer), layer.energy.attention(*[x[:, None]] * 3), rtol=1e-6
    )
    report = ea.energy_report(layer, x, x, x)
    assert not np.allclose(report.entropy, ea.energy_report(plain, x, x, x).entropy)
