"""Answers with rules of their own in a loop that is differentiated twice: JAX 0.10 loses the rules of `custom_jvp`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import energy_attn as ea
from energy_attn.bayes._exact_optimum import with_exact_derivative
from tests.support.compare import close
from tests.support.selection import few

RNG = np.random.default_rng(0)
QUERY, KEY, VALUE, SOURCE = (
    RNG.standard_normal((n, 2, width)) for n, width in ((3, 4), (7, 4), (7, 3), (3, 3))
)


def measure(query):
    return ea.FreeEnergy().at(query, jnp.asarray(KEY), jnp.asarray(VALUE))


def inside(query):
    """Points in the hulls of the values."""
    return 0.9 * measure(query).attention() + 0.1 * VALUE.mean(0)[None]


def retrieved(query):
    return ea.hopfield.retrieve(query, KEY * jnp.cosh(0.01 * query.sum()), scale=0.5).point


def optimum(query):
    """The point of a map, as if a solver had found it."""
    F = measure(query)
    found = lax.stop_gradient(F.attention(return_energy=True))
    return with_exact_derivative(*F._prepared(), *reversed(found))[1]


ANSWERS = {
    "energy": lambda query: jnp.tanh(measure(query)(SOURCE)),
    "rate": lambda query: measure(query).rate(inside(query)).value,
    "source of a rate": lambda query: measure(query).rate(inside(query)).source ** 2,
    "optimum": lambda query: optimum(query) ** 2,
    "map": lambda query: measure(query).map().point ** 2,
    "retrieve": lambda query: retrieved(query) ** 2,
}


def second(f, x, along):
    """A product of the Hessian, forward over reverse."""
    return jax.jvp(jax.grad(f), (x,), (along,))[1]


def second_in_reverse(f, x, along):
    return jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), along))(x)


@pytest.mark.parametrize("product", few([second, second_in_reverse], second))
@pytest.mark.parametrize("answer", few(list(ANSWERS), "optimum"))
def test_second_order_in_a_loop(answer, product):
    """Second derivatives that are zero or wrong in a scan, and right outside of it."""

    def step(x, carry):
        return carry + ANSWERS[answer](x * (1 + 0.1 * carry)).sum()

    def looped(x):
        return lax.scan(lambda c, _: (step(x, c), None), jnp.zeros(()), None, length=2)[0]

    def unrolled(x):
        return step(x, step(x, jnp.zeros(())))

    @jax.jit
    def both(x):
        return tuple(product(f, x, jnp.ones_like(x)) for f in (looped, unrolled))

    found, wanted = jax.device_get(both(QUERY))
    assert np.abs(wanted).max() > 1e-3
    close(found, wanted, tolerance=1e-10)
