"""Equations of the Tree Attention paper that no other test states by themselves, with the numbers of its first text."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from tests.support.problems import PROBLEMS, cast
from tests.support.reference import rows


def test_weights_sum_to_one():
    """Equation 8: weights that lose something at the edge of a block, or where keys are masked."""
    problem = PROBLEMS["causal_more_keys"]
    arrays, _ = cast(problem, jnp.float64)
    arrays["value"] = jnp.ones_like(arrays["value"])
    out = jax.jit(lambda arrays: ea.attention(**arrays, **problem.options))(arrays)
    np.testing.assert_allclose(out, 1, rtol=1e-14)


@pytest.mark.smoke
def test_taylor_series():
    """Equation 12: moments in another order or with another factor than Z's own expansion has."""
    problem = PROBLEMS["one_query"]
    arrays, _ = cast(problem, jnp.float64)
    tangent = jnp.asarray(problem.rng("direction").standard_normal(problem.query.shape))

    @jax.jit
    def run(arrays, tangent):
        F = ea.FreeEnergy().at(**arrays)
        series = [F.moment([tangent] * n) / math.factorial(n) for n in range(1, 5)]
        return series, jnp.exp(F(0.01 * tangent) - F())  # Z(ζ) / Z(0)

    series, ratio = run(arrays, tangent)
    expanded = 1 + sum(term * 0.01 ** (n + 1) for n, term in enumerate(series))
    along = np.einsum("btnv,bsnv->bnts", tangent, rows(problem).value)
    largest = np.abs(along).max()
    np.testing.assert_allclose(expanded, ratio, rtol=0, atol=2 * (0.01 * largest) ** 5 / 120)
    assert (0.01 * largest) ** 5 < 1e-6


def test_output_projection_folds_into_the_values():
    """Equation 20: the sum of the heads' gradients, with W_O in their values, is the block's output."""
    layer = ea.nn.MultiheadAttention(3, 12, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (6, 12))

    @eqx.filter_jit
    def run(layer, x):
        query, key, value = layer.project(x, x, x)
        weight = layer.output_proj.weight.reshape(12, 3, 4)
        wide = jnp.einsum("snv,wnv->snw", value, weight)

        def total(source):  # one source for each query, shared by its heads
            shared = jnp.broadcast_to(source[:, None], (6, 3, 12))
            return ea.free_energy(query, key, wide, source=shared).sum()

        return jax.grad(total)(jnp.zeros_like(x)), layer(x, x, x)

    np.testing.assert_allclose(*run(layer, x), rtol=0, atol=1e-12)
