"""Answers with rules of their own in a loop that is differentiated twice: JAX 0.10 loses the rules of `custom_jvp`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import energy_attn as ea
from tests.support.selection import few

RNG = np.random.default_rng(0)
QUERY, KEY, VALUE, SOURCE = (
    jnp.asarray(RNG.standard_normal((n, 2, width))) for n, width in ((3, 4), (7, 4), (7, 3), (3, 3))
)


def measure(query):
    return ea.FreeEnergy().at(query, KEY, VALUE)


def inside(query):
    """Points in the hulls of the values."""
    return 0.9 * measure(query).attention() + 0.1 * VALUE.mean(0)[None]


def retrieved(query):
    return ea.hopfield.retrieve(query, KEY * jnp.cosh(0.01 * query.sum()), scale=0.5).point


ANSWERS = {
    "energy": lambda query: jnp.tanh(measure(query)(SOURCE)),
    "rate": lambda query: measure(query).rate(inside(query)).value,
    "source of a rate": lambda query: measure(query).rate(inside(query)).source ** 2,
    "map": lambda query: measure(query).map().point ** 2,
    "retrieve": lambda query: retrieved(query) ** 2,
}


@pytest.mark.parametrize("answer", few(list(ANSWERS), "map"))
def test_second_order_in_a_loop(answer):
    """Second derivatives that are zero or wrong in a scan, and right outside of it."""

    def step(x, carry):
        return carry + ANSWERS[answer](x * (1 + 0.1 * carry)).sum()

    def looped(x):
        return lax.scan(lambda c, _: (step(x, c), None), jnp.zeros(()), None, length=2)[0]

    def unrolled(x):
        return step(x, step(x, jnp.zeros(())))

    def products(f, x):
        along = jnp.ones_like(x)
        return (
            jax.jvp(jax.grad(f), (x,), (along,))[1],
            jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), along))(x),
        )

    found, wanted = (jax.jit(lambda x, f=f: products(f, x))(QUERY) for f in (looped, unrolled))
    assert jnp.abs(wanted[0]).max() > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), found, wanted)
