"""The butterfly in one TPU kernel: on simulated chips, and compiled for real ones. None of them is needed.

No TPU has run it so far; these tests hold what can be held without: values, races, the barrier in front of it,
and that a program for which it is not made is XLA's.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import merge_across
from energy_attn.distributed.merge._remote import butterfly_p
from energy_attn.distributed.merge._remote_kernel import fits
from energy_attn.kernels import AttentionState, merge_all
from tests.support.compare import close
from tests.support.meshes import batches_psum, mesh_of
from tests.support.remote import MESHES
from tests.support.spawn import spawn

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.full
def test_on_simulated_chips():
    """A state overwritten before it is read, a copy that nobody awaits, a wrong partner, replicas that differ."""
    said = spawn(
        "-m",
        "tests.support.remote",
        devices=8,
        PJRT_NPROC="16",  # threads: with as many as cores, devices wait for one that has none
    )
    assert "RACE" not in said, said
    found = [json.loads(line) for line in said.splitlines()]
    assert len(found) == len(MESHES) + 1
    for each in found:
        assert each["same"], each
        assert each["error"] < 1e-6, each


@pytest.mark.full
@batches_psum
def test_elsewhere_it_is_the_butterfly():
    """A strategy that changes results, derivatives or batches on devices that are no TPUs."""
    rng = np.random.default_rng(0)
    out, lse = jnp.asarray(rng.standard_normal((8, 3, 7, 4))), 3 * rng.standard_normal((8, 3, 7))
    lse[[1, 7]] = -np.inf
    given = AttentionState(out, jnp.asarray(lse))

    def fold(out, lse):
        return merge_across(AttentionState(out, lse), "device", "remote")

    def slope(given):
        batched = jax.vmap(fold, in_axes=(1, 0))
        spread = jax.shard_map(
            lambda out, lse: batched(jnp.moveaxis(out[0], 0, 1), lse[0]),
            in_specs=P("device"),
            out_specs=P(),
        )
        merged = spread(*given)
        return (merged.out**2).sum() + merged.lse.sum(), merged

    with jax.set_mesh(mesh_of("8")):
        assert butterfly_p.name in str(jax.make_jaxpr(slope)(given))
        (_, found), slopes = jax.jit(jax.value_and_grad(slope, has_aux=True))(given)
    exact = merge_all(given)
    close(found, exact)

    def alone(given):
        merged = merge_all(given)
        return (merged.out**2).sum() + merged.lse.sum()

    close(slopes, jax.grad(alone)(given))


def test_what_fits():
    """Devices that a butterfly leaves out, energies that a TPU cannot hold, states that its memory cannot."""

    def takes(rows, devices=8, dtype=jnp.float32):
        def check(lse):
            found.append(fits(AttentionState(jnp.zeros((*lse.shape, 128), dtype), lse), ("x",)))
            return lse

        found = []
        mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
        sharded = jax.shard_map(check, mesh=mesh, in_specs=P(), out_specs=P())
        jax.eval_shape(sharded, jax.ShapeDtypeStruct((rows,), dtype))
        return found[0]

    assert takes(16) and takes(16, 2)
    assert not takes(16, 1) and not takes(16, 6)
    assert not takes(16, dtype=jnp.float64)
    assert not takes(0) and not takes(4096)
