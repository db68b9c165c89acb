"""A sink over devices: counted once by every method, merge and layout, in a cache and a tree, and inside `shard_map`.

The judge is dense attention with one more key, in float64.
"""

from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn.distributed import KVCache, SequenceParallel, sharded_attention
from energy_attn.kernels import AttentionState
from energy_attn.prefix_tree import PrefixTree, tree_decode
from tests.support.compare import close
from tests.support.meshes import (
    AXES,
    DECODE,
    EMPTY,
    ODD,
    SELF,
    mesh_of,
    on_host,
    state_and_gradients,
    with_gradients,
)
from tests.support.observables import answers, directions, exactly, measure
from tests.support.problems import Problem, _make, cast
from tests.support.reference import dense, dense_vjp, rows
from tests.support.scores import gradient_of, sink_of, with_key
from tests.support.selection import few, few_rows


def judge(problem: Problem, parallel: SequenceParallel, mesh: str, batched=False, place=None):
    """Checks attention, energies and all gradients at the problem's source against the judge's."""
    sink, (arrays, given) = sink_of(problem, batched), on_host(problem)
    arrays = arrays | {"sink": sink}
    cotangents = given
    with jax.set_mesh(mesh_of(mesh)):
        if place is not None:  # cotangents have the types of the results
            arrays |= {n: jax.device_put(arrays[n], spec) for n, spec in place.items()}
            cotangents = jax.device_put(given, place["query"])
        found = state_and_gradients(problem, parallel)(arrays, cotangents)
    check_with_key(found, problem, sink, given)


def check_with_key(found, problem: Problem, sink, given):
    """Checks a state and its gradients against the judge's of the problem with one more key."""
    state, gradients = found
    whole = with_key(problem, sink)
    close(state, dense(whole), "state")
    close(gradients, gradient_of(problem, sink, dense_vjp(whole, *given)))


# Whatever the method and the merge, the sink is folded with the state of all keys, outside of `shard_map`.
@pytest.mark.parametrize(
    ("method", "layout", "problem"),
    few_rows(
        [("tree", "zigzag", SELF), ("gather", "contiguous", ODD), ("tree", "contiguous", EMPTY)]
    ),
    ids=str,
)
def test_methods(method, layout, problem):
    """A sink counted on each of eight devices, or on none; its gradient summed over devices once too often."""
    judge(problem, SequenceParallel(AXES, method, layout=layout), "2x4", batched=True)


@pytest.mark.parametrize("sharded", few([True, False], True))
def test_types(sharded):
    """A sink that mesh axes in the types of the other arrays do not let in."""
    plain = replace(DECODE, bias=None, mask=None)
    keys, queries = P(None, "device", "node"), P(None, None, "node")
    place = {"key": keys, "value": keys, "query": queries, "source": queries}
    place |= {"sink": P("node")} if sharded else {}
    judge(plain, SequenceParallel("device", heads="node"), "2x4 explicit", place=place)


@pytest.mark.full
def test_observables():
    """A sink that each device's part of the keys brings to a reduction."""
    problem = SELF
    sink = sink_of(problem)
    arrays, _ = cast(problem, jnp.float64)
    along = [jnp.asarray(u) for u in directions(problem)]
    parallel = SequenceParallel(AXES)

    @jax.jit
    def run(arrays, sink):
        F = measure(**arrays, **problem.options, sink=sink, parallel=parallel)
        return answers(F, along), F.sample(key=jax.random.key(0), count=64)

    with jax.set_mesh(mesh_of("2x4")):
        found, drawn = run(arrays, jnp.asarray(sink))
    whole = with_key(problem, sink)
    close(found, exactly(replace(whole, name=problem.name)))
    exact, drawn = rows(whole).weights, np.asarray(drawn)
    for b, t, n in np.ndindex(drawn.shape[:-1]):
        assert (drawn[b, t, n] >= 0).all() == (exact[b, n, t].sum() > 0)
        assert (exact[b, n, t, drawn[b, t, n][drawn[b, t, n] >= 0]] > 0).all()


