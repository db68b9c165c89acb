"""Attention onto the state of other keys, in parts of the queries: one attention over all keys, in both modes."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels import AttentionState, empty_state, local_attention, merge
from energy_attn.kernels.call._arguments import check_call
from energy_attn.kernels.call._operands import positioned, with_wide_out
from energy_attn.kernels.dispatch import _onto
from energy_attn.kernels.dispatch._onto import attend_onto
from energy_attn.kernels.dispatch._registry import attend
from energy_attn.kernels.xla import _by_head
from energy_attn.kernels.xla._by_head import backward_onto
from tests.support.naive import assert_all_close, assert_close, naive
from tests.support.problems import BLOCKS, cast, cotangents, everything, tangents
from tests.support.reference import dense_jvp, dense_vjp, visible
from tests.support.traits import SMALL

# Every option at once; queries that parts of two do not divide.
EVERYTHING = everything("everything in parts", B=2, T=7, S=11)
CASES = [
    ("reference", EVERYTHING, "float64"),
    ("blockwise", EVERYTHING, "float64"),
    (SMALL["pallas_tpu"], BLOCKS["blocks_predicates"], "float32"),
    (SMALL["pallas_gpu"], BLOCKS["blocks_rule"], "float32"),
]
cases = pytest.mark.parametrize(
    ("kernel", "problem", "dtype"), CASES, ids=lambda x: getattr(x, "name", x)
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of a few queries, one of them with what is left."""
    monkeypatch.setattr(_onto, "PART", 1)
    monkeypatch.setattr(_onto, "LEAST_PART", 2)


def some_keys(operands, where):
    """The operands with a range of their keys."""

    def cut(x, axis):
        return x if x is None or x.shape[axis] == 1 else x[(slice(None),) * axis + (where,)]

    names = "key", "value", "key_positions", "key_segments"
    parts = {name: cut(getattr(operands, name), 1) for name in names}
    return operands._replace(**parts, bias=cut(operands.bias, 3), mask=cut(operands.mask, 3))


def union(arrays, problem, kernel):
    """The state of all keys: that of the first, and the others onto it."""
    call = check_call(**arrays, **problem.options)
    operands, settings = positioned(call.operands), with_wide_out(call.settings)
    half = operands.key.shape[1] // 2
    state = attend([kernel], settings, some_keys(operands, slice(half)))
    return attend_onto(state, [kernel], settings, some_keys(operands, slice(half, None)), None)[0]


@cases
def test_a_union_in_parts(kernel, problem, dtype):
    """A part that is cut at another place than its positions, or written to another; a state that is forgotten."""
    problem = problem if dtype == "float64" else cast(problem, dtype)[1]
    arrays, _ = cast(problem, dtype)

    @jax.jit
    def run(arrays, cotangent):
        state, back = jax.vjp(lambda arrays: union(arrays, problem, kernel), arrays)
        return state._asdict() | back(cotangent)[0]

    given = AttentionState(*cotangents(problem, dtype))
    assert_all_close(run(arrays, given), problem, jnp.dtype(dtype), "both", label="in parts")


@cases
def test_forward_mode(kernel, problem, dtype):
    """A direction that reaches the keys of one of the two states alone."""
    arrays, rounded = cast(problem, dtype)
    along = {name: jnp.asarray(x, dtype) for name, x in tangents(problem).items()}
    exact = dense_jvp(rounded, {name: np.asarray(x, np.float64) for name, x in along.items()})
    scale = problem.query.shape[-1] ** -0.5 if problem.scale is None else problem.scale
    plain = functools.partial(naive, mask=jnp.asarray(visible(problem)), scale=scale)
    rough = jax.jit(functools.partial(jax.jvp, plain))((arrays,), (along,))[1]
    found = jax.jit(
        lambda arrays, along: jax.jvp(
            lambda arrays: union(arrays, problem, kernel), (arrays,), (along,)
        )[1]
    )(arrays, along)
    for name, mine, right, theirs in zip(("out", "lse"), found, exact, rough, strict=True):
        assert_close(mine, right, theirs, magnitude=4.0, what=name)


def test_gradients_by_head(monkeypatch):
    """Heads of queries that go with another head of keys; a sum so far that is lost, or counts once for each head."""
    monkeypatch.setattr(_by_head, "LEAST", 0)
    arrays, _ = cast(EVERYTHING, "float64")
    del arrays["source"]
    problem = replace(EVERYTHING, source=None)
    cotangent = AttentionState(*cotangents(problem, "float64"))

    @jax.jit
    def run(arrays, so_far):
        call = check_call(**arrays, **problem.options)
        state = attend(["blockwise"], call.settings, call.operands)
        given = call.operands, call.settings, state, cotangent
        return [backward_onto(x, *given)[0] for x in (so_far, None)]

    so_far = jnp.cos(arrays["query"])
    exact = dense_vjp(problem, *map(np.asarray, cotangent))
    for found, start in zip(run(arrays, so_far), (so_far, 0.0), strict=True):
        for name, right in exact.items():
            mine = getattr(found, name) - (start if name == "query" else 0.0)
            np.testing.assert_allclose(mine, right, rtol=0, atol=1e-12, err_msg=name)


def test_what_is_not_finite_in_a_state():
    """A state without keys whose out is read, or a broken one that counts as empty: only minus infinity does."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.standard_normal((1, 5, 2, 3))) for _ in range(3))
    call = check_call(query, key, value)
    start = AttentionState(*map(np.array, empty_state(query.shape, query.dtype)))
    start.out[0, 0], start.out[0, 1] = np.nan, np.inf  # of no keys: anything
    for row, broken in ((2, np.nan), (3, np.inf)):
        start.out[0, row], start.lse[0, row] = 1.0, broken
    run = functools.partial(attend_onto, names=["blockwise"], settings=call.settings, arriving=None)
    found, _ = jax.jit(run)(jax.tree.map(jnp.asarray, start), operands=call.operands)
    alone = local_attention(query, key, value, implementation="blockwise")
    for mine, theirs in zip(found, alone, strict=True):
        np.testing.assert_allclose(mine[:, [0, 1, 4]], theirs[:, [0, 1, 4]], rtol=0, atol=1e-14)
        assert np.isnan(mine[:, 2:4]).all()


def test_memory():
    """States that are stacked, or a kernel's result for all queries at once: as large as the state itself."""
    query, key = jnp.ones((1, 512, 4, 64), jnp.float32), jnp.ones((1, 8, 4, 64), jnp.float32)
    state = empty_state(query.shape)

    def step(state, query, key):
        call = check_call(query, key, key)
        return attend_onto(state, ["blockwise"], call.settings, call.operands, None)[0]

    for run, args in (merge, (state, state)), (step, (state, query, key)):
        program = jax.jit(run, donate_argnums=0).lower(*args).compile()
        assert program.memory_analysis().temp_size_in_bytes <= state.out.nbytes / 4
