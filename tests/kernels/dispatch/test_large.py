"""Scores as large as floats go: what rounding makes of their differences, and takes from the sum of weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels import AttentionState, local_attention, scores
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.problems import Problem, cast, cotangents, tangents
from tests.support.reference import dense, dense_jvp, dense_vjp
from tests.support.traits import RUNNABLE

# From 5e9 on a float32 exponential can not take the difference of two numbers next to each other.
SIZES = (1.0, 1e6, 1e11, 1e30)
SCALE = float(np.float32(0.7310234))


def problem_of(size, scale):
    """Products of integers and a power of two are exact; with the scale they are not. Some keys are equal."""
    rng = np.random.default_rng(0)
    shapes = (1, 4, 8, 8), (1, 9, 4, 8), (1, 9, 4, 6)
    query, key, value = (rng.integers(-3, 4, shape).astype(float) for shape in shapes)
    key[:, 5:] = key[:, :4]
    query *= 2.0 ** np.round(np.log2(size))
    return cast(Problem("large", query, key, value, scale=scale), jnp.float32)


def in_units(found, exact):
    """Numbers in units of the largest that is wanted: energies and gradients are as large as scores."""
    units = {name: max(np.abs(x).max(), 1.0) for name, x in exact.items()}
    return (
        {name: np.asarray(x[name], float) / y for name, y in units.items()} for x in (found, exact)
    )


def state(out, lse):
    return {"out": out, "lse": lse}


@pytest.mark.parametrize("given", ["scale", "negative", "score"])
@pytest.mark.parametrize("name", [x for x in RUNNABLE if x != "mosaic_gpu"])
def test_states(name, given):
    """A visible key that counts as none, or NaN: a fused product less a maximum of rounded ones."""
    scale = -SCALE if given == "negative" else SCALE
    options = {"scale": scale}
    if given == "score":
        options = {"scale": 1.0, "score": scores.Temperature(array(np.full(8, SCALE), np.float32))}
    run = jax.jit(lambda arrays: local_attention(**arrays, **options, implementation=name))
    for size in SIZES:
        arrays, problem = problem_of(size, scale)
        found, exact = run(arrays)._asdict(), state(*dense(problem))
        close(*in_units(found, exact), f"{size}", tolerance=1e-6)


@pytest.mark.parametrize("name", ["blockwise", "decode", "decode_cpu", "reference"])
def test_derivatives(name):
    """Weights that do not sum to 1 as the logarithm of their sum is rounded; or those of another product's scores."""

    @jax.jit
    def run(arrays, directions, *cotangent):
        def attend(arrays):
            return local_attention(**arrays, scale=SCALE, implementation=name)

        state, back = jax.vjp(attend, arrays)
        moved = jax.jvp(attend, (arrays,), (directions,))[1]
        return back(AttentionState(*cotangent))[0], moved._asdict()

    for size in SIZES:
        arrays, problem = problem_of(size, SCALE)
        along = tangents(dataclasses.replace(problem, query=problem.query / size))
        directions = {name: array(x, np.float32) for name, x in along.items()}
        given = cotangents(problem, jnp.float32)
        gradients, moved = run(arrays, directions, *given)
        close(*in_units(gradients, dense_vjp(problem, *given)), f"{size}", tolerance=1e-5)
        exact = state(*dense_jvp(problem, {k: np.asarray(x, float) for k, x in directions.items()}))
        close(*in_units(moved, exact), f"{size}", tolerance=1e-5)
