"""Scores over a mesh: every method, layout and split of heads and rows; the cache and prefix trees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn import scores
from energy_attn.distributed import (
    KVCache,
    SequenceParallel,
    shard_sequence,
    sharded_attention,
    unshard_sequence,
)
from energy_attn.prefix_tree import PrefixTree, tree_decode
from tests.support.compare import close
from tests.support.meshes import in_parts, make_mesh
from tests.support.problems import Problem
from tests.support.reference import dense, dense_vjp
from tests.support.scores import CASES, dense_energy
from tests.support.selection import few, few_rows

CASE = CASES["function"]  # reads batch, head and both positions
RNG = np.random.default_rng(5)
B, T, N, K, H = 2, 16, 4, 4, 3
ARRAYS = {
    "query": RNG.standard_normal((B, T, N, H)),
    "key": RNG.standard_normal((B, T, K, H)),
    "value": RNG.standard_normal((B, T, K, H)),
}
CAUSAL = np.tril(np.ones((T, T), bool))


def number(state):
    return jnp.sin(state[0]).sum() + jnp.cos(state[1]).sum()


def first(f, x, u):
    """Value and gradient, and the change in a direction."""
    return jax.value_and_grad(f)(x), jax.jvp(f, (x,), (u,))[1]


def second(f, x, u):
    """The gradient and its change."""
    return jax.jvp(jax.grad(f), (x,), (u,))


def derivatives(f, order, specs=None):
    """Of a function of `(arrays, parameters)` to a number, at those of the case, which are placed by `specs`."""
    x = ARRAYS, CASE.parameters
    u = jax.tree.map(lambda a: np.cos(np.arange(a.size) + 1.0).reshape(a.shape), x)
    if specs is not None:
        x, u = (jax.tree.map(jax.device_put, y, specs) for y in (x, u))
    return jax.jit(functools.partial(order, f))(x, u)


@functools.cache
def wanted(order):
    """The derivatives of the dense function."""
    run = functools.partial(dense_energy, CASE, scale=H**-0.5, seen=CAUSAL)
    return derivatives(lambda x: number(run(*x)), order)


MESHES = {
    "four": ((4,), ("s",), {}),
    "heads": ((2, 2, 2), ("b", "h", "s"), {"heads": "h"}),
    "two axes": ((2, 2), ("n", "s"), {}),
}


def judged(mesh, method, layout, order):
    shape, axes, more = MESHES[mesh]
    parallel = SequenceParallel(
        ("n", "s") if mesh == "two axes" else "s", method=method, layout=layout, **more
    )

    def run(x):
        arrays, parameters = x
        arrays = {name: shard_sequence(a, parallel) for name, a in arrays.items()}
        state = ea.attention(
            **arrays,
            is_causal=True,
            score=CASE.make(parameters),
            parallel=parallel,
            return_energy=True,
        )
        return number([unshard_sequence(a, parallel) for a in state])

    devices = jax.devices()[: int(np.prod(shape))]
    with jax.set_mesh(make_mesh(shape, axes, devices=devices)):
        close(derivatives(run, order), wanted(order))


@pytest.mark.parametrize(
    ("mesh", "method", "layout", "order"),
    few_rows(
        [
            ("four", "ulysses", "contiguous", first),
            ("heads", "ring", "zigzag", second),
            ("four", "tree", "zigzag", second),
            ("four", "ring", "contiguous", second),
            ("four", "gather", "zigzag", second),
            ("heads", "tree", "contiguous", second),
            ("heads", "ulysses", "zigzag", second),
            ("heads", "gather", "contiguous", second),
            ("two axes", "hybrid", "zigzag", second),
        ]
    ),
)
def test_methods(mesh, method, layout, order):
    """A score that takes a device's heads, rows or positions for all; a part of a parameter's gradient."""
    judged(mesh, method, layout, order)


@pytest.mark.parametrize("order", few([first, second], first))
def test_a_ring_in_parts(order, monkeypatch):
    """Heads that are computed one at a time and count from 0; the gradient of the last one's parameters alone.

    Rows, heads and keys that types split, and parameters that are split, too.
    """
    in_parts(monkeypatch)
    mesh = make_mesh((2, 2, 2), ("b", "h", "s"), explicit=True)
    specs = dict.fromkeys(ARRAYS, P("b", "s", "h")), {"gain": P("h"), "level": P("b")}
    parallel = SequenceParallel("s", "ring")

    def run(x):
        arrays, parameters = x
        options = {"score": CASE.make(parameters), "parallel": parallel, "return_energy": True}
        return number(ea.attention(**arrays, is_causal=True, **options))

    with jax.set_mesh(mesh):
        close(derivatives(run, order, specs), wanted(order))


INSIDE = ("tree", "ring", "ulysses", "hybrid", "gather")


def inside(method, places):
    """A function of arrays and parameters that attends inside `shard_map`, with positions or with none."""
    axes = ("n", "s")
    split = P(None, axes)

    def run(arrays, positions, parameters):
        given = dict.fromkeys(("query_positions", "key_positions"), positions)
        score = CASE.make(parameters)
        options = {"is_causal": True, "score": score, "axis_name": axes}
        return tuple(sharded_attention(**arrays, **given, method=method, **options))

    mapped = jax.shard_map(run, in_specs=(split, split, P()), out_specs=split)
    return lambda x: number(mapped(x[0], places, x[1]))


@pytest.mark.full
@pytest.mark.parametrize("method", INSIDE)
def test_inside_shard_map(method):
    """The functions for one's own `shard_map`: heads that Ulysses moves, gradients of replicated parameters."""
    places = jnp.arange(T, dtype=jnp.int32)[None]
    with jax.set_mesh(make_mesh((2, 2), ("n", "s"), devices=jax.devices()[:4])):
        close(derivatives(inside(method, places), first), wanted(first))


