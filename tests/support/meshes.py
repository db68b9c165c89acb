"""The meshes of these tests: eight devices in a row and as 2 × 4, with axes left to the compiler or part of types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.distributed.merge._strategies import STRATEGIES
from energy_attn.kernels.dispatch import _onto
from energy_attn.kernels.xla import _by_head
from tests.support.problems import Problem, cotangents
from tests.support.reference import dense, dense_vjp

# A bug of jax 0.8: `vmap` of any `shard_map` with a psum in it fails.
batches_psum = pytest.mark.skipif(
    jax.__version_info__ < (0, 9), reason="jax 0.8 cannot batch a psum"
)
SHAPES = {"8": ((8,), ("device",)), "2x4": ((2, 4), ("node", "device"))}


def mesh_of(kind: str) -> Mesh:
    """`"8"`, `"2x4"`, and the same with ` explicit` behind."""
    shape, names = SHAPES[kind.split()[0]]
    return make_mesh(shape, names, explicit=kind.endswith("explicit"))


def in_parts(monkeypatch) -> None:
    """Makes rings compute a query at a time, and gradients of a head at a time, as they do where these are large."""
    monkeypatch.setattr(_onto, "PART", 1)
    monkeypatch.setattr(_onto, "LEAST_PART", 1)
    monkeypatch.setattr(_by_head, "LEAST", 0)


def parallel_of(kind: str) -> SequenceParallel:
    return SequenceParallel(SHAPES[kind.split()[0]][1])


def merges_for(axes: int) -> list[str]:
    """The merge strategies that a mesh with so many axes is enough for."""
    return [name for name, strategy in STRATEGIES.items() if strategy.least_axes <= axes]


def close(actual, exact, what="", tolerance=1e-11):
    """Float64 against float64, relative to the largest entry; infinities in the same places."""
    actual, exact = np.asarray(jax.device_get(actual)), np.asarray(exact, np.float64)
    assert actual.dtype == np.float64 and actual.shape == exact.shape, what
    scale = np.max(np.abs(exact), initial=1.0, where=np.isfinite(exact))
    np.testing.assert_allclose(actual, exact, rtol=0, atol=tolerance * scale, err_msg=what)


def check(found, problem: Problem):
    """`((out, energy), gradients)` in float64, for the problem's cotangents."""
    (out, energy), gradients = found
    given = cotangents(problem, jnp.float64)
    close(out, dense(problem)[0], "attention")
    close(energy, dense(problem)[1], "energy")
    for name, exact in dense_vjp(problem, *map(np.asarray, given)).items():
        close(gradients[name], exact, name)
