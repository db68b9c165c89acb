"""Attention onto the state of other keys, in parts of the queries: one attention over all keys, in both modes."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels import AttentionState, empty_state, merge
from energy_attn.kernels.internal import attend, attend_and_merge, blockwise, over_keys
from tests.kernels.derivatives import ALL, check_dense
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.problems import (
    BLOCKS,
    PROBLEMS,
    call_of,
    cast,
    cotangents,
    everything,
)
from tests.support.reference import dense, dense_vjp
from tests.support.selection import few_rows
from tests.support.traits import SMALL

# Every option at once; queries that parts of two do not divide.
EVERYTHING = everything("everything in parts", B=2, T=7, S=11)
BLOCKWISE = ("blockwise", EVERYTHING, "float64", ALL)
# Our own kernels in parts of two, with nothing left.
TPU = (SMALL["pallas_tpu"], BLOCKS["blocks_segments"], "float32")
GPU = (SMALL["pallas_gpu"], BLOCKS["blocks_rule"], "float32")
REFERENCE = ("reference", EVERYTHING, "float64")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of a few queries, one of them with what is left."""
    monkeypatch.setattr(over_keys, "PART", 1)
    monkeypatch.setattr(over_keys, "LEAST_PART", 2)


def some_keys(operands, where):
    """The operands with a range of their keys."""

    def cut(x, axis):
        return x if x.shape[axis] == 1 else x[(slice(None),) * axis + (where,)]

    return operands.map_keys(cut)


def union(arrays, problem, kernel):
    """The state of all keys: that of the first, which JAX differentiates, and the others by the kernel onto it."""
    call = call_of(**arrays, **problem.options)
    operands, settings = call.operands.positioned(), call.settings.needing(unrounded=True)
    half = operands.key.shape[1] // 2
    state = attend(("reference",), settings, some_keys(operands, slice(half)))
    others = some_keys(operands, slice(half, None))
    return attend_and_merge(state, (kernel,), settings, others, None)[0]


@pytest.mark.parametrize(
    ("kernel", "problem", "dtype", "parts"),
    [
        pytest.param(*BLOCKWISE, marks=pytest.mark.smoke),
        (*TPU, ("state",)),
        *few_rows([(*x, ALL) for x in (GPU, TPU, REFERENCE)], 0),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_a_union_in_parts(kernel, problem, dtype, parts):
    """A part that is cut at another place than its positions, written to another, or laid out as a whole array; a state
    that is forgotten; a direction that reaches the keys of one of the two states alone.
    """
    run = functools.partial(union, problem=problem, kernel=kernel)
    check_dense(run, problem, dtype, {"float64": 1e-12, "float32": 1e-5}[dtype], parts=parts)


def test_gradients_by_head(monkeypatch):
    """Heads of queries that go with another head of keys; a sum so far that is lost, or counts once for each head."""
    monkeypatch.setattr(blockwise, "LEAST", 0)
    arrays, _ = cast(EVERYTHING, "float64")
    del arrays["source"]
    problem = replace(EVERYTHING, source=None)
    cotangent = AttentionState(*cotangents(problem, "float64"))

    @jax.jit
    def run(arrays, so_far):
        call = call_of(**arrays, **problem.options)
        state = attend(("blockwise",), call.settings, call.operands)
        given = call.operands, call.settings, blockwise.row_cotangents(state, cotangent)
        return [blockwise.backward_by_head(x, *given)[0] for x in (so_far, None)]

    so_far = np.cos(problem.query)
    exact = dense_vjp(problem, *map(np.asarray, cotangent))
    for found, start in zip(run(arrays, array(so_far)), (so_far, 0.0), strict=True):
        mine = {name: getattr(found, name) for name in exact}
        wanted = exact | {"query": exact["query"] + start}
        close(jax.device_get(mine), wanted, "sums", tolerance=1e-12)


def test_what_is_not_finite_in_a_state():
    """A state without keys whose out is read, or a broken one that counts as empty: only minus infinity does.

    And a part of the queries that counts its positions from 0.
    """
    problem = PROBLEMS["causal"]
    arrays, _ = cast(problem, "float64")
    start = AttentionState(np.zeros(problem.query.shape), np.full(problem.query.shape[:3], -np.inf))
    start.out[:, 0], start.out[:, 1] = np.nan, np.inf  # of no keys: anything
    for row, broken in ((2, np.nan), (3, np.inf)):
        start.out[:, row], start.lse[:, row] = 1.0, broken

    @jax.jit
    def run(state, arrays):
        call = call_of(**arrays, is_causal=True)
        return attend_and_merge(state, ("blockwise",), call.settings, call.operands, None)[0]

    found = jax.device_get(run(AttentionState(*map(array, start)), arrays))
    rows = [0, 1, 4, 5, 6]
    close([x[:, rows] for x in found], [x[:, rows] for x in dense(problem)], tolerance=1e-14)
    assert all(np.isnan(x[:, 2:4]).all() for x in found)


def test_memory():
    """States that are stacked, or a kernel's result for all queries at once: as large as the state itself."""
    query, key = jnp.ones((1, 512, 4, 64), jnp.float32), jnp.ones((1, 8, 4, 64), jnp.float32)
    state = empty_state(query.shape)

    def step(state, query, key):
        call = call_of(query, key, key)
        return attend_and_merge(state, ("blockwise",), call.settings, call.operands, None)[0]

    for run, args in (merge, (state, state)), (step, (state, query, key)):
        program = jax.jit(run, donate_argnums=0).lower(*args).compile()
        assert program.memory_analysis().temp_size_in_bytes <= state.out.nbytes / 4
