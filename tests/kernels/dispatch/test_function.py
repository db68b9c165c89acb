"""`function_call`: a function with a derivative of its own, where JAX would lose the rule of a `custom_jvp`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from energy_attn.kernels.internal import autodiff
from tests.support.compare import close


class Sine(autodiff.AbstractFunction):
    """The sine, of which only the rule has a derivative."""

    def apply(self, args):
        return lax.stop_gradient(jnp.sin(args["x"]) * args["by"])

    def jvp(self, primals, tangents):
        assert tangents["by"] is None  # a zero that is not known to be one
        out = autodiff.function_call(self, primals)
        return out, jnp.cos(primals["x"]) * primals["by"] * tangents["x"]


def sine(x):
    return autodiff.function_call(Sine(), {"x": jnp.asarray(x), "by": jnp.asarray(2.0)})


@pytest.mark.smoke
def test_in_a_loop():
    """A second derivative of a loop that is zero, or that of something else, and no error: that of JAX 0.10."""

    def looped(x):
        return lax.scan(lambda x, _: (sine(x), None), x, None, length=3)[0]

    def exact(x):
        return 2 * jnp.sin(2 * jnp.sin(2 * jnp.sin(x)))

    def along(f):
        return lambda x: jax.jvp(f, (x,), (1.0,))[1]

    orders = [(), (jax.grad,), (along,)]
    orders += [(a, b) for a in (jax.grad, along) for b in (jax.grad, along)]
    orders += [(jax.grad,) * 3]

    def derivatives(f, x):
        return [functools.reduce(lambda f, step: step(f), order, f)(x) for order in orders]

    found, wanted = jax.jit(lambda x: [derivatives(f, x) for f in (looped, exact)])(0.3)
    close(found, wanted, tolerance=1e-12)


def test_of_many():
    """A rule that `jax.vmap` loses; results or tangents of another index, or of what is not mapped."""
    x = np.linspace(0.0, 1.0, 5)

    @jax.jit
    def run(x):
        return (
            *jax.vmap(lambda x: jax.jvp(sine, (x,), (1.0,)))(x),
            jax.vmap(jax.grad(lambda x: jax.vmap(sine)(x[None] * jnp.ones(2)).sum()))(x),
            jax.jacfwd(jax.vmap(sine))(x),
            jax.vmap(lambda _: sine(0.5))(x),
        )

    of_sines = 2 * np.sin(x), 2 * np.cos(x), 4 * np.cos(x), np.diag(2 * np.cos(x))
    close(run(x), (*of_sines, np.full(5, 2 * np.sin(0.5))), tolerance=1e-12)


class Sum(autodiff.AbstractFunction):
    """The sum over an axis of `jax.vmap`."""

    def apply(self, args):
        return lax.psum(args, "i")

    def jvp(self, primals, tangents):
        return autodiff.function_call(self, primals), lax.psum(tangents, "i")


def test_over_a_named_axis():
    """The name of a mapped axis that is not bound in the function, or in its rule."""

    def both(x):
        return jax.jvp(lambda x: autodiff.function_call(Sum(), x), (x,), (2 * x,))

    found = jax.jit(jax.vmap(both, axis_name="i"))(np.arange(4.0))
    close(found, (np.full(4, 6.0), np.full(4, 12.0)))
