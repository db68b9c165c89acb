"""Drawn keys: the frequency of each against its weight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.kernels.reductions._sample import _draw
from tests.support.distributions import statistic
from tests.support.measures import measure
from tests.support.meshes import mesh_of, parallel_of
from tests.support.problems import BLOCKS, LARGE, PROBLEMS, cast
from tests.support.reference import rows


@functools.partial(jax.jit, static_argnames=("name", "number", "kind"))
def draw(arrays, rng, name, number, kind=None):
    problem = {**PROBLEMS, **LARGE, **BLOCKS}[name]
    parallel = None if kind is None else parallel_of(kind)
    return measure(**arrays, **problem.options, parallel=parallel).sample(key=rng, count=number)


def test_distribution():
    """Keys drawn with wrong chances: with a bias and a source, hidden keys, fully masked rows."""
    problem = PROBLEMS["everything"]
    arrays, _ = cast(problem, jnp.float64)
    drawn = np.asarray(draw(arrays, jax.random.key(1), "everything", 2000))
    assert abs(statistic(drawn, rows(problem).weights)) < 4


def test_union():
    """Of three parts: one that is drawn from with a wrong chance, or indices that count from a part's first key."""
    problem = PROBLEMS["grouped"]
    arrays, _ = cast(problem, jnp.float64)

    @jax.jit
    def draw_each(query, key, value):
        cuts = map(slice, (0, 2, 5), (2, 5, None))
        parts = (measure(query, key[:, keys], value[:, keys]) for keys in cuts)
        return functools.reduce(ea.Gibbs.merge, parts).sample(key=jax.random.key(0), count=2000)

    drawn = np.asarray(draw_each(**arrays))
    assert abs(statistic(drawn, rows(problem).weights)) < 4


@pytest.mark.full
def test_many_blocks():
    """Blocks that are chosen with wrong chances, and keys that are counted from their block's beginning."""
    problem = LARGE["large"]
    arrays, _ = cast(problem, jnp.float64)
    drawn = np.asarray(draw(arrays, jax.random.key(2), "large", 50))
    assert abs(statistic(drawn, rows(problem).weights)) < 4


@pytest.mark.full
def test_over_a_mesh():
    """Devices that draw with the same numbers, are chosen with wrong chances, or count from their own first key."""
    for kind, name in (("2x4", "everything"), ("8", "blocks_causal"), ("8 explicit", "decode")):
        problem = {**PROBLEMS, **BLOCKS}[name]
        arrays, _ = cast(problem, jnp.float64)
        with jax.set_mesh(mesh_of(kind)):
            drawn = np.asarray(draw(arrays, jax.random.key(3), name, 2000, kind))
        assert abs(statistic(drawn, rows(problem).weights)) < 4


def test_draws_are_independent():
    """Rows, heads, blocks or draws that share their random numbers: agreement beyond that of chance."""
    q = jnp.zeros((1, 40, 4, 2))
    k = jnp.zeros((1, 3000, 4, 2))
    sample = jax.jit(lambda key: measure(q, k, k).sample(key=key, count=5))
    drawn = np.asarray(sample(jax.random.key(4)))
    flat = drawn.reshape(-1)
    assert len(np.unique(flat)) > 0.85 * flat.size  # 800 of 3000: about 700 different ones
    assert abs(flat.mean() - 1499.5) < 5 * 3000 / np.sqrt(12 * flat.size)
    again, other = sample(jax.random.key(4)), sample(jax.random.key(5))
    assert (again == drawn).all() and (other != drawn).mean() > 0.99


def test_ends_of_a_block():
    """A key that is not seen, where a number falls on the bound of a share: the least and the largest there are."""
    scores = jnp.asarray([[[-jnp.inf, 0.0, -jnp.inf, 1.0, -jnp.inf]]], jnp.float32)
    ends = jnp.asarray([[[0.0, 1 - 2.0**-24]]], jnp.float32)
    places, lse = jax.jit(_draw)(scores, ends)
    assert places.tolist() == [[[1, 3]]]
    np.testing.assert_allclose(lse, np.logaddexp(0, 1), rtol=1e-6)
