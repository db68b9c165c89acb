"""Rényi's entropies: sums of powers of the weights, which no mean of parts' own sums is."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import SequenceParallel
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.observables import measure, slopes
from tests.support.problems import PROBLEMS, cast, tangents
from tests.support.reference import rows
from tests.support.scores import sink_of, with_key
from tests.support.selection import few_rows

ORDERS = (0, 0.5, 1, 2, 7.5, math.inf)


def exact(problem, order, precision=np.float64):
    """By the weights themselves, `[B, T, N]`; zero in a fully masked row."""
    weights = rows(problem, precision).weights.transpose(0, 2, 1, 3)
    seen = weights > 0
    logs = np.log(np.where(seen, weights, 1))
    if order == 1:
        return -(weights * logs).sum(-1)
    if order == math.inf:
        most = np.max(logs, -1, where=seen, initial=-np.inf)
        return np.where(seen.any(-1), -most, 0)
    powers = np.where(seen, np.exp(order * logs), 0).sum(-1)
    return np.log(np.where(powers > 0, powers, 1)) / (1 - order)


def asked(F):
    return {str(order): F.renyi(order) for order in ORDERS}


@pytest.mark.parametrize(
    ("name", "sunk"),
    few_rows(
        [("grouped", True), ("mask_nothing", False), ("everything", True), ("no_keys", True)], 2
    ),
)
def test_values(name, sunk):
    """An order that is another's, a hidden key that is counted at order 0, a sink that is none of the outcomes."""
    problem = PROBLEMS[name]
    sink = sink_of(problem) if sunk else None
    given = None if sink is None else jnp.asarray(sink)
    run = jax.jit(lambda arrays: asked(measure(**arrays, **problem.options, sink=given)))
    whole = problem if sink is None else with_key(problem, sink)
    wanted = {str(order): exact(whole, order) for order in ORDERS}
    close(run(cast(problem, jnp.float64)[0]), wanted)


def test_union():
    """The sums of two parts, each with weights of its own keys, averaged by their shares: wrong by a fifth."""
    problem = PROBLEMS["grouped"]

    @jax.jit
    def run(query, key, value):
        energy = ea.FreeEnergy()
        return asked(
            energy.at(query, key[:, :3], value[:, :3]) | energy.at(query, key[:, 3:], value[:, 3:])
        )

    close(run(**problem.arrays), {str(order): exact(problem, order) for order in ORDERS})


def test_over_devices():
    """The same of devices; and the gradient."""
    problem = replace(PROBLEMS["everything"], source=None)
    arrays, _ = cast(problem, jnp.float64)

    def run(arrays):
        F = measure(**arrays, **problem.options, parallel=SequenceParallel("device"))
        return (F.renyi(2) ** 2).sum(), F.renyi(2)

    with jax.set_mesh(mesh_of("8")):
        gradients, found = jax.device_get(jax.jit(jax.grad(run, has_aux=True))(arrays))
    close(found, exact(problem, 2))
    along = tangents(problem)
    rate = sum(np.vdot(gradients[name], along[name]) for name in gradients)
    loss = slopes(lambda x: (exact(x, 2, np.longdouble) ** 2).sum(), problem, along)
    np.testing.assert_allclose(rate, loss, rtol=1e-9)
