"""NaN and infinity over a mesh, in methods, merges and the cache: never left out, and never read where absent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn.distributed import KVCache, SequenceParallel, logsumexp_across, merge_across
from energy_attn.kernels import AttentionState, CovarianceState
from tests.support.compare import close, same
from tests.support.meshes import MERGES, mesh_of
from tests.support.problems import Problem
from tests.support.reference import dense, dense_vjp
from tests.support.selection import few

AXES = ("node", "device")
LENGTHS = np.array([16, 11], np.int32)
BROKEN = 9  # the key that is broken, of device 4
PAST = 13  # a slot of the second row that is past its length, of device 6


def with_entry(x, at, number):
    """A copy of which some numbers are another."""
    x = x.copy()
    x[at] = number
    return x


@pytest.mark.parametrize("method", few(["tree", "ring", "ulysses", "hybrid", "gather"], "ring"))
@pytest.mark.parametrize("queries", [pytest.param(1, marks=pytest.mark.full), 16])
def test_every_method(method, queries):
    """A shard whose state is NaN and is left out as if it were empty: a finite answer, and it is wrong."""
    if (method, queries) == ("ulysses", 1):
        parallel = SequenceParallel(AXES, "auto", merge="hierarchical")
    else:
        parallel = SequenceParallel(AXES, method)
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 16, 8, 4))
    query = query[:, :queries]

    def total(*arrays):
        out, energy = ea.attention(
            *arrays, key_value_seq_lengths=LENGTHS, parallel=parallel, return_energy=True
        )
        return (out**2).sum() + energy.sum(), (out, energy)

    program = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))

    def run(*arrays):
        (_, found), gradients = jax.device_get(program(*arrays))
        return found, gradients

    problem = Problem("not finite", query, key, value, key_value_seq_lengths=LENGTHS)
    out, energy = dense(problem)
    slopes = dense_vjp(problem, 2 * out, np.ones_like(energy))
    with jax.set_mesh(mesh_of("2x4")):
        for bad in (np.nan, np.inf):
            # nothing of what is past a length, all of what is seen
            absent = [with_entry(x, (1, PAST), bad) for x in (key, value)]
            close(run(query, *absent), ((out, energy), tuple(slopes.values())), tolerance=1e-12)
            broken = with_entry(absent[0], (0, BROKEN, 3), np.nan), absent[1]
            found, gradients = run(query, *broken)
            assert all(np.isnan(x[0, :, 3]).all() for x in found)
            assert all(np.isfinite(x[1]).all() for x in (*found, *gradients))
            assert all(np.isnan(x[0, :, 3]).any() for x in gradients)
        found, _ = run(with_entry(query, (1, 0, 2), np.nan), key, value)
        for x in found:
            assert np.isnan(x[1, 0, 2]).all() and np.isfinite(x[0]).all()


@pytest.mark.parametrize("broken", few([np.nan, np.inf], np.nan))
def test_every_merge(broken):
    """One device's energy is not finite: pmax drops NaN on some platforms, and `isfinite` took it for no keys."""
    rng = np.random.default_rng(0)
    lse = rng.standard_normal((8, 3))
    lse[2, 0], lse[5, 1] = broken, -np.inf
    out = rng.standard_normal((8, 3, 2))
    sharded = P(AXES)

    def fold(merges, out, lse):
        state = AttentionState(out[0], lse[0])
        square = CovarianceState(out[0, :, :, None] * out[0, :, None, :], *state)
        merged = [merge_across(state, AXES, merge) for merge in merges]
        if len(merges) > 1:
            merged.append(AttentionState(*merge_across(square, AXES)[1:]))
        # an energy is folded as a state whose output has no width
        return merged, logsumexp_across(lse[0], AXES, merges[0])

    def spread(merges, out, lse):
        run = functools.partial(fold, merges)
        return jax.shard_map(run, in_specs=(sharded, sharded), out_specs=P())(out, lse)

    def total(out, lse):  # the derivative is one for all strategies
        return sum(x.sum() for x in jax.tree.leaves(spread(("butterfly",), out, lse)))

    def run(out, lse):
        return spread(MERGES, out, lse), jax.grad(total, (0, 1))(out, lse)

    with jax.set_mesh(mesh_of("2x4")):
        found = jax.jit(run)(out, lse)
    (merged, energy), gradients = jax.device_get(found)
    for found in (*merged, AttentionState(energy[:, None], energy)):
        assert np.isnan(found.out[0]).all() and np.isnan(found.lse[0])
        assert np.isfinite(found.out[1:]).all() and np.isfinite(found.lse[1:]).all()
    assert all(np.isnan(x[2, 0]).all() for x in gradients)
    assert all(np.isfinite(x[:, 1:]).all() for x in gradients)


@pytest.mark.parametrize("window", few([None, 8], 8))
def test_cache(window):
    """A token of NaN is seen as long as it is there, and never once it is evicted or was only padding."""
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((2, 2, 12, 2, 4))
    query = rng.standard_normal((2, 1, 4, 4))
    lengths = np.array([12, 6], np.int32)
    broken = with_entry(tokens, (slice(None), 1, slice(7, None)), np.nan)  # padding
    broken[:, 0, 2] = np.nan  # a token
    parallel = SequenceParallel("device")

    @jax.jit
    def run(key, value):
        shape = 2, 24, 2, 4
        options = {"dtype": jnp.float64, "block_size": 1, "parallel": parallel}
        cache = KVCache.empty(*shape, window=window, **options)
        cache = cache.append(key, value, lengths=jnp.asarray(lengths))
        places = jnp.asarray(lengths)[:, None] - 1
        return cache.attend(jnp.asarray(query), query_positions=places)

    with jax.set_mesh(mesh_of("8")):
        wanted, found = jax.device_get([run(*x) for x in (tokens, broken)])
    problem = Problem(
        "cache",
        query,
        *tokens,
        is_causal=True,
        local_window_size=window and (window, 0),
        query_positions=lengths[:, None] - 1,
        key_value_seq_lengths=lengths,
    )
    close(wanted, dense(problem), tolerance=1e-12)
    same([x[1] for x in found], [x[1] for x in wanted])
    if window is None:
        assert np.isnan(found.out[0]).all() and np.isnan(found.lse[0]).all()
    else:
        same(found, wanted)
