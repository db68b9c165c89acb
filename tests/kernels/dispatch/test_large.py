"""Scores as large as floats go: what rounding makes of their differences, and takes from the sum of weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from energy_attn.kernels import AttentionState, local_attention, scores
from energy_attn.kernels.internal import Canonical
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.problems import Problem, cast, cotangents, tangents
from tests.support.random_masks import places, rules, seen
from tests.support.reference import dense, dense_jvp, dense_vjp
from tests.support.traits import RUNNABLE, SMALL

# From 5e9 on a float32 exponential can not take the difference of two numbers next to each other.
SIZES = (1.0, 1e6, 1e11, 1e30)
CANONICAL = pytest.param(Canonical(), id="canonical")
SCALE = float(np.float32(0.7310234))


def problem_of(size, scale, tokens=(4, 9), seed=0, dtype=jnp.float32):
    """Products of integers and a power of two are exact; with the scale they are not. Some keys are equal."""
    rng, (queries, keys) = np.random.default_rng(seed), tokens
    shapes = (2, queries, 8, 8), (2, keys, 4, 8), (2, keys, 4, 6)
    query, key, value = (rng.integers(-3, 4, shape).astype(float) for shape in shapes)
    key[:, 5:9] = key[:, :4]
    query *= 2.0 ** np.round(np.log2(size))
    return cast(Problem("large", query, key, value, scale=scale), dtype)


def in_units(found, exact):
    """Numbers in units of the largest that is wanted: energies and gradients are as large as scores."""
    units = {name: np.max(np.abs(x), initial=1, where=np.isfinite(x)) for name, x in exact.items()}
    return (
        {name: np.asarray(x[name], float) / y for name, y in units.items()} for x in (found, exact)
    )


def state(out, lse):
    return {"out": out, "lse": lse}


@pytest.mark.parametrize("how", ["scale", "negative", "score", "bfloat16"])
@pytest.mark.parametrize("name", [*(x for x in RUNNABLE if x != "mosaic_gpu"), CANONICAL])
def test_states(name, how):
    """A visible key that counts as none, or NaN: a fused product less a maximum of rounded ones."""
    scale = -SCALE if how == "negative" else SCALE
    options = {"scale": scale}
    if how == "score":
        options = {"scale": 1.0, "score": scores.Temperature(array(np.full(8, SCALE), np.float32))}
    run = jax.jit(lambda arrays: local_attention(**arrays, **options, implementation=name))
    for size in SIZES:
        dtype = jnp.bfloat16 if how == "bfloat16" else jnp.float32
        arrays, problem = problem_of(size, scale, dtype=dtype)
        found, exact = run(arrays)._asdict(), state(*dense(problem))
        tolerance = {"out": 4 * float(jnp.finfo(dtype).eps), "lse": 1e-6}
        for of in exact:
            x, y = in_units({of: found[of]}, {of: exact[of]})
            close(x, y, f"{size}", tolerance=tolerance[of])


@pytest.mark.parametrize("name", [*(x for x in RUNNABLE if x != "mosaic_gpu"), CANONICAL])
def test_overflow(name):
    """A product that is finite and whose score is not: an energy of infinity beside an output that looks right."""
    shapes = (2, 4, 8, 8), (2, 9, 4, 8), (2, 9, 4, 6)
    query, key, value = (array(np.full(shape, 1e18), np.float32) for shape in shapes)
    found = local_attention(query, key, value, scale=1e3, implementation=name)
    assert np.isnan(found.out).all() and np.isnan(found.lse).all()


@pytest.mark.parametrize("lengths", [None, (7, 0)], ids=["whole", "ragged"])
@pytest.mark.parametrize("name", ["blockwise", "decode", "decode_cpu", "reference", CANONICAL])
def test_derivatives(name, lengths):
    """Weights that do not sum to 1 as the logarithm of their sum is rounded; or those of another product's scores."""

    options = {"scale": SCALE}
    if lengths is not None:
        options["key_value_seq_lengths"] = array(np.array(lengths), np.int32)

    @jax.jit
    def run(arrays, directions, *cotangent):
        def attend(arrays):
            return local_attention(**arrays, **options, implementation=name)

        state, back = jax.vjp(attend, arrays)
        moved = jax.jvp(attend, (arrays,), (directions,))[1]
        return back(AttentionState(*cotangent))[0], moved._asdict()

    for size in SIZES:
        arrays, problem = problem_of(size, SCALE)
        if lengths is not None:
            problem = dataclasses.replace(problem, key_value_seq_lengths=np.array(lengths))
        along = tangents(dataclasses.replace(problem, query=problem.query / size))
        directions = {name: array(x, np.float32) for name, x in along.items()}
        cotangent = cotangents(problem, jnp.float32)
        gradients, moved = run(arrays, directions, *cotangent)
        close(*in_units(gradients, dense_vjp(problem, *cotangent)), f"{size}", tolerance=1e-5)
        exact = state(*dense_jvp(problem, {k: np.asarray(x, float) for k, x in directions.items()}))
        close(*in_units(moved, exact), f"{size}", tolerance=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", ["blockwise", "reference", "pallas_gpu", "pallas_tpu"])
@given(
    rule=rules,
    tokens=st.tuples(places, places),
    size=st.sampled_from(SIZES),
    huge=st.sampled_from([1.0, 2.0**120]),
    far=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(max_examples=15, phases=[Phase.generate])
def test_any(name, rule, tokens, size, huge, far, seed):
    """The same of random masks, tokens and numbers, with values as large as a sum of as many allows, and far ids."""
    kernel = SMALL.get(name, name)
    arrays, problem = problem_of(size, SCALE, tuple(map(len, tokens)), seed)
    problem = dataclasses.replace(
        problem, value=problem.value * huge, mask=seen(rule, *tokens)[None, None]
    )
    arrays["value"] *= huge
    positions = (array(np.asarray(x)[None], np.int32) for x in tokens)
    options = dict(zip(("query_positions", "key_positions"), positions, strict=True))
    if far and not name.startswith("pallas"):  # which 32 bits do not tell apart
        ids = 1 + 2**32 * np.random.default_rng(seed).integers(0, 2, (2, 1, len(tokens[0])))
        options |= dict(zip(("query_segment_ids", "key_segment_ids"), ids, strict=True))
        problem = dataclasses.replace(
            problem, mask=problem.mask & (ids[0, :, :, None] == ids[1, :, None])[:, None]
        )

    @jax.jit
    def run(arrays, options):
        return local_attention(**arrays, **options, mask=rule, scale=SCALE, implementation=kernel)

    found = run(arrays, options)
    exact = state(*dense(problem))
    close(*in_units(found._asdict(), exact), f"{rule}, {size}", tolerance=2e-6)
