"""Covariance states over a mesh: equal to the fold on one device, with its derivatives."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import merge_across
from energy_attn.kernels import CovarianceState, merge_all
from tests.support.compare import close
from tests.support.selection import few_rows


def states(devices: int, empty=()) -> CovarianceState:
    rng = np.random.default_rng(devices)
    root = rng.normal(size=(devices, 2, 3, 3))
    out, lse = rng.normal(size=(devices, 2, 3)), rng.normal(size=(devices, 2))
    lse[list(empty)] = -np.inf
    held = np.isfinite(lse)[..., None]
    covariance = (root @ root.swapaxes(-1, -2)) * held[..., None]
    return CovarianceState(covariance, out * held, lse)


def across(merge: str, axes, parts: CovarianceState) -> CovarianceState:
    folded = jax.shard_map(
        lambda state: merge_across(jax.tree.map(lambda x: x[0], state), axes, merge),
        in_specs=P(axes),
        out_specs=P(),
    )
    return folded(parts)


@pytest.mark.parametrize(("merge", "shape"), few_rows([("butterfly", (3, 2)), ("gather", (2, 4))]))
def test_merge_across(merge, shape):
    """A device that folds other states, or a derivative, of first or second order and in either mode, that is not that
    of the law of total covariance."""
    axes = ("x", "y")[: len(shape)]
    devices = int(np.prod(shape))
    parts = states(devices, empty=[1])
    rng = np.random.default_rng(0)
    change = jax.tree.map(lambda x: rng.normal(size=x.shape), parts)
    weights = jax.tree.map(lambda x: rng.normal(size=x.shape[1:]), parts)

    others = merge == "gather"

    def both(fold):
        @jax.jit
        def run(parts, change):
            found, moved = jax.jvp(fold, (parts,), (change,))

            def total(parts):
                pairs = zip(fold(parts), weights, strict=True)
                return sum((x * y).sum() for x, y in pairs)

            def along(parts):
                return jax.jvp(total, (parts,), (change,))[1]

            slope, bent = jax.jvp(jax.grad(total), (parts,), (change,))
            derivatives = {"value": found, "jvp": moved, "vjp": slope, "jvp of vjp": bent}
            return derivatives | ({"vjp of jvp": jax.grad(along)(parts)} if others else {})

        return run(parts, change)

    with jax.set_mesh(Mesh(np.array(jax.devices()[:devices]).reshape(shape), axes)):
        found = both(functools.partial(across, merge, axes))
    close(found, both(merge_all), tolerance=1e-12)


def test_sums_are_refused(unchecked):
    """A merge strategy that would need the mean of all keys before it has it."""
    with jax.set_mesh(Mesh(np.array(jax.devices()), ("x",))):
        with pytest.raises(
            ValueError, match="merge: wanted 'gather', 'butterfly' or 'auto' for .* got 'allreduce'"
        ):
            across("allreduce", ("x",), states(8))
