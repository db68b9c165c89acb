"""Attention and the energies of one measure are one pass over the keys."""

import jax
import jax.numpy as jnp
import numpy as np

import energy_attn as ea


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

    def one(k):
        F = energy.at(jnp.asarray(q), k, jnp.asarray(v))
        return (F.attention() * along).sum() + F().sum()

    def other(k):
        out, lse = ea.attention(
            jnp.asarray(q), k, jnp.asarray(v), is_causal=True, return_energy=True
        )
        return (out * along).sum() + lse.sum()

    found, wanted = (jax.grad(f)(jnp.asarray(k)) for f in (one, other))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-13)
