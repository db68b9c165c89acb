"""Parts of a row merged by the last program of its tile, interpreted: what is merged, and by which program.

Programs run one after another here, so nothing is shown of the order in which a GPU's programs see each other's parts:
the instructions that ask for it are read in tests/cuda/test_gpu_kernels.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels import GPUPlan, GPUTiles, PallasGPU, local_attention
from energy_attn.kernels.call._arguments import check_call
from energy_attn.kernels.pallas.gpu import _tile
from energy_attn.kernels.pallas.gpu._plan import make_plan
from tests.support.compare import close
from tests.support.problems import Problem, _ints, _make, cast
from tests.support.reference import dense
from tests.support.selection import few
from tests.support.traits import check

# one warp, whose registers hold the parts of eight rows at once: of a tile, in several steps
TILES = GPUTiles("forward", 16, 16, 1, programs=24, least_steps=1, fused_merge=True)
FUSED = PallasGPU(GPUPlan((TILES,)))
BY_KERNEL = PallasGPU(GPUPlan((dataclasses.replace(TILES, fused_merge=False),)))

SPLITS = {"lengths": 6, "tiles": 4, "one_row": 5}
PROBLEMS = [
    # ten of 16 rows idle, six parts, some of them empty, and fully masked rows
    _make("lengths", T=2, S=91, N=6, K=2, key_value_seq_lengths=_ints(40, 0)),
    # several tiles of rows, the last of them ragged; values that a power of two does not hold
    _make("tiles", B=1, T=11, S=50, N=6, K=2, V=18, is_causal=True),
    _make("one_row", B=1, T=1, S=70, N=2, query_positions=_ints([40]), is_causal=True),
]


def plan_of(problem, dtype=jnp.float32, plan=FUSED.plan):
    call = check_call(**cast(problem, dtype)[0], **problem.options)
    return make_plan(call.operands, call.settings, "forward", plan)


@pytest.mark.parametrize("problem", few(PROBLEMS, *PROBLEMS[:2]), ids=str)
def test_against_float64(problem):
    """Parts or rows that are left out, merged twice or stored elsewhere; gradients of another state."""
    plan = plan_of(problem)
    assert plan.fused_merge and plan.splits == SPLITS[problem.name]
    check(FUSED, problem, jnp.float32)


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16"], "bfloat16"))
def test_whichever_is_last(dtype, monkeypatch):
    """The program with the last share of the keys taken for the last one; results rounded otherwise than a kernel's.

    Shares are handed out backwards, so that the last program to run has the first.
    """
    problem = PROBLEMS[0]
    arrays = cast(problem, jnp.dtype(dtype))[0]

    def run(kernel):
        return local_attention(**arrays, **problem.options, implementation=kernel)

    wanted = jax.jit(run, static_argnums=0)(BY_KERNEL)
    program_index = _tile.program_index

    def backwards(plan, *, of_keys):
        at = program_index(plan, of_keys=of_keys)
        return at._replace(split=plan.splits - 1 - at.split)

    monkeypatch.setattr(_tile, "program_index", backwards)
    # equal to no kernel of another test, which would find this one's program
    tiles = dataclasses.replace(TILES, few_keys=True)
    found = jax.jit(run, static_argnums=0)(PallasGPU(GPUPlan((tiles,))))
    close(found, wanted, tolerance=1e-6)


def test_vmap():
    """Calls that become a larger batch, and count in each other's place."""
    arrays = np.random.default_rng(0).standard_normal((3, 3, 1, 2, 70, 2, 5)).astype(np.float32)
    query, key, value = arrays[0, :, :, :, :1], arrays[1], arrays[2]

    def run(*x):
        return local_attention(*x, implementation=FUSED)

    found = jax.jit(jax.vmap(jax.vmap(run)))(query, key, value)
    flat = (x.reshape(6, *x.shape[3:]).astype(np.float64) for x in (query, key, value))
    wanted = dense(Problem("vmap", *flat))
    close(found, [x.reshape(3, 1, 2, *x.shape[1:]) for x in wanted], tolerance=2e-6)
