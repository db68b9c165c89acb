"""`KVCache(quantize="int8")` where a step reads what is stored, as on TPUs and GPUs, on one device and over meshes.

The judge is dense attention in float64 over the slots: their eight bits times their scales.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn import scores
from energy_attn.distributed import KVCache, SequenceParallel, collectives, make_mesh
from energy_attn.prefix_tree import pack, tree_decode
from tests.support.eight_bits import read_as_stored, read_by_kernels
from tests.support.meshes import mesh_of, parallel_of
from tests.support.naive import assert_all_close
from tests.support.problems import Problem
from tests.support.rules import RULES
from tests.support.selection import few

B, K, N, T, WIDTHS = 3, 2, 4, 2, (24, 40)
ROUNDING = 32 * float(jnp.finfo(jnp.float32).eps)
COUNTS = 23, 9, 0  # no row reaches all of eight devices, and one none of them


@pytest.fixture
def as_stored(monkeypatch):
    jax.clear_caches()  # of the programs of other tests, which widen
    yield from read_as_stored(monkeypatch)
    jax.clear_caches()


@pytest.fixture
def not_widened(monkeypatch):
    yield from read_by_kernels(monkeypatch)


def filled(parallel: SequenceParallel | None, **options) -> KVCache:
    """A ragged cache, from one row of which tokens are evicted."""
    rng = np.random.default_rng(0)
    new = (
        rng.standard_normal((B, 23, K, width)) * 10.0 ** rng.integers(-2, 1, (B, 23, K, 1))
        for width in WIDTHS
    )
    cache = KVCache.empty(
        B,
        32,
        K,
        *WIDTHS,
        **{"dtype": jnp.float32, "quantize": "int8", "block_size": 2} | options,
        parallel=parallel,
    )
    key, value = (jnp.asarray(x, cache.dtype) for x in new)
    counts = jnp.asarray(COUNTS, jnp.int32)
    return jax.jit(KVCache.append)(cache, key, value, lengths=counts).evict(jnp.asarray([3, 0, 0]))


def queries(cache: KVCache, tokens=T) -> jax.Array:
    drawn = np.random.default_rng(1).standard_normal((B, tokens, N, WIDTHS[0]))
    return jnp.asarray(drawn, cache.dtype)


def problem_of(cache: KVCache, query, **options) -> Problem:
    numbers = (cache.key, cache.key_scale), (cache.value, cache.value_scale)
    stored = (np.asarray(x, np.float64) * np.asarray(s, np.float64)[..., None] for x, s in numbers)
    tokens = query.shape[1]
    positions = np.asarray(COUNTS)[:, None] - tokens + np.arange(tokens)
    return Problem(
        "stored",
        np.asarray(query, np.float64),
        *stored,
        query_positions=positions,
        key_positions=np.asarray(cache.positions),
        **options,
    )


def sent(program) -> list[tuple]:
    return [(c.kind, c.bytes, c.count, c.groups) for c in collectives(program)]


KINDS = [None, "8", "2x4", "8 explicit", "2x4 explicit"]
NAME, SHOWN = "documents_function", np.arange(32)[None, None, None] % 3 > 0
# what is asked of the cache, and of the judge
CALLS = {
    "causal": ({}, {}),
    "window": ({"local_window_size": (5, 0)}, {"local_window_size": (5, 0)}),
    "rule": ({"mask": RULES[NAME].of(B), "is_causal": True}, {"rule": NAME}),
    "mask": ({"mask": jnp.asarray(SHOWN), "is_causal": True}, {"mask": SHOWN}),
}


@pytest.mark.parametrize("kind", few(KINDS, None, "2x4", "8 explicit"))
def test_attend(kind, as_stored):
    """The scale of another slot, on a device that has a part of them; a rule, a window or a mask that slots shift."""

    def run(cache, query):
        return {name: cache.attend(query, **call)._asdict() for name, (call, _) in CALLS.items()}

    with jax.set_mesh(mesh_of(kind or "8")):
        cache = filled(None if kind is None else parallel_of(kind))
        query = queries(cache)
        found = jax.jit(run)(cache, query)
        assert len(as_stored) == len(CALLS)
        for name, (_, said) in CALLS.items():
            problem = problem_of(cache, query, is_causal=True, **said)
            assert_all_close(found[name], problem, jnp.float32, "both", label=name)


@pytest.mark.parametrize("kind", few(KINDS, None, "2x4"))
def test_attend_on_gpus(kind, not_widened):
    """The same in the kernel for GPUs, which takes no array for a mask; scales that are sent."""
    asked = {name: call for name, call in CALLS.items() if name != "mask"}

    def run(cache, query):
        return {
            name: cache.attend(query, implementation="pallas_gpu", **call)._asdict()
            for name, (call, _) in asked.items()
        }

    with jax.set_mesh(mesh_of(kind or "8")):
        parallel = None if kind is None else parallel_of(kind)
        cache, plain = (filled(parallel, quantize=x) for x in ("int8", None))
        query = queries(cache)
        program = jax.jit(run).lower(cache, query).compile()
        assert sent(program) == sent(jax.jit(run).lower(plain, query).compile())
        found = program(cache, query)
        for name, (_, said) in asked.items():
            problem = problem_of(cache, query, is_causal=True, **said)
            assert_all_close(found[name], problem, jnp.float32, "both", label=name)


@pytest.mark.parametrize("kind", few(KINDS, "8"))
def test_sinks_scores_and_trees(kind, as_stored, monkeypatch):
    """A sink merged on every device, a score of products without their scale, a tree over other keys."""
    tree = pack(jnp.asarray([[[1, 2], [1, 3]]] * B, jnp.int32), capacity=3)
    sink, score = jnp.asarray([0.4, -0.9, 2.0, 0.0], jnp.float32), scores.SoftCap(2.0)
    rng = np.random.default_rng(2)
    nodes = [jnp.asarray(rng.standard_normal((B, 3, K, width)), jnp.float32) for width in WIDTHS]

    def run(cache):
        query = queries(cache)
        return (
            cache.attend(query, sink=sink),
            cache.attend(query, score=score),
            tree_decode(queries(cache, 3), *nodes, tree=tree, cache=cache),
        )

    with jax.set_mesh(mesh_of(kind or "8")):
        cache = filled(None if kind is None else parallel_of(kind))
        found = jax.jit(run)(cache)
        assert len(as_stored) == 3
        monkeypatch.undo()
        jax.clear_caches()
        exact = jax.jit(run)(cache)
    for mine, widened in zip(*map(jax.tree.leaves, (found, exact)), strict=True):
        np.testing.assert_allclose(mine, widened, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("kind", few(["8", "2x4 explicit"], "8"))
def test_collectives(kind, as_stored):
    """Scales or keys that are sent: a step sends what it does over a cache that is not quantised."""
    found = []
    with jax.set_mesh(mesh_of(kind)):
        for quantize in "int8", None:
            cache = filled(parallel_of(kind), quantize=quantize)
            step = jax.jit(lambda cache: cache.attend(queries(cache))).lower(cache).compile()
            found.append(sent(step))
    assert len(as_stored) == 1
    assert found[0] == found[1] != []


def test_heads_and_rows_on_other_axes(as_stored):
    """Scales that are not sharded as their keys are."""
    mesh = make_mesh((2, 2, 2), ("data", "head", "device"))
    with jax.set_mesh(mesh):
        cache = filled(None)
        query = queries(cache)
        exact = cache.attend(query)
        spread = SequenceParallel("device", heads="head")
        found = filled(spread).attend(query)
    assert as_stored
    for x, y in zip(found, exact, strict=True):
        np.testing.assert_allclose(x, y, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("method", few(["ring", "gather"], "ring"))
def test_other_methods_widen(method, as_stored):
    """Eight bits that a ring takes for keys."""
    with jax.set_mesh(mesh_of("8")):
        spread = SequenceParallel("device", method=method, split_queries=True)
        cache = filled(spread)
        query = queries(cache, 8)
        found = cache.attend(query)
        exact = filled(None).attend(query, implementation="blockwise")
    for x, y in zip(found, exact, strict=True):
        np.testing.assert_allclose(x, y, rtol=ROUNDING, atol=ROUNDING)