def test_cache_and_trees():
    """A cache whose slots are taken for positions, or nodes of a tree that stand where their slot is."""
    slopes = np.array([0.5, 0.1, 0.01, 1.0])
    rows = slice(12, 13)
    # two drafts of a root: positions 13 | 14, 15 | 14
    place = np.array([13, 14, 15, 14])

    @jax.jit
    def run(x):
        score = scores.ALiBi(jnp.asarray(slopes))
        tree = PrefixTree.from_beam(jnp.asarray([[[5, 7, 8], [5, 9, -1]]] * B), capacity=4)
        parallel = SequenceParallel("s")
        cache = KVCache.empty(B, 16, K, H, dtype=jnp.float64, parallel=parallel, block_size=2)
        cache = cache.append(x["key"][:, :13], x["value"][:, :13])
        state = cache.attend(x["query"][:, rows], score=score)
        energy = cache.at(x["query"][:, rows], energy=ea.FreeEnergy(score=score))()
        nodes = (x[name][:, 12:16] for name in ("query", "key", "value"))
        drafts = tree_decode(*nodes, tree=tree, cache=cache, score=score)
        return (*state, energy), tuple(drafts)

    @jax.jit
    def exact(x):
        alibi, parameters = CASES["alibi"], {"slopes": slopes}
        given = {name: a[:, :13] for name, a in x.items()} | {"query": x["query"][:, rows]}
        at = np.array([[12]])
        out, lse = dense_energy(alibi, given, parameters, scale=H**-0.5, queries=at)
        keys = np.concatenate([np.arange(13), place])
        ancestors = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]], bool)
        seen = np.concatenate([np.ones((4, 13), bool), ancestors], 1)
        given = {name: jnp.concatenate([a[:, :13], a[:, 12:16]], 1) for name, a in x.items()}
        given["query"] = x["query"][:, 12:16]
        places = {"seen": seen, "queries": place[None], "keys": keys[None]}
        drafts = dense_energy(alibi, given, parameters, scale=H**-0.5, **places)
        return (out, lse, lse), drafts

    with jax.set_mesh(make_mesh((4,), ("s",), devices=jax.devices()[:4])):
        close(run(ARRAYS), exact(ARRAYS))


@pytest.mark.full
@pytest.mark.parametrize("batch", [1, 3])
def test_vmap_over_queries_of_a_cache(batch):
    """Numbers of heads that are taken for an axis of the batch, or entries counted over all mapped calls."""
    score = scores.Function(lambda s, at: s * (1 + at.batch + 2 * at.head).astype(s.dtype))
    rng = np.random.default_rng(2)
    key, value = rng.standard_normal((2, batch, 6, 4, 8))
    queries = rng.standard_normal((3, batch, 1, 8, 8))

    @jax.jit
    def run(queries, key, value):
        spread = SequenceParallel("device", heads="head")
        cache = KVCache.empty(batch, 8, 4, 8, dtype=jnp.float64, parallel=spread)
        cache = cache.append(key, value)

        def total(queries):
            out = jax.vmap(lambda query: cache.attend(query, score=score).out)(queries)
            return jnp.sin(out).sum(), out

        slopes, out = jax.grad(total, has_aux=True)(queries)
        return out, slopes

    with jax.set_mesh(make_mesh((4, 2), ("device", "head"))):
        out, slopes = run(queries, key, value)
    # the same as so many times the query
    times = 1.0 + np.arange(batch)[:, None, None, None] + 2 * np.arange(8)[:, None]
    for i, query in enumerate(queries):
        problem = Problem("of a cache", query * times, key, value)
        exact, lse = dense(problem)
        close(out[i], exact)
        wanted = dense_vjp(problem, np.cos(exact), np.zeros_like(lse))["query"]
        close(slopes[i], wanted * times)
