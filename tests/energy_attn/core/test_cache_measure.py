"""`KVCache.at`: the measure over what a cache holds is that of its tokens, on its mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import KVCache
from tests.support.compare import close
from tests.support.meshes import mesh_of, parallel_of
from tests.support.observables import answers, directions, exact, few_answers
from tests.support.problems import Problem, cast, cotangents
from tests.support.reference import dense_vjp
from tests.support.selection import few_rows

LENGTHS = np.array([9, 4], np.int32)
# rows end at their lengths, and the queries are their last two tokens
ASKED = (LENGTHS[:, None] - 2 + np.arange(2)).astype(np.int32)


def whole(window, joined) -> Problem:
    """The same keys at once, and which query sees which; those beside the cache are five more, which all see."""
    keys, key_len = np.arange(9), 14 if joined else 9
    seen = (keys < LENGTHS[:, None, None]) & (keys <= ASKED[..., None])
    if window is not None:
        seen &= keys >= ASKED[..., None] - window
    more = np.ones((2, 2, key_len - 9), bool)
    rng = np.random.default_rng(0)
    shapes = (2, 2, 4, 4), (2, key_len, 2, 4), (2, key_len, 2, 3)
    arrays = map(rng.standard_normal, shapes)
    source = rng.standard_normal((2, 2, 4, 3))
    mask = np.concatenate([seen, more], -1)[:, None]
    return Problem("cached", *arrays, source=source, mask=mask, scale=0.7)


@pytest.mark.parametrize(
    ("window", "joined", "ask"),
    few_rows(
        [
            (6, False, few_answers),
            (6, True, answers),
            (None, True, few_answers),
            (None, False, few_answers),
        ]
    ),
)
def test_measure_of_a_cache(window, joined, ask):
    """Slots that are empty or evicted, ragged rows, the window, or the mesh of the cache, left out."""
    problem = whole(window, joined)
    along = directions(problem)
    energy = ea.FreeEnergy(scale=0.7, is_causal=True)
    given = cotangents(problem, jnp.float64)

    with jax.set_mesh(mesh_of("8")):
        cache = KVCache.empty(
            *(2, 16, 2, 4, 3),
            dtype=jnp.float64,
            window=window,
            parallel=parallel_of("8"),
            block_size=2,
        )

        @jax.jit
        def run(cache, arrays):
            def total(arrays):
                query, key, value = (arrays[name] for name in ("query", "key", "value"))
                filled = cache.append(key[:, :9], value[:, :9], lengths=jnp.asarray(LENGTHS))
                F = filled.at(query, energy=energy)
                if joined:
                    F |= ea.FreeEnergy(scale=0.7).at(query, key[:, 9:], value[:, 9:])
                F = F.tilt(arrays["source"])
                state = F.attention(return_energy=True)
                return sum(map(jnp.vdot, given, state)), ask(F, along)

            return jax.grad(total, has_aux=True)(arrays)

        gradients, found = jax.device_get(run(cache, cast(problem, jnp.float64)[0]))

    close(found, exact(problem, found), tolerance=1e-10)
    close(gradients, dense_vjp(problem, *map(np.asarray, given)), tolerance=1e-10)


def test_wrong_queries(unchecked):
    """An error of the energy's, about arguments that the caller of a cache did not give."""
    cache = KVCache.empty(2, 16, 2, 4, dtype=jnp.float32, window=5)
    query = jnp.ones((2, 1, 4, 4), jnp.float32)
    energy = ea.FreeEnergy()
    with pytest.raises(ValueError, match="local_window_size: wanted at most the cache's window, 5"):
        cache.at(query, energy=ea.FreeEnergy(local_window_size=(6, 0)))
    with pytest.raises(ValueError, match=r"lengths: wanted None with query_positions"):
        one = jnp.ones(2, jnp.int32)
        cache.at(query, energy=energy, lengths=one, query_positions=one[:, None])
    with pytest.raises(TypeError, match=r"query: wanted the dtype of the cache"):
        cache.at(query.astype(jnp.float64), energy=energy)
    with pytest.raises(TypeError, match=r"energy: wanted an energy_attn.FreeEnergy, got"):
        cache.at(query, energy="causal")
