"""`KVCache(quantize="int8")` where a step reads what is stored, as on TPUs and GPUs, on one device and over meshes.

The judge is dense attention in float64 over the slots: their eight bits times their scales.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from energy_attn import scores
from energy_attn.distributed import KVCache, SequenceParallel, make_mesh
from energy_attn.prefix_tree import PrefixTree, tree_decode
from tests.support.arrays import array
from tests.support.caches import read_as_stored
from tests.support.masks import RULES
from tests.support.meshes import mesh_of, parallel_of
from tests.support.naive import assert_all_close
from tests.support.problems import Problem
from tests.support.programs import sent
from tests.support.reference import rows
from tests.support.scores import with_key
from tests.support.selection import few

B, K, N, T, WIDTHS = 3, 2, 4, 2, (24, 40)
ROUNDING = 32 * float(jnp.finfo(jnp.float32).eps)
COUNTS = 23, 9, 0  # no row reaches all of eight devices, and one none of them


@pytest.fixture
def as_stored(monkeypatch):
    jax.clear_caches()  # of the programs of other tests, which dequantize
    yield from read_as_stored(monkeypatch)
    jax.clear_caches()


def new_tokens(dtype=jnp.float32) -> tuple[jax.Array, ...]:
    """Keys and values of all rows, of sizes that differ."""
    rng = np.random.default_rng(0)
    return tuple(
        array(
            rng.standard_normal((B, 23, K, w)) * 10.0 ** rng.integers(-2, 1, (B, 23, K, 1)), dtype
        )
        for w in WIDTHS
    )


def filled(parallel: SequenceParallel | None, key, value, quantize="int8") -> KVCache:
    """A ragged cache, from one row of which tokens are evicted."""
    options = {"dtype": key.dtype, "quantize": quantize, "block_size": 2}
    cache = KVCache.empty(B, 32, K, *WIDTHS, **options, parallel=parallel)
    cache = cache.append(key, value, lengths=jnp.asarray(COUNTS, jnp.int32))
    return cache.evict(jnp.asarray([3, 0, 0], jnp.int32))


def queries(tokens=T, dtype=jnp.float32) -> jax.Array:
    return array(np.random.default_rng(1).standard_normal((B, tokens, N, WIDTHS[0])), dtype)


def ran(parallel: SequenceParallel | None, ask, query) -> tuple[Problem, Any, Any]:
    """The causal problem that a cache's slots are, what is asked of it and a query, and the one program of it all."""

    @jax.jit
    def run(key, value, query):
        cache = filled(parallel, key, value)
        return cache, cache.positions, ask(cache, query)

    program = run.lower(*new_tokens(), query).compile()
    cache, positions, found = program(*new_tokens(), query)
    numbers = (cache.key, cache.key_scale), (cache.value, cache.value_scale)
    stored = (np.asarray(x, np.float64) * np.asarray(s, np.float64)[..., None] for x, s in numbers)
    tokens = query.shape[1]
    problem = Problem(
        "stored",
        np.asarray(query, np.float64),
        *stored,
        query_positions=np.asarray(COUNTS)[:, None] - tokens + np.arange(tokens),
        key_positions=np.asarray(positions),
        is_causal=True,
    )
    return problem, found, program


def capped(problem: Problem) -> Problem:
    """With scores that are 2 tanh(s / 2), by a bias."""
    found = rows(problem).scores
    found = np.where(np.isfinite(found), found, 0.0)
    return replace(problem, bias=2 * np.tanh(found / 2) - found)


def check(found, problem: Problem, what: str) -> None:
    assert_all_close(found._asdict(), problem, jnp.float32, "both", label=what)


KINDS = [None, "8", "2x4", "8 explicit", "2x4 explicit"]
HEADS = "2x2x2, heads on an axis"
NAME, SHOWN = "documents_function", np.arange(32)[None, None, None] % 3 > 0
SINK = np.array([0.4, -0.9, 2.0, 0.0])
# what is asked of the cache, and of the judge
CALLS = {
    "window": (lambda: {"local_window_size": (5, 0)}, {"local_window_size": (5, 0)}),
    "rule": (lambda: {"mask": RULES[NAME].of(B), "is_causal": True}, {"rule": NAME}),
    "mask": (lambda: {"mask": jnp.asarray(SHOWN), "is_causal": True}, {"mask": SHOWN}),
}


def calls(cache, query, **options):
    return {name: cache.attend(query, **call(), **options) for name, (call, _) in CALLS.items()}


def spread_of(kind: str | None) -> SequenceParallel | None:
    if kind == HEADS:
        return SequenceParallel("device", heads="head")
    return None if kind is None else parallel_of(kind)


def mesh_for(kind: str | None) -> Mesh:
    if kind == HEADS:
        return make_mesh((2, 2, 2), ("data", "head", "device"))
    return mesh_of(kind or "8")


@pytest.mark.parametrize("kind", few([*KINDS, HEADS], HEADS))
def test_attend(kind, as_stored):
    """The scale of another slot, on a device that has a part of them; a mask, a window or a mask that slots shift.

    A sink merged on every device, a score of products without their scale; scales that are not sharded as their keys
    are, or sent: more than a state for each call.
    """

    def ask(cache, query):
        sink = cache.attend(query, sink=jnp.asarray(SINK, jnp.float32))
        return calls(cache, query), sink, cache.attend(query, score=scores.SoftCap(2.0))

    with jax.set_mesh(mesh_for(kind)):
        problem, (found, sink, score), program = ran(spread_of(kind), ask, queries())
    assert len(as_stored) == len(CALLS) + 2
    state = B * T * N * (WIDTHS[1] + 1) * 4
    if kind is not None:
        sizes = [size * count for _, size, count, _ in sent(program)]
        assert sum(sizes) <= 2 * state * (len(CALLS) + 2)
    for name, (_, said) in CALLS.items():
        check(found[name], replace(problem, **said), name)
    check(sink, with_key(problem, SINK), "sink")
    check(score, capped(problem), "score")


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_trees(kind, as_stored, monkeypatch):
    """A tree over other keys than those of its cache."""
    rng = np.random.default_rng(2)
    nodes = [array(rng.standard_normal((B, 3, K, width)), jnp.float32) for width in WIDTHS]

    def run(key, value):
        tree = PrefixTree.from_beam(jnp.asarray([[[1, 2], [1, 3]]] * B, jnp.int32), capacity=3)
        cache = filled(spread_of(kind), key, value)
        return tree_decode(queries(3), *nodes, tree=tree, cache=cache)

    with jax.set_mesh(mesh_of(kind or "8")):
        found = jax.jit(run)(*new_tokens())
        assert len(as_stored) == 1
        monkeypatch.undo()
        jax.clear_caches()
        exact = jax.jit(run)(*new_tokens())
    for mine, dequantized in zip(*map(jax.tree.leaves, (found, exact)), strict=True):
        np.testing.assert_allclose(mine, dequantized, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("method", few(["ring", "gather"], "ring"))
def test_other_methods_dequantize(method, as_stored):
    """Eight bits that a ring takes for keys."""
    with jax.set_mesh(mesh_of("8")):
        spread = SequenceParallel("device", method=method, queries_sharded=True)
        problem, found, _ = ran(spread, KVCache.attend, queries(8))
    check(found, problem, method)
