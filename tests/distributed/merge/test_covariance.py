"""Covariance states over a mesh: equal to the fold on one device, with its derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import merge_across
from energy_attn.kernels import CovarianceState, merge_all
from tests.support.selection import few_rows


def states(devices: int, empty=()) -> CovarianceState:
    rng = np.random.default_rng(devices)
    root = rng.normal(size=(devices, 2, 3, 3))
    out, lse = rng.normal(size=(devices, 2, 3)), rng.normal(size=(devices, 2))
    lse[list(empty)] = -np.inf
    held = np.isfinite(lse)[..., None]
    covariance = (root @ root.swapaxes(-1, -2)) * held[..., None]
    return CovarianceState(*map(jnp.asarray, (covariance, out * held, lse)))


def across(merge: str, axes, parts: CovarianceState) -> CovarianceState:
    folded = jax.shard_map(
        lambda state: merge_across(jax.tree.map(lambda x: x[0], state), axes, merge),
        in_specs=P(axes),
        out_specs=P(),
    )
    return folded(parts)


@pytest.mark.parametrize(
    ("merge", "shape"), few_rows([("gather", (2, 4)), ("butterfly", (3, 2)), ("auto", (8,))], 2)
)
def test_merge_across(merge, shape):
    """A device that folds other states, or a derivative, of first or second order and in either mode, that is not that
    of the law of total covariance."""
    axes = ("x", "y")[: len(shape)]
    devices = int(np.prod(shape))
    parts = states(devices, empty=[1])
    rng = np.random.default_rng(0)
    change = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), parts)
    weights = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape[1:])), parts)

    def both(fold):
        @jax.jit
        def run(parts, change):
            found, moved = jax.jvp(fold, (parts,), (change,))

            def along(parts):
                return jax.jvp(fold, (parts,), (change,))[1].covariance

            def total(parts):
                pairs = zip(fold(parts), weights, strict=True)
                return sum((x * y).sum() for x, y in pairs)

            slope = jax.grad(total)
            bent = jax.jvp(slope, (parts,), (change,))[1], jax.vjp(slope, parts)[1](change)[0]
            return found, moved, slope(parts), *bent, jax.grad(lambda x: along(x).sum())(parts)

        return run(parts, change)

    with jax.set_mesh(Mesh(np.array(jax.devices()[:devices]).reshape(shape), axes)):
        found = both(functools.partial(across, merge, axes))
    expected = both(merge_all)
    whats = "value", "jvp", "vjp", "jvp of vjp", "vjp of vjp", "vjp of jvp"
    for what, a, b in zip(whats, found, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12, err_msg=what)


def test_sums_are_refused(unchecked):
    """A merge strategy that would need the mean of all keys before it has it."""
    with jax.set_mesh(Mesh(np.array(jax.devices()), ("x",))):
        with pytest.raises(
            ValueError, match="merge: wanted 'gather', 'butterfly' or 'auto' for .* got 'allreduce'"
        ):
            across("allreduce", ("x",), states(8))
