"""Observables, solvers and penalties of rows with a NaN: none reports a fully masked row or a valid result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.functional import shifted_energy
from energy_attn.solvers import Newton
from tests.support.observables import measure
from tests.support.selection import few_rows

BROKEN = 2  # the query whose row is NaN


def arrays():
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.standard_normal((1, n, 2, 4))) for n in (4, 16, 16))
    return query.at[0, BROKEN, 1, 0].set(np.nan), key, value


def observed(query, key, value, parallel):
    """The observables of every row, `[1, T, N, ...]`, and draws, with what they are of a broken row."""
    tangent = jnp.ones_like(query)
    F = measure(query, key, value, parallel=parallel)
    with_bias = measure(query, key, value, parallel=parallel, bias=jnp.zeros((1, 1, 1, 16)))
    found = {
        "entropy": F.entropy(),
        "entropy, bias": with_bias.entropy(),
        "sensitivity": F.temperature_sensitivity(),
        "covariance": F.covariance(),
        "cumulant": F.cumulant([tangent] * 3),
    }
    return found, {"drawn": (-1, F.sample(key=jax.random.key(0)))}


def solved(query, key, value, parallel):
    """The values and results of solvers, with what these are of a broken row."""
    F = measure(query, key, value, parallel=parallel)
    point, options = jnp.zeros_like(query), {"solver": Newton(max_steps=4), "throw": False}
    solutions = {
        "rate": F.rate(point, **options),
        "conjugate": F.conjugate(point, regulariser=0.1, **options),
        "map": F.map(solver=Newton(max_steps=2), throw=False),
    }
    values = {name: solution.value for name, solution in solutions.items()}
    return values, {name: (ea.Result.not_finite, x.result) for name, x in solutions.items()}


@pytest.mark.parametrize(
    ("ask", "spread"),
    few_rows([(observed, False), (observed, True), (solved, False), (solved, True)]),
)
def test_rows(ask, spread):
    """An entropy of 0, a rate of `no_keys` or a key that is drawn, as of a fully masked row, for a broken one."""
    parallel = SequenceParallel("device") if spread else None
    with jax.set_mesh(make_mesh((8,), ("device",))):
        found, rest = jax.device_get(jax.jit(lambda *call: ask(*call, parallel))(*arrays()))
    others = np.ones((1, 4, 2), bool)
    others[0, BROKEN, 1] = False
    for name, x in found.items():
        assert np.isnan(x[~others]).all(), name
        assert np.isfinite(x[others]).all(), name
    for broken, x in rest.values():
        assert (x[~others] == broken).all() and (x[others] != broken).all()


@pytest.mark.full
def test_retrieval():
    """A state of NaN that converges at once, with an energy of zero."""
    state, memories, _ = arrays()
    solution = ea.hopfield.retrieve(state, memories, scale=2.0, throw=False)
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
    assert np.isnan(ea.entropy_penalty(measure(query, key, value).entropy(), low=1.0))
    report = ea.energy_report(measure(query, key, value))
    assert np.isnan(report.energy[0, 1]) and np.isfinite(report.energy[0, 0])
    assert np.isnan(ea.safe_softmax(jnp.array([1.0, np.nan, -np.inf]))).all()
    assert np.isnan(shifted_energy(jnp.array([1.0, np.inf])).energy)
    assert np.isnan(shifted_energy(jnp.array([1.0, np.nan])).energy)
