"""Functions and linear maps with derivatives of their own, by themselves: orders, modes, loops and mapped axes."""

import dataclasses
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
def test_a_function_in_a_loop():
    """A second derivative of a loop that is zero, or that of something else, and no error: that of JAX 0.10."""

    def looped(x):
        return lax.scan(lambda x, _: (sine(x), None), x, None, length=3)[0]

    def exact(x):
        return 2 * jnp.sin(2 * jnp.sin(2 * jnp.sin(x)))

    def pushed(f):
        return lambda x: jax.jvp(f, (x,), (1.0,))[1]

    orders = [(), (jax.grad,), (pushed,)]
    orders += [(a, b) for a in (jax.grad, pushed) for b in (jax.grad, pushed)]
    orders += [(jax.grad,) * 3]

    def derivatives(f, x):
        return [functools.reduce(lambda f, step: step(f), order, f)(x) for order in orders]

    found, wanted = jax.jit(lambda x: [derivatives(f, x) for f in (looped, exact)])(0.3)
    close(found, wanted, tolerance=1e-12)


def test_functions_of_many():
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


@dataclasses.dataclass(frozen=True)
class Mixed(autodiff.AbstractLinearMap):
    """`sin(x) u + x² w`, of which JAX could differentiate `plain` alone."""

    def apply(self, fixed, moving):
        return lax.stop_gradient(self.plain(fixed, moving))

    def plain(self, fixed, moving):
        factors = jnp.sin(fixed), jnp.square(fixed)
        return sum(f * x for f, x in zip(factors, moving, strict=True) if x is not None)

    def transpose(self, fixed, moving, cotangent):
        return autodiff.linear_call(Both(tuple(x is not None for x in moving)), fixed, cotangent)


@dataclasses.dataclass(frozen=True)
class Both(autodiff.AbstractLinearMap):
    """The transpose of `Mixed`."""

    moved: tuple[bool, bool]

    def apply(self, fixed, moving):
        return lax.stop_gradient(self.plain(fixed, moving))

    def plain(self, fixed, moving):
        found = jnp.sin(fixed) * moving, jnp.square(fixed) * moving
        return tuple(x if some else None for x, some in zip(found, self.moved, strict=True))

    def transpose(self, fixed, moving, cotangent):
        return autodiff.linear_call(Mixed(), fixed, cotangent)


def mine(x, u, w):
    return autodiff.linear_call(Mixed(), x, (u, w))


def exact(x, u, w):
    return jnp.sin(x) * u + x**2 * w


X, U, W = np.random.default_rng(0).standard_normal((3, 3))
ALL = (0, 1, 2)


def total(f):
    """A sum that is not linear in the result, so that what is fixed and what moves change together."""
    return lambda *args: jnp.cos(f(*args)).sum()


def along(f):
    return lambda *args: jax.jvp(f, args, (W, X, U))[1]


def looped(f):
    def step(x, _):
        return f(x, U, x), None

    return lambda x, u, w: lax.scan(jax.checkpoint(step), x * u + w, None, length=3)[0]


COMPOSITIONS = {
    "itself": lambda f: f,
    "jvp": along,
    "one direction": lambda f: lambda x, u, w: jax.jvp(lambda w: f(x, u, w), (w,), (u,))[1],
    "linearize": lambda f: lambda *args: jax.linearize(f, *args)[1](W, X, U),
    "grad": lambda f: jax.grad(total(f), ALL),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(total(f), ALL), ALL),
    "forward over reverse": lambda f: jax.jacfwd(jax.grad(total(f), ALL), ALL),
    "reverse over forward": lambda f: jax.grad(total(along(f)), ALL),
    "forward over forward": lambda f: along(along(f)),
    "third": lambda f: jax.grad(total(along(along(f))), ALL),
    "loop": lambda f: jax.jacrev(jax.grad(total(looped(f)), ALL), ALL),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions(name):
    """What changes of the map or of its argument, left out; a rule of another order; a rule that a loop loses."""
    both = jax.jit(lambda *args: [COMPOSITIONS[name](f)(*args) for f in (mine, exact)])
    close(*both(X, U, W), name, tolerance=1e-12)


@pytest.mark.parametrize("axes", [(0, None, 1), (None, 1, None), (0, 0, 0)])
def test_of_many(axes):
    """A cotangent of what all indices share that is one index's; axes of results or of arguments exchanged."""
    pairs = zip((X, U, W), axes, strict=True)
    args = [x if i is None else np.stack([x, 2 * x, x - 1], i) for x, i in pairs]

    def both(f, *args):
        mapped = jax.vmap(f, in_axes=axes)
        twice = jax.vmap(mapped, in_axes=(None, None, 0))
        return (
            mapped(*args),
            jax.grad(total(mapped), ALL)(*args),
            jax.grad(total(mapped), (1, 2))(*args),  # by the transpose alone
            jax.vmap(jax.grad(total(f), ALL), in_axes=axes)(*args),
            jax.jvp(lambda w: mapped(*args[:2], w), args[2:], args[2:])[1],  # one direction
            jax.grad(total(twice), ALL)(*args[:2], jnp.stack([args[2], -args[2]])),
            jax.jvp(jax.grad(total(mapped), ALL), tuple(args), tuple(args))[1],
        )

    close(*jax.jit(lambda *args: [both(f, *args) for f in (mine, exact)])(*args), tolerance=1e-12)
