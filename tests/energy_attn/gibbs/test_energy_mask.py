"""`FreeEnergy(mask=)`: the energy's own rule holds wherever the energy goes, beside the mask of a call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn import masks
from energy_attn.distributed import KVCache

LENGTH = 9
I = np.arange(LENGTH)
PREFIX = np.array([2, 5], np.int32)
RULE = masks.Causal() | masks.Prefix(jnp.asarray(PREFIX))
DENSE = (I[None, :, None] >= I[None, None, :]) | (I[None, None, :] < PREFIX[:, None, None])


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def close(mine, theirs):
    for x, y in zip(*map(jax.tree.leaves, (mine, theirs)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)


def answers(F, along):
    return F(), F(along), F.attention(), F.entropy(), F.covariance(along), F.tilt(along).entropy()


@pytest.mark.parametrize("array", [pytest.param(False, marks=pytest.mark.full), True])
def test_rule_of_an_energy(array):
    """A method, a gradient or a transformation that forgets the rule, or the array beside it."""
    q, k, v, along = (normal(i, 2, LENGTH, 2, 3) for i in range(4))
    given = jnp.asarray(np.random.default_rng(5).random((2, 1, LENGTH, LENGTH)) < 0.7)
    call = {"mask": given} if array else {}
    whole = jnp.asarray(DENSE[:, None]) & (given if array else True)
    energy = ea.FreeEnergy(mask=RULE)

    def total(q, F, others):
        found = answers(F(q), along), others(q)
        return sum(x.sum() for x in jax.tree.leaves(found)), found

    def mine(q):
        def others(q):
            return energy.attention(q, k, v, **call), energy(q, k, v, source=along, **call)

        return total(q, lambda q: energy.at(q, k, v, **call), others)

    def theirs(q):
        def others(q):
            plain = ea.FreeEnergy()
            options = {"mask": whole}
            return plain.attention(q, k, v, **options), plain(q, k, v, source=along, **options)

        return total(q, lambda q: ea.FreeEnergy().at(q, k, v, mask=whole), others)

    close(*(jax.jit(jax.grad(f, has_aux=True))(q) for f in (mine, theirs)))
    out = jax.vmap(lambda F: F.attention())(energy.at(q, k, v))
    close(out, ea.attention(q, k, v, mask=jnp.asarray(DENSE[:, None])))


def test_modules_and_caches():
    """Dropout, which has a mask of its own, a block that changes positions, or a cache without the rule."""
    x, rule = normal(0, LENGTH, 4), masks.Causal() | masks.Prefix(2)
    dense = jnp.asarray((I[:, None] >= I) | (I < 2)[None])
    near = jnp.asarray(I[None] - I[:, None] >= -3)
    key = jax.random.key(0)
    layer = ea.MultiheadAttention(2, 4, mask=rule, dropout_p=0.3, key=key)
    plain = ea.MultiheadAttention(2, 4, dropout_p=0.3, key=key)
    close(layer(x, x, x, key=key), plain(x, x, x, dense, key=key))
    window = layer(x, x, x, masks.Window(3, None), key=key)
    close(window, plain(x, x, x, dense & near, key=key))

    block = ea.hopfield.EnergyAttentionBlock(4, 2, free_energy=ea.FreeEnergy(mask=rule), key=key)
    other = ea.hopfield.EnergyAttentionBlock(4, 2, key=key)
    close(block(x), other(x, mask=dense[None, None]))

    k, v, q = normal(1, 1, LENGTH, 2, 3), normal(2, 1, LENGTH, 2, 3), normal(3, 1, 4, 2, 3)
    cache = KVCache.empty(1, 16, 2, 3, dtype=jnp.float64).append(k, v)
    hole = ~(masks.Prefix(4) & ~masks.Prefix(2))  # all but positions 2 and 3
    found = cache.at(q, energy=ea.FreeEnergy(is_causal=True, mask=hole)).attention()
    rows = jnp.asarray((I[-4:, None] >= I) & ~((I >= 2) & (I < 4)))
    close(found, ea.attention(q, k, v, mask=rows[None, None]))


def test_wrong_masks(unchecked):
    """An array among the fields, where it would be a leaf of every model."""
    for wrong in (jnp.ones((1, 1, 2, 2), bool), masks.Causal):
        with pytest.raises(TypeError, match=r"mask: wanted a rule of energy_attn.masks or None"):
            ea.FreeEnergy(mask=wrong)
