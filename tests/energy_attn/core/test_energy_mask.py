"""`FreeEnergy(mask=)`: the energy's own rule holds wherever the energy goes, beside the mask of a call."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn import masks
from energy_attn.distributed import KVCache
from tests.support.compare import close
from tests.support.observables import exact
from tests.support.problems import Problem, cotangents
from tests.support.reference import dense, dense_vjp

LENGTH = 9
I = np.arange(LENGTH)
PREFIX = np.array([2, 5], np.int32)
RULE = masks.Causal() | masks.Prefix(PREFIX)
DENSE = (I[None, :, None] >= I[None, None, :]) | (I[None, None, :] < PREFIX[:, None, None])


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


@pytest.mark.parametrize("array", [pytest.param(False, marks=pytest.mark.full), True])
def test_rule_of_an_energy(array):
    """A method, a gradient or a transformation that forgets the mask, or the array beside it."""
    rng = np.random.default_rng(5)
    given = rng.random((2, 1, LENGTH, LENGTH)) < 0.7
    call = {"mask": jnp.asarray(given)} if array else {}
    arrays = (rng.standard_normal((2, LENGTH, 2, 3)) for _ in range(4))
    problem = Problem("rule", *arrays, mask=DENSE[:, None] & (given if array else True))
    plain = replace(problem, source=None)
    dout, dlse = cotangents(problem, jnp.float64)

    @jax.jit
    def run(query, key, value, source):
        energy = ea.FreeEnergy(mask=RULE)

        def total(query):
            F = energy.at(query, key, value, **call)
            direct = energy(query, key, value, source=source, **call)
            out = energy.attention(query, key, value, **call)
            tilted, entropy = F.tilt(source), F.tilt(source).entropy()
            found = {"attention": tilted.attention(), "entropy": entropy}, (out, F(), direct)
            return (dlse * (direct + tilted())).sum() + (dout * out).sum(), found

        mapped = jax.vmap(lambda F: F.attention())(energy.at(query, key, value))
        return *jax.grad(total, has_aux=True)(query), mapped

    found = run(*(problem.arrays[name] for name in ("query", "key", "value", "source")))
    gradient, (answers, calls), mapped = jax.device_get(found)
    close(answers, exact(problem, answers))
    close(calls, (*dense(plain), dense(problem)[1]))
    close(mapped, dense(replace(plain, mask=DENSE[:, None]))[0])
    zero, dout, dlse = (np.asarray(x) for x in (0 * dout, dout, dlse))
    wanted = 2 * dense_vjp(problem, zero, dlse)["query"] + dense_vjp(plain, dout, 0 * dlse)["query"]
    close(gradient, wanted)


def test_modules_and_caches():
    """Dropout, which has a mask of its own, or a cache without the mask."""
    x, rule = normal(0, LENGTH, 4), masks.Causal() | masks.Prefix(2)
    dense_ = jnp.asarray((I[:, None] >= I) | (I < 2)[None])
    near = jnp.asarray(I[None] - I[:, None] >= -3)
    k, v, q = normal(1, 1, LENGTH, 2, 3), normal(2, 1, LENGTH, 2, 3), normal(3, 1, 4, 2, 3)
    rows = jnp.asarray((I[-4:, None] >= I) & ~((I >= 2) & (I < 4)))

    @jax.jit
    def run(key):
        layer = ea.nn.MultiheadAttention(2, 4, mask=rule, dropout_p=0.3, key=key)
        plain = ea.nn.MultiheadAttention(2, 4, dropout_p=0.3, key=key)
        cache = KVCache.empty(1, 16, 2, 3, dtype=jnp.float64).append(k, v)
        hole = ~(masks.Prefix(4) & ~masks.Prefix(2))  # all but positions 2 and 3
        energy = ea.FreeEnergy(is_causal=True, mask=hole)
        return {
            "layer": [
                f(x, x, x, m, key=key)
                for f, m in ((layer, masks.Window(3, None)), (plain, dense_ & near))
            ],
            "cache": (
                cache.at(q, energy=energy).attention(),
                ea.attention(q, k, v, mask=rows[None, None]),
            ),
        }

    for name, pair in run(jax.random.key(0)).items():
        close(*pair, name, 1e-12)
