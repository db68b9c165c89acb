"""Drawn keys: the frequency of each against its weight."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from tests.support.meshes import mesh_of, parallel_of
from tests.support.observables import measure, statistic
from tests.support.problems import BLOCKS, LARGE, PROBLEMS, cast
from tests.support.reference import rows
from tests.support.selection import few_rows


@functools.partial(jax.jit, static_argnames=("name", "number", "kind"))
def draw(arrays, rng, name, number, kind=None):
    problem = {**PROBLEMS, **LARGE, **BLOCKS}[name]
    parallel = None if kind is None else parallel_of(kind)
    return measure(**arrays, **problem.options, parallel=parallel).sample(key=rng, count=number)


@pytest.mark.parametrize(
    ("name", "count", "kind"),
    few_rows(
        [
            ("everything", 2000, None),
            ("large", 50, None),
            ("everything", 2000, "2x4"),
            ("blocks_causal", 2000, "8"),
            ("decode", 2000, "8 explicit"),
        ]
    ),
)
def test_distribution(name, count, kind):
    """Keys with wrong chances, or counted from their block's or device's first; hidden keys, fully masked rows."""
    problem = {**PROBLEMS, **LARGE, **BLOCKS}[name]
    arrays, _ = cast(problem, jnp.float64)
    with jax.set_mesh(mesh_of(kind)) if kind else contextlib.nullcontext():
        drawn = np.asarray(draw(arrays, jax.random.key(1), name, count, kind))
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


def test_same_on_any_mesh():
    """Noise by the place of a key on its device, or in its part of a union: other keys on 1, 2 and 8 devices."""
    problem = PROBLEMS["everything"]
    arrays, _ = cast(problem, jnp.float64)
    wanted = np.asarray(draw(arrays, jax.random.key(3), "everything", 40))
    for kind in ("2x4", "8"):
        with jax.set_mesh(mesh_of(kind)):
            found = np.asarray(draw(arrays, jax.random.key(3), "everything", 40, kind))
        np.testing.assert_array_equal(found, wanted, kind)

    q, k, v = jax.random.normal(jax.random.key(0), (3, 6, 2, 4), jnp.float64)
    energy = ea.FreeEnergy()
    parts = [energy.at(q, k[cut], v[cut]) for cut in (slice(0, 2), slice(2, None))]
    measures = parts[0] | parts[1], energy.at(q, k, v)
    both, whole = (F.sample(key=jax.random.key(1), count=40) for F in measures)
    np.testing.assert_array_equal(both, whole)


def test_likeliest_keys():
    """Noise that is infinite, or too coarse: a key of nearly all the weight that another one beats."""
    q, k = jnp.ones((1000, 1, 1)), jnp.asarray([0.0, 25.0, 0.0]).reshape(3, 1, 1)
    drawn = jax.jit(lambda key: measure(q, k, k).sample(key=key, count=100))(jax.random.key(0))
    assert (np.asarray(drawn) == 1).all()
