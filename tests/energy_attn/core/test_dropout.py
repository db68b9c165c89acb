"""Dropout where scores are large: a weight is a share of all weights, and no difference of two rounded energies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import SequenceParallel
from tests.support.compare import close
from tests.support.meshes import mesh_of

LEVEL, CHANCE = 102400.0, 0.5
EPSILON = float(np.finfo(np.float32).eps)


def exact_inputs():
    """Arrays whose scores float32 holds exactly, with the level on top."""
    random = np.random.default_rng(0)
    q, k = (random.integers(-6, 7, (1, n, 2, 4)) / 4 for n in (5, 16))
    return q, k, random.normal(size=(1, 16, 2, 3)), np.full((1, 2, 1, 16), LEVEL)


def by_weights(q, k, v, bias, keep, sink):
    """All weights in memory."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 2 + bias
    ends = jnp.broadcast_to(sink[:, None, None], (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, ends], -1))[..., :-1]
    return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, weights, 0.0) / CHANCE, v)


# A merge weighs the states of devices by their energies, which are rounded.
@pytest.mark.parametrize(
    ("parallel", "tolerance"),
    [(None, 32 * EPSILON), (SequenceParallel("device"), EPSILON * LEVEL)],
    ids=["one", "mesh"],
)
def test_large_scores(parallel, tolerance):
    """Weights, and gradients, that are off by what rounding takes from an energy, 0.4% at 1e5; a sink that is."""
    arrays = exact_inputs()
    sink, key = np.array([LEVEL + 1, -np.inf]), jax.random.key(3)
    keep = jax.random.bernoulli(key, CHANCE, (1, 1, 5, 16))
    dropped = {"dropout_rng": key, "dropout_rate": 1 - CHANCE, "deterministic": False}

    def found(q, k, v, bias):
        energy = ea.FreeEnergy(sink=jnp.asarray(sink, jnp.float32), parallel=parallel)
        return ea.flax.attention_fn(energy)(q, k, v, bias=bias, **dropped)

    def wanted(q, k, v, bias):
        return by_weights(q, k, v, bias, keep, jnp.asarray(sink))

    def with_gradients(f):
        return jax.jit(jax.value_and_grad(lambda *x: (f(*x) ** 2).sum(), range(4)))

    narrow = [jnp.asarray(x, jnp.float32) for x in arrays]
    exact = jax.device_get(with_gradients(wanted)(*arrays))
    with jax.set_mesh(mesh_of("8")):
        close(with_gradients(found)(*narrow), exact, tolerance=tolerance)
