"""Observables, solvers and penalties of rows with a NaN: none reports a fully masked row or a valid result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.core import shifted_energy
from energy_attn.distributed import SequenceParallel, make_mesh

from ..selection import few
from .measures import measure

BROKEN = 2  # the query whose row is NaN


def arrays():
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.standard_normal((1, n, 2, 4))) for n in (4, 16, 16))
    return query.at[0, BROKEN, 1, 0].set(np.nan), key, value


def observed(query, key, value, parallel):
    """The results of every row, `[1, T, N, ...]`."""
    tangent = jnp.ones_like(query)
    call = query, key, value
    options = {"parallel": parallel}
    with_bias = {"bias": jnp.zeros((1, 1, 1, 16)), **options}
    point = jnp.zeros_like(query)
    few, solving = ea.solvers.Newton(max_steps=4), {"throw": False, **options}
    solutions = {
        "rate": ea.rate(point, *call, solver=few, **solving),
        "conjugate": ea.conjugate(point, *call, regulariser=0.1, solver=few, **solving),
        "map": ea.map_attention(*call, solver=ea.solvers.Newton(max_steps=2), **solving),
    }
    moments = ea.score_moments(*call, **options)
    found = {
        "entropy": ea.entropy(*call, **options),
        "entropy, bias": ea.entropy(*call, **with_bias),
        "heat capacity": moments.variance,
        "sensitivity": ea.temperature_sensitivity(*call, **options),
        "covariance": ea.covariance(*call, **options),
        "product": ea.covariance(*call, tangent=tangent, **options),
        "cumulant": ea.cumulant(*call, tangents=[tangent] * 3, **options),
        **{name: solution.value for name, solution in solutions.items()},
    }
    results = {name: solution.result for name, solution in solutions.items()}
    return found, results, ea.sample_keys(*call, rng=jax.random.key(0), **options)


@pytest.mark.parametrize("spread", few([False, True], True), ids=["alone", "spread"])
def test_observables_and_solvers(spread):
    """An entropy of 0, a rate of `no_keys`: the result of a fully masked row for a broken one."""
    parallel = SequenceParallel("device") if spread else None
    run = jax.jit(lambda *call: observed(*call, parallel))
    with jax.set_mesh(make_mesh((8,), ("device",))):
        found, results, drawn = jax.device_get(run(*arrays()))
    others = np.ones((1, 4, 2), bool)
    others[0, BROKEN, 1] = False
    for name, x in found.items():
        assert np.isnan(x[~others]).all(), name
        assert np.isfinite(x[others]).all(), name
    for name, result in results.items():
        assert (result[~others] == ea.Result.not_finite).all(), name
        assert (result[others] != ea.Result.not_finite).all(), name
    assert (drawn[~others] == -1).all() and (drawn[others] >= 0).all()


def test_retrieval():
    """A state of NaN that converges at once, with an energy of zero."""
    state, memories, _ = arrays()
    solution = ea.retrieve(state, memories, scale=2.0, throw=False)
    assert solution.result[0, BROKEN, 1] == ea.Result.not_finite
    assert np.isnan(solution.value[0, BROKEN, 1])
    assert np.isnan(solution.stats["weight"][0, BROKEN, 1])
    assert np.isnan(solution.stats["effective"][0, BROKEN, 1])
    assert solution.stats["nearest"][0, BROKEN, 1] == -1
    assert int((solution.result == ea.Result.not_finite).sum()) == 1


@pytest.mark.full
def test_penalties_and_reports():
    """A loss that leaves out the rows that are broken stays finite, and its gradient is not."""
    query, key, value = arrays()
    out, energy = ea.attention(query, key, value, return_energy=True)
    assert np.isnan(ea.lse_penalty(energy))
    assert np.isnan(ea.entropy_penalty(ea.entropy(query, key, value), low=1.0))
    report = ea.energy_report(measure(query, key, value))
    assert np.isnan(report.energy[0, 1]) and np.isfinite(report.energy[0, 0])
    assert np.isnan(ea.safe_softmax(jnp.array([1.0, np.nan, -np.inf]))).all()
    assert np.isnan(shifted_energy(jnp.array([1.0, np.inf])).energy)
    assert np.isnan(shifted_energy(jnp.array([1.0, np.nan])).energy)
