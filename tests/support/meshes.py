"""The meshes of these tests: eight devices in a row and as 2 × 4, with axes left to the compiler or part of types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.distributed.internal import STRATEGIES
from energy_attn.kernels.dispatch import _attend_and_merge
from energy_attn.kernels.xla import _blockwise
from tests.support.compare import close
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
    monkeypatch.setattr(_attend_and_merge, "PART", 1)
    monkeypatch.setattr(_attend_and_merge, "LEAST_PART", 1)
    monkeypatch.setattr(_blockwise, "LEAST", 0)


def parallel_of(kind: str) -> SequenceParallel:
    return SequenceParallel(SHAPES[kind.split()[0]][1])


def merges_for(axes: int) -> list[str]:
    """The merge strategies that a mesh with so many axes is enough for."""
    return [name for name, strategy in STRATEGIES.items() if strategy.least_axes <= axes]


def on_host(problem: Problem):
    """Arrays and cotangents in float64, of NumPy: to cut JAX's own for a mesh takes a program for each shape."""
    return problem.arrays, tuple(map(np.asarray, cotangents(problem, jnp.float64)))


def check(found, problem: Problem):
    """`((out, energy), gradients)` in float64, for the problem's cotangents."""
    state, gradients = found
    close(state, dense(problem), f"{problem}: state")
    close(gradients, dense_vjp(problem, *on_host(problem)[1]), f"{problem}: gradient")
