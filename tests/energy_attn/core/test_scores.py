"""Scores in measures: all that follows from F follows from that of a score; energies that are learnt."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn import scores
from tests.support.compare import close
from tests.support.observables import answers
from tests.support.problems import Problem
from tests.support.reference import dense, rows
from tests.support.scores import CASES
from tests.support.selection import few

CASE = CASES["function"]
B, T, N, H, V = 2, 6, 4, 3, 2


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


SHAPES = {"query": (B, T, N, H), "key": (B, T, 2, H), "value": (B, T, 2, V)}
ARRAYS = {name: normal(i, *shape) for i, (name, shape) in enumerate(SHAPES.items())}
PARAMETERS = CASE.parameters


def energy_of(arrays, parameters):
    energy = ea.FreeEnergy(score=CASE.make(parameters), is_causal=True, scale=H**-0.5)
    return energy.at(**jax.tree.map(jnp.asarray, arrays))


def scores_of(arrays, parameters):
    """The scores written out."""
    query, key = arrays["query"], jnp.repeat(arrays["key"], 2, 2)
    raw = H**-0.5 * jnp.einsum("btnh,bsnh->bnts", query, key)
    b, h, i, j = np.ogrid[:B, :N, :T, :T]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return CASE.dense(raw, b, h, i, j, parameters)


def as_bias(arrays, parameters):
    """The same measure of a plain energy, with the scores as its bias."""
    given = jax.tree.map(jnp.asarray, arrays | {"query": 0 * arrays["query"]})
    return ea.FreeEnergy(is_causal=True).at(**given, bias=scores_of(arrays, parameters))


ALONG = [normal(10 + i, B, T, N, V) for i in range(4)]


def some(F):
    return F(ALONG[2]), F.entropy(), F.score_moments(), F.covariance(jnp.asarray(ALONG[0]))


def tilted(F):
    return F.tilt(jnp.asarray(ALONG[0])).tilt(jnp.asarray(ALONG[1] / 3))


QUESTIONS = {
    "tilted": lambda F: (tilted(F).attention(return_energy=True), tilted(F).entropy()),
    "observables": lambda F: answers(F, ALONG),
    "joined": lambda F: some(F.tilt(jnp.asarray(ALONG[0])) | F),
    # at a point inside the hull of the values that a row sees
    "bayes": lambda F: F.conjugate(0.9 * F.attention() + 0.1 * tilted(F).attention()).value,
}


def gradient_of(ask):
    """Of a number that depends on all that is asked, and what is found."""

    def total(arrays, parameters):
        found = ask(arrays, parameters)
        return sum(jnp.sin(x).sum() for x in jax.tree.leaves(found)), found

    return jax.grad(total, (0, 1), has_aux=True)


@pytest.mark.parametrize("question", few(list(QUESTIONS), "tilted"))
def test_measures(question):
    """A question asked of the products, a score that a source has gone through, a parameter without a gradient."""

    def run(measure):
        of_all = gradient_of(lambda *x: QUESTIONS[question](measure(*x)))
        return jax.jit(of_all)(ARRAYS, PARAMETERS)

    tolerance = 1e-5 if question == "bayes" else 1e-9
    close(run(energy_of), run(as_bias), tolerance=tolerance)


def test_the_largest_score():
    """A derivative of zero or NaN, where XLA computes the largest score twice and rounds it in two ways."""

    def change(largest):
        return jax.jacrev(largest, (0, 1))(ARRAYS, PARAMETERS)

    def written_out(arrays, parameters):
        seen = jnp.tril(jnp.ones((T, T), bool))
        return jnp.where(seen, scores_of(arrays, parameters), -jnp.inf).max(-1).swapaxes(1, 2)

    # the reference operation by operation: in one program it has NaN
    close(change(jax.jit(lambda *x: energy_of(*x).score_max())), change(written_out))


def test_layers():
    """A layer whose energy has a score that it forgets; numbers in it that are taken for parameters."""
    energy = ea.FreeEnergy(score=scores.SoftCap(0.5))
    layer = ea.nn.MultiheadAttention(2, 4, energy=energy, key=jax.random.key(0))
    plain = eqx.tree_at(lambda x: x.energy, layer, ea.FreeEnergy())
    x = jnp.asarray(normal(3, 5, 4), layer.query_proj.weight.dtype)
    assert jax.tree.leaves(eqx.filter(layer.energy, eqx.is_array)) == []
    run = jax.jit(lambda layer: layer.energy.attention(*layer.project(x, x, x)))
    found, other = (eqx.filter_jit(run)(model) for model in (layer, plain))
    products = jax.jit(lambda layer: layer.project(x, x, x))
    query, key, value = (np.asarray(x)[None] for x in eqx.filter_jit(products)(layer))
    problem = Problem("layer", query, key, value)
    capped = replace(problem, scale=0.0, bias=0.5 * np.tanh(rows(problem).scores / 0.5))
    close(np.asarray(found)[None], dense(capped)[0])
    assert not np.allclose(found, other)