INSIDE = {
    "tree": ("tree", P()),
    "tree of shards": ("tree", P(None, "device")),
    "ring": ("ring", P(None, "device")),
    "energy": (None, P(None, "device")),
}


@pytest.mark.parametrize("method", few(list(INSIDE), "tree of shards"))
def test_inside_shard_map(method):
    """A sink merged before the fold, by each device; a gradient that is one device's."""
    way, queries = INSIDE[method]
    problem = _make("sink inside", B=2, T=16, S=16, N=8, H=5, V=3, scale=0.4)
    sink = sink_of(problem)
    keys = P(None, "device")

    def local(query, key, value, sink):
        if way is None:
            parallel = SequenceParallel("device")
            return ea.attention(
                query, key, value, scale=0.4, sink=sink, parallel=parallel, return_energy=True
            )
        options = {"scale": 0.4, "sink": sink, "axis_name": "device", "method": way}
        return tuple(sharded_attention(query, key, value, **options))

    def spread(x):
        mapped = jax.shard_map(
            local, in_specs=(queries, keys, keys, P()), out_specs=(queries, queries)
        )
        return mapped(x["query"], x["key"], x["value"], x["sink"])

    arrays, given = on_host(problem)
    with jax.set_mesh(mesh_of("8")):
        found = with_gradients(spread)(arrays | {"sink": sink}, given)
    check_with_key(found, problem, sink, given)


@pytest.mark.parametrize("mesh", few([None, "8", "2x4 explicit"], "8"))
def test_cache_and_tree(mesh):
    """A sink counted with the cache and again with the tree; one that each device of a cache adds."""
    # a node sees the context, the nodes above it and itself; the first query alone asks the cache
    above = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]], bool)
    seen = np.concatenate([np.ones((4, 11), bool), above], 1)
    nodes = replace(_make("sink of a tree", 1, 4, 15, 4, 2), mask=seen[None, None])
    asked = replace(
        nodes, query=nodes.query[:, :1], key=nodes.key[:, :11], value=nodes.value[:, :11], mask=None
    )
    sink = sink_of(nodes)
    axes = {"8": "device", "2x4 explicit": AXES}
    parallel = None if mesh is None else SequenceParallel(axes[mesh])

    def run(arrays):
        query, key, value, sink = (arrays[x] for x in ("query", "key", "value", "sink"))
        tree = PrefixTree.from_beam(jnp.asarray([[[5, 7, 1], [5, 8, -1]]]), capacity=4)
        options = {"dtype": jnp.float64, "block_size": 2, "parallel": parallel}
        cache = KVCache.empty(1, 32, 2, 5, **options).append(key[:, :11], value[:, :11])
        new = key[:, 11:], value[:, 11:]
        found = cache.attend(query[:, :1], sink=sink)
        return (found, tree_decode(query, *new, tree=tree, cache=cache, sink=sink)), cache

    @jax.jit
    def both(arrays, given):
        found, back, cache = jax.vjp(run, arrays, has_aux=True)
        at = cache.at(arrays["query"][:, :1], energy=ea.FreeEnergy(sink=arrays["sink"]))
        return found, back(given)[0], at.entropy()

    arrays = nodes.arrays | {"sink": sink}
    given = [AttentionState(*on_host(x)[1]) for x in (asked, nodes)]
    with nullcontext() if mesh is None else jax.set_mesh(mesh_of(mesh)):
        found, gradients, entropy = both(arrays, tuple(given))
    exact = [with_key(x, sink) for x in (asked, nodes)]
    close(found, [dense(x) for x in exact])
    weights = rows(exact[0]).weights
    close(entropy, -(weights * np.log(weights)).sum(-1).transpose(0, 2, 1))
    of_asked, of_nodes = (
        gradient_of(x, sink, dense_vjp(y, *z))
        for x, y, z in zip((asked, nodes), exact, given, strict=True)
    )
    for name, x in of_asked.items():  # of the first entries
        of_nodes[name][tuple(map(slice, x.shape))] += x
    close(gradients, of_nodes, tolerance=1e-10)
