"""Layouts: which order queries and keys are taken to be in, and positions that say another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import SequenceParallel, make_mesh, shard_sequence, unshard_sequence
from tests.support.compare import close
from tests.support.complaints import complains
from tests.support.problems import Problem
from tests.support.reference import dense

LENGTH, DEVICES = 16, 4
TOKENS = np.arange(LENGTH)[None]


def problem():
    rng = np.random.default_rng(0)
    return Problem("layout", *rng.standard_normal((3, 2, LENGTH, 2, 4)), is_causal=True)


def attend(q, k, v, **options):
    return ea.attention(q, k, v, is_causal=True, return_energy=True, **options)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_replicated_queries_of_as_many_as_keys(layout):
    """Queries in the order of the text taken for queries in the layout's, and errors where no position says so."""
    of = problem()
    arrays = tuple(map(jnp.asarray, of.arrays.values()))
    parallel = SequenceParallel("s", layout=layout, queries_sharded=False)
    with jax.set_mesh(make_mesh((DEVICES,), ("s",), devices=jax.devices()[:DEVICES])):
        q, k, v = (shard_sequence(x, parallel) for x in arrays)
        laid_out = attend(q, k, v, parallel=parallel)
        laid_out = tuple(unshard_sequence(x, parallel) for x in laid_out)
        as_text = attend(arrays[0], k, v, parallel=parallel, query_positions=jnp.asarray(TOKENS))
        found = jax.device_get((laid_out, as_text))
    close(found, [dense(of)] * 2)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_positions_in_another_order(layout):
    """Keys, or sharded queries, in the order of the text beside queries or keys that are taken to be in another."""
    of = problem()
    arrays = tuple(map(jnp.asarray, of.arrays.values()))
    tokens = jnp.asarray(TOKENS)
    own = SequenceParallel("s", layout=layout, queries_sharded=False)
    alike = SequenceParallel("s", layout=layout)
    absent = jnp.where(tokens < 3, -1, 9)
    given = {"query_positions": tokens, "key_positions": tokens}
    with jax.set_mesh(make_mesh((DEVICES,), ("s",), devices=jax.devices()[:DEVICES])):
        for parallel, name, other in (
            (own, "key_positions", "query_positions"),
            (alike, "key_positions", "query_positions"),
            (alike, "query_positions", "key_positions"),
        ):
            position = {name: tokens}
            wrong = functools.partial(attend, *arrays, parallel=parallel, **position)
            complains(wrong, ValueError, name, "[1,16]", f"{other}, too")
            complains(jax.jit(wrong), ValueError, name, "[1,16]", f"{other}, too")
        # in the layout's order, after it, or absent
        for right in (given, {"key_positions": absent}):
            jax.eval_shape(lambda: attend(*arrays, parallel=alike, **right))  # noqa: B023
        later = shard_sequence(tokens, alike) + 3
        jax.eval_shape(lambda: attend(*arrays, parallel=alike, query_positions=later))
        jax.eval_shape(lambda p: attend(*arrays, parallel=own, key_positions=p), tokens)
