"""Eviction of the least important tokens: which ones stay, where they are, and what comes after them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import KVCache, SequenceParallel
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.meshes import mesh_of

RNG = np.random.default_rng(0)
B, K, H, LENGTHS, COUNTS = 3, 2, 4, (13, 3, 24), (5, 7, 20)


def numbers(*shape):
    return array(RNG.standard_normal(shape))


KEY, VALUE, MORE = (numbers(B, *x) for x in ((24, K, H), (24, K, 3), (2, K, H)))
QUERY = numbers(B, 2, 4, H)
# of each token; many are equal
IMPORTANCE = array(np.round(RNG.standard_normal((B, 24, K))))


def evicted(key, value, importance, parallel=None, quantize=None):
    """A cache that has lost its oldest and its least important tokens; the numbers are by token."""
    cache = KVCache.empty(
        B, 24, K, H, 3, dtype=key.dtype, parallel=parallel, block_size=3, quantize=quantize
    )
    cache = cache.append(key, value, lengths=jnp.asarray(LENGTHS)).evict(jnp.asarray([2, 0, 0]))
    places = cache.positions
    if any(jax.typeof(places).sharding.spec):
        places = jax.reshard(places, jax.P())
    by_slot = jnp.take_along_axis(importance, jnp.maximum(places, 0)[..., None], 1)
    by_slot = jnp.where(places[..., None] < 0, jnp.inf, by_slot)
    by_slot = by_slot if importance.shape[2] > 1 else by_slot[..., 0]
    return cache.evict(jnp.asarray(COUNTS), importance=by_slot)


def kept(row, head, importance):
    """The tokens that stay, in order: of equals the newer one."""
    tokens = range(2 if row == 0 else 0, LENGTHS[row])
    left = max(len(tokens) - COUNTS[row], 0)
    best = sorted(
        tokens, key=lambda t: (-importance[row, t, min(head, importance.shape[2] - 1)], -t)
    )
    return sorted(best[:left])


@pytest.mark.parametrize("kind", [None, "8", "8 explicit"])
@pytest.mark.parametrize("heads", [1, 2])
def test_attention(kind, heads):
    """A token that should have gone, one of another head or device; a newer one that does not follow the old ones."""
    parallel = None if kind is None else SequenceParallel("device")

    @jax.jit
    def run(key, value, importance):
        cache = evicted(key, value, importance, parallel)
        cache = cache.append(MORE[:, :1], MORE[:, :1, :, :3]).append(
            MORE[:, 1:], MORE[:, 1:, :, :3]
        )
        return cache.attend(QUERY).out, cache.lengths - cache.starts

    importance = IMPORTANCE[:, :, :heads]
    if kind is None:
        found, held = run(KEY, VALUE, importance)
    else:
        with jax.set_mesh(mesh_of(kind)):
            found, held = jax.device_get(run(KEY, VALUE, importance))
    key, value, by_token = (np.asarray(x) for x in (KEY, VALUE, importance))
    for row in range(B):
        for head in range(4):
            chosen = kept(row, head // 2, by_token)
            assert held[row] == len(chosen) + 2
            for query in range(2):
                new = np.asarray(MORE)[row, : query + 1, head // 2]
                keys = np.concatenate([key[row, chosen, head // 2], new])
                values = np.concatenate([value[row, chosen, head // 2], new[:, :3]])
                scores = keys @ np.asarray(QUERY)[row, query, head] / 2
                weights = np.exp(scores - scores.max())
                close(found[row, query, head], weights @ values / weights.sum())


def test_derivative():
    """A token that stays and passes no derivative, or that of another slot."""

    def out(key):
        return evicted(key, VALUE, IMPORTANCE).keys()

    cotangent = numbers(B, 24, K, H)
    _, back = jax.vjp(out, KEY)
    change = numbers(*KEY.shape)
    moved = jax.jvp(out, (KEY,), (change,))[1]
    np.testing.assert_allclose(jnp.vdot(back(cotangent)[0], change), jnp.vdot(cotangent, moved))
    held = evicted(KEY, VALUE, IMPORTANCE).positions >= 0
    kept_change = [
        np.asarray(change)[row, kept(row, 0, np.asarray(IMPORTANCE)), 0] for row in range(B)
    ]
    close(np.asarray(moved)[..., 0, :][np.asarray(held)], np.concatenate(kept_change))


def test_eight_bits():
    """Scales that stay where they were."""
    narrow = evicted(
        KEY.astype(jnp.float32), VALUE.astype(jnp.float32), IMPORTANCE, quantize="int8"
    )
    wide = evicted(KEY, VALUE, IMPORTANCE)
    held = np.asarray(wide.positions >= 0)
    close(np.asarray(narrow.keys())[held], np.asarray(wide.keys())[held], tolerance=5e-3)


def test_by_importance_of_queries():
    """The numbers that a measure gives fit the cache, and its heads."""
    cache = KVCache.empty(1, 8, K, H, dtype=jnp.float64, block_size=8)
    cache = cache.append(KEY[:1, :6], KEY[:1, :6])
    F = cache.at(QUERY[:1], energy=ea.FreeEnergy())
    found = cache.evict(2, importance=F.importance(grouped=True))
    sums = np.asarray(F.weights().sum(1)).reshape(1, K, 2, 8).sum(2)[0]
    for head in range(K):
        best = np.sort(np.argsort(-sums[head, :6])[:4])
        close(found.keys()[0, 2:6, head], np.asarray(KEY)[0, best, head])
