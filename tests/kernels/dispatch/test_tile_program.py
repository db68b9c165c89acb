"""The operation that a program is until it is lowered: its types, transforms and platforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from energy_attn import reproducible
from tests.support.compare import close, same

X = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)


@reproducible
def update(x, count, key):
    """An optimiser's step has numbers of all kinds, and a norm."""
    noise = jax.random.uniform(key, x.shape, x.dtype)
    step = x * 3 + jnp.exp(x) / (1 + jnp.sqrt((x * x).sum())) + noise * count.astype(x.dtype)
    return {"step": step, "count": count + 1}


def step(x):
    return update(x, jnp.int32(2), jax.random.key(0))["step"]


def test_transforms():
    """A derivative, or a mapped call, that is another function's."""

    def plain(x):
        noise = jax.random.uniform(jax.random.key(0), x.shape, x.dtype)
        return x * 3 + jnp.exp(x) / (1 + jnp.sqrt((x * x).sum())) + noise * 2

    x, several = jnp.asarray(X), jnp.asarray(X)[None] * jnp.asarray([[[1]], [[2]]], jnp.float32)
    for f in (lambda f: f(x), lambda f: jax.grad(lambda x: jnp.sin(f(x)).sum())(x)):
        close(f(step), f(plain), tolerance=1e-6)
    close(jax.jvp(step, (x,), (x,)), jax.jvp(plain, (x,), (x,)), tolerance=1e-6)
    close(jax.vmap(step)(several), jax.vmap(plain)(several), tolerance=1e-6)
    close(jax.hessian(step)(x[0, :2]), jax.hessian(plain)(x[0, :2]), tolerance=1e-6)
    found = update(x, jnp.int32(2), jax.random.key(0))["count"]
    assert (found, found.dtype) == (3, jnp.int32)


def test_named_axes():
    """A type of a result in a `jax.shard_map` that varies where the function's does not; an axis that is lost."""
    each = reproducible(lambda x, y: (2 * x + 1, x[:1] * y, jax.lax.psum(y, "device")))
    x = jnp.asarray(X)
    mesh = jax.make_mesh((4,), ("device",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("device")), "out_specs": (P(), P("device"), P())}
    with jax.set_mesh(mesh):
        found = jax.jit(jax.shard_map(each, **specs))(x, x)
        run = jax.jit(jax.shard_map(step, in_specs=P("device"), out_specs=P("device")))
        for platform in "tpu", "cuda":  # whose kernels have types of their own
            run.trace(x).lower(lowering_platforms=(platform,))
    close(found, (2 * x + 1, x[:1] * x, x.reshape(4, 2, 6).sum(0)), tolerance=1e-6)
    summed = jax.vmap(reproducible(lambda x: jax.lax.psum(2 * x, "row")), axis_name="row")(x)
    close(summed, jnp.broadcast_to(2 * x.sum(0), x.shape), tolerance=1e-6)


def test_without_jit():
    """A call that has no program of its own."""
    wanted = jax.jit(step)(jnp.asarray(X))
    with jax.disable_jit():
        same(step(jnp.asarray(X)), np.asarray(wanted))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_over_a_mesh(kind):
    """A result whose type is not sharded as its argument's is, or whose bits are others."""
    each = reproducible(lambda x: x * 3 + jnp.exp(x) / 7)
    wanted = each(jnp.asarray(X))
    with jax.set_mesh(jax.make_mesh((4,), ("device",), axis_types=(kind,))):
        x = jax.device_put(X, P("device"))
        found = jax.jit(lambda x: (each(x), each(x) + x))(x)
        same(jax.device_get(found[0]), np.asarray(wanted))
        assert found[0].sharding.is_equivalent_to(x.sharding, 2)


def test_platforms():
    """A program for several platforms that has the rules of one."""
    exported = export.export(jax.jit(step), platforms=["cpu", "tpu"])(jnp.asarray(X))
    assert exported.mlir_module().count("tpu_custom_call") == 4  # a sum, three functions
    same(exported.call(jnp.asarray(X)), np.asarray(jax.jit(step)(jnp.asarray(X))))
    with pytest.raises(NotImplementedError, match="reproducible: wanted a program for CPUs, TPUs"):
        jax.jit(step).trace(jnp.asarray(X)).lower(lowering_platforms=("rocm",))
