"""Attention and the energies of one measure are one pass over the keys."""

import jax
import jax.numpy as jnp
import numpy as np

import energy_attn as ea
from tests.support.compare import close
from tests.support.problems import Problem
from tests.support.reference import dense_vjp


def test_energies_beside_attention():
    """A second loop over blocks for the energies beside attention, or a derivative that the sharing changes."""
    shape = jax.ShapeDtypeStruct((1, 130, 2, 4), jnp.float64)
    energy = ea.FreeEnergy(is_causal=True, implementation="blockwise")

    def flops(f):
        program = jax.jit(lambda q, k, v: f(energy.at(q, k, v))).lower(shape, shape, shape)
        return program.compile().cost_analysis()["flops"]

    along = jnp.ones(shape.shape)
    alone = flops(lambda F: F.attention())
    assert (
        flops(lambda F: (F(), F.attention(), F.cumulant([along]), F.moment([along]))) < 1.1 * alone
    )

    q, k, v, along = (np.random.default_rng(i).standard_normal((1, 9, 2, 4)) for i in range(4))

    @jax.jit
    @jax.grad
    def gradient(k):
        F = energy.at(jnp.asarray(q), k, jnp.asarray(v))
        return (F.attention() * along).sum() + F().sum()

    problem = Problem("shared", q, k, v, is_causal=True)
    close(gradient(k), dense_vjp(problem, along, np.ones((1, 9, 2)))["key"], tolerance=1e-13)
