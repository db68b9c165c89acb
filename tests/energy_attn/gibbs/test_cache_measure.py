"""`KVCache.at`: the measure over what a cache holds is that of its tokens, on its mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import KVCache
from tests.support.meshes import mesh_of, parallel_of
from tests.support.selection import few_rows


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def answers(F, along):
    """All that is asked of a measure here."""
    moments = F.score_moments()
    return {
        "energy": F(),
        "out": F.attention(),
        "source": F(along),
        "covariance": F.covariance(along),
        "entropy": F.entropy(),
        "mean": moments.mean,
        "variance": moments.variance,
        "tilted": F.tilt(along).attention(),
    }


@pytest.mark.parametrize(
    ("window", "joined"), few_rows([(6, False), (6, True), (None, True), (None, False)])
)
def test_measure_of_a_cache(window, joined):
    """Slots that are empty or evicted, ragged rows, the window, or the mesh of the cache, left out."""
    lengths = np.array([9, 4], np.int32)
    key, value = normal(0, 2, 9, 2, 4), normal(1, 2, 9, 2, 3)
    query, along = normal(2, 2, 2, 4, 4), normal(3, 2, 2, 4, 3)
    more_key, more_value = normal(4, 2, 5, 2, 4), normal(5, 2, 5, 2, 3)
    energy = ea.FreeEnergy(scale=0.7, is_causal=True)
    # rows end at their lengths, and the queries are their last two tokens
    asked = jnp.asarray(lengths[:, None] - 2 + np.arange(2)[None], jnp.int32)
    reach = None if window is None else (window, 0)

    def all_answers(F, query):
        """By itself, or joined with keys that are not in the cache."""
        more = ea.FreeEnergy(scale=0.7).at(query, more_key, more_value)
        return answers(F | more if joined else F, along)

    with jax.set_mesh(mesh_of("8")):
        cache = KVCache.empty(
            2,
            16,
            2,
            4,
            3,
            dtype=jnp.float64,
            window=window,
            parallel=parallel_of("8"),
            block_size=2,
        )

        @jax.jit
        def run(cache, key, value, query):
            def total(query, value):
                filled = cache.append(key, value, lengths=jnp.asarray(lengths))
                found = all_answers(filled.at(query, energy=energy), query)
                return sum(x.sum() for x in jax.tree.leaves(found)), found

            return jax.grad(total, (0, 1), has_aux=True)(query, value)

        grads, found = run(cache, key, value, query)

    def exact(query, value):
        F = ea.FreeEnergy(scale=0.7, is_causal=True, local_window_size=reach).at(
            query, key, value, query_positions=asked, key_value_seq_lengths=jnp.asarray(lengths)
        )
        wanted = all_answers(F, query)
        return sum(x.sum() for x in jax.tree.leaves(wanted)), wanted

    wanted_grads, wanted = jax.jit(jax.grad(exact, (0, 1), has_aux=True))(query, value)
    for mine, theirs in zip(
        *map(jax.tree.leaves, ((found, grads), (wanted, wanted_grads))), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-10)


def test_wrong_queries(unchecked):
    """An error of the energy's, about arguments that the caller of a cache did not give."""
    cache = KVCache.empty(2, 16, 2, 4, dtype=jnp.float32, window=5)
    query = jnp.ones((2, 1, 4, 4), jnp.float32)
    energy = ea.FreeEnergy()
    with pytest.raises(
        ValueError, match=r"local_window_size: wanted at most the cache's window, 5"
    ):
        cache.at(query, energy=ea.FreeEnergy(local_window_size=(6, 0)))
    with pytest.raises(ValueError, match=r"lengths: wanted None beside query_positions"):
        one = jnp.ones(2, jnp.int32)
        cache.at(query, energy=energy, lengths=one, query_positions=one[:, None])
    with pytest.raises(TypeError, match=r"query: wanted the dtype of the cache"):
        cache.at(query.astype(jnp.float64), energy=energy)
    with pytest.raises(TypeError, match=r"energy: wanted an energy_attn.FreeEnergy, got"):
        cache.at(query, energy="causal")
