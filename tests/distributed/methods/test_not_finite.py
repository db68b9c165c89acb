"""Over a mesh what is not finite is not left out, and what is absent is not read: methods, merges, the cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn.distributed import (
    KVCache,
    SequenceParallel,
    cost,
    logsumexp_across,
    merge_across,
)
from energy_attn.kernels import AttentionState, CovarianceState, local_attention
from tests.support.meshes import mesh_of
from tests.support.selection import few

AXES = ("node", "device")
LENGTHS = jnp.array([16, 11])
BROKEN = 9  # the key that is broken, of device 4
PAST = 13  # a slot of the second row that is past its length, of device 6


def arrays():
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal((2, 16, 8, 4))) for _ in range(3))


def not_a_number(actual, wanted):
    """NaN where `wanted` is not finite, close elsewhere."""
    actual, wanted = np.asarray(jax.device_get(actual)), np.asarray(wanted)
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(wanted))
    there = np.isfinite(wanted)
    np.testing.assert_allclose(actual[there], wanted[there], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "method", few(["tree", "ring", "ulysses", "hybrid", "gather"], "ring", "gather")
)
@pytest.mark.parametrize("queries", few([16, 1], 16))
def test_every_method(method, queries):
    """A shard whose state is NaN and is left out as if it were empty: a finite answer, and it is wrong."""
    if (method, queries) == ("ulysses", 1):
        parallel = SequenceParallel(AXES, "auto", merge="hierarchical")
    else:
        parallel = SequenceParallel(AXES, method)
    query, key, value = arrays()
    query = query[:, :queries]

    def run(query, key, value, parallel=None):
        def total(*arrays):
            out, energy = ea.attention(
                *arrays, key_value_seq_lengths=LENGTHS, parallel=parallel, return_energy=True
            )
            return (out**2).sum() + energy.sum(), (out, energy)

        (_, found), gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(
            query, key, value
        )
        return found, gradients

    alone = jax.jit(run)
    spread = jax.jit(functools.partial(run, parallel=parallel))
    with jax.set_mesh(mesh_of("2x4")):
        for bad in (np.nan, np.inf):
            # nothing of what is past a length, all of what is seen
            absent = [x.at[1, PAST].set(bad) for x in (key, value)]
            for mine, theirs in zip(
                jax.tree.leaves(spread(query, *absent)),
                jax.tree.leaves(alone(query, key, value)),
                strict=True,
            ):
                not_a_number(mine, theirs)
                assert np.isfinite(theirs).all()
            broken = query, absent[0].at[0, BROKEN, 3].set(np.nan), absent[1]
            found, gradients = spread(*broken)
            out, energy = map(np.asarray, found)
            assert np.isnan(out[0, :, 3]).all() and np.isnan(energy[0, :, 3]).all()
            assert np.isfinite(out[1]).all() and np.isfinite(energy[1]).all()
            assert all(np.isnan(np.asarray(x)[0, :, 3]).any() for x in gradients)
            assert all(np.isfinite(np.asarray(x)[1]).all() for x in gradients)
        found, _ = spread(query.at[1, 0, 2].set(np.nan), key, value)
        for x in map(np.asarray, found):
            assert np.isnan(x[1, 0, 2]).all() and np.isfinite(x[0]).all()


@pytest.mark.parametrize("broken", few([np.nan, np.inf], np.nan))
def test_every_merge(broken):
    """One device's energy is not finite: pmax drops NaN on some platforms, and `isfinite` took it for no keys."""
    rng = np.random.default_rng(0)
    lse = rng.standard_normal((8, 3))
    lse[2, 0], lse[5, 1] = broken, -np.inf
    out = rng.standard_normal((8, 3, 2))
    sharded = P(AXES)

    def fold(out, lse):
        state = AttentionState(out[0], lse[0])
        square = CovarianceState(out[0, :, :, None] * out[0, :, None, :], *state)
        merged = [merge_across(state, AXES, merge) for merge in cost.MERGES]
        merged += [
            AttentionState(*merge_across(square, AXES, x)[1:]) for x in ("gather", "butterfly")
        ]
        return merged, [logsumexp_across(lse[0], AXES, merge) for merge in cost.MERGES]

    def total(out, lse):
        spread = jax.shard_map(fold, in_specs=(sharded, sharded), out_specs=P())
        found = spread(out, lse)
        return sum(x.sum() for x in jax.tree.leaves(found)), found

    run = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
    with jax.set_mesh(mesh_of("2x4")):
        (_, (merged, energies)), gradients = run(jnp.asarray(out), jnp.asarray(lse))
    for found in (*merged, *(AttentionState(x[:, None], x) for x in energies)):
        assert np.isnan(found.out[0]).all() and np.isnan(found.lse[0])
        assert np.isfinite(found.out[1:]).all() and np.isfinite(found.lse[1:]).all()
    assert all(np.isnan(np.asarray(x)[2, 0]).all() for x in gradients)
    assert all(np.isfinite(np.asarray(x)[:, 1:]).all() for x in gradients)


@pytest.mark.parametrize("window", [None, 8])
def test_cache(window):
    """A token of NaN is seen as long as it is there, and never once it is evicted or was only padding."""
    rng = np.random.default_rng(0)
    tokens = [jnp.asarray(rng.standard_normal((2, 12, 2, 4)), jnp.float32) for _ in range(2)]
    query = jnp.asarray(rng.standard_normal((2, 1, 4, 4)), jnp.float32)
    lengths = jnp.array([12, 6])
    broken = [x.at[1, 7:].set(np.nan).at[0, 2].set(np.nan) for x in tokens]  # padding; a token

    def run(key, value):
        cache = KVCache.empty(
            2,
            24,
            2,
            4,
            dtype=jnp.float32,
            window=window,
            parallel=SequenceParallel("device"),
            block_size=1,
        )
        cache = cache.append(key, value, lengths=lengths)
        return cache.attend(query, query_positions=lengths[:, None] - 1)

    with jax.set_mesh(mesh_of("8")):
        run = jax.jit(run)
        wanted, found = run(*tokens), run(*broken)
    np.testing.assert_array_equal(found.out[1], wanted.out[1])
    if window is None:
        assert np.isnan(found.out[0]).all() and np.isnan(found.lse[0]).all()
    else:
        np.testing.assert_array_equal(found.out[0], wanted.out[0])
    places = jnp.arange(12)[None]
    judge = local_attention(
        query,
        *(tokens if window else broken),
        is_causal=True,
        local_window_size=None if window is None else (window, 0),
        query_positions=lengths[:, None] - 1,
        key_positions=jnp.where(places < lengths[:, None], places, -1),
    )
    np.testing.assert_allclose(found.out, judge.out, rtol=0, atol=1e-6)
