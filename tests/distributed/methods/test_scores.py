"""Scores over a mesh: every method, layout and split of heads and rows; the cache and prefix trees."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn import scores
from energy_attn.distributed import (
    KVCache,
    SequenceParallel,
    gather_attention,
    hybrid_attention,
    ring_attention,
    shard_sequence,
    tree_attention,
    ulysses_attention,
    unshard_sequence,
)
from energy_attn.prefix_tree import pack, tree_decode
from tests.support.meshes import close, in_parts, make_mesh
from tests.support.scores import CASES, dense_energy

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


def derivatives(f, x):
    """Of a function of `(arrays, parameters)` to a number: value, gradient, and that in a direction."""
    u = jax.tree.map(lambda a: jnp.asarray(np.cos(np.arange(a.size) + 1.0)).reshape(a.shape), x)
    return jax.jit(lambda: (jax.value_and_grad(f)(x), jax.jvp(jax.grad(f), (x,), (u,))[1]))()


@pytest.fixture(scope="module")
def wanted():
    x = jax.tree.map(jnp.asarray, (ARRAYS, CASE.parameters))
    return x, derivatives(lambda x: number(dense_energy(CASE, *x, scale=H**-0.5, seen=CAUSAL)), x)


def judge(found, wanted):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        close(x, y)


MESHES = {
    "four": ((4,), ("s",), {}),
    "heads": ((2, 2, 2), ("b", "h", "s"), {"heads": "h"}),
    "two axes": ((2, 2), ("n", "s"), {}),
}


@pytest.mark.product
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    ("mesh", "method"),
    [
        *itertools.product(("four", "heads"), ("tree", "ring", "ulysses", "gather")),
        ("two axes", "hybrid"),
    ],
)
def test_methods(mesh, method, layout, wanted):
    """A score that takes a device's heads, rows or positions for all; a part of a parameter's gradient."""
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
        judge(derivatives(run, wanted[0]), wanted[1])


def test_a_ring_in_parts(wanted, monkeypatch):
    """Heads that are computed one at a time and count from 0; the gradient of the last one's parameters alone."""
    in_parts(monkeypatch)
    test_methods("four", "ring", "contiguous", wanted)


def test_explicit_axes(wanted):
    """Rows, heads and keys that types split, and parameters that are split, too."""
    mesh = jax.make_mesh((2, 2, 2), ("b", "h", "s"), axis_types=(AxisType.Explicit,) * 3)
    (arrays, parameters), exact = wanted
    specs = {name: P("b", "s", "h") for name in arrays}, {"gain": P("h"), "level": P("b")}

    def run(x):
        arrays, parameters = x
        return ea.attention(
            **arrays, is_causal=True, score=CASE.make(parameters), return_energy=True
        )

    with jax.set_mesh(mesh):
        put = jax.tree.map(
            lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)),
            (arrays, parameters),
            specs,
        )
        found = jax.jit(jax.value_and_grad(lambda x: number(run(x))))(put)
    judge(found, exact[0])


@pytest.mark.parametrize(
    "attend",
    [tree_attention, ring_attention, ulysses_attention, hybrid_attention, gather_attention],
)
def test_inside_shard_map(attend, wanted):
    """The functions for one's own `shard_map`: heads that Ulysses moves, gradients of replicated parameters."""
    more = {"queries_sharded": True} if attend in (tree_attention, ring_attention) else {}
    axes = ("n", "s")

    def run(arrays, positions, parameters):
        score = CASE.make(parameters)
        given = {"query_positions": positions, "key_positions": positions, "is_causal": True}
        return tuple(attend(**arrays, **given, **more, score=score, axis_name=axes))

    (arrays, parameters), exact = wanted
    positions = jnp.arange(T, dtype=jnp.int32)[None]
    split = P(None, axes)
    with jax.set_mesh(make_mesh((2, 2), axes, devices=jax.devices()[:4])):
        mapped = jax.shard_map(run, in_specs=(split, split, P()), out_specs=split)
        f = jax.jit(jax.value_and_grad(lambda x: number(mapped(x[0], positions, x[1]))))
        judge(f((arrays, parameters)), exact[0])
    with pytest.raises(ValueError, match=r"^key_positions: wanted .* score"):
        with jax.set_mesh(make_mesh((2, 2), axes, devices=jax.devices()[:4])):
            jax.shard_map(
                lambda a, p: tuple(attend(**a, **more, score=CASE.make(p), axis_name=axes)),
                in_specs=(split, P()),
                out_specs=split,
                check_vma=False,
            )(arrays, parameters)


def test_cache_and_trees():
    """A cache whose slots are taken for positions, or nodes of a tree that stand where their slot is."""
    x = jax.tree.map(jnp.asarray, ARRAYS)
    score = scores.ALiBi(jnp.asarray([0.5, 0.1, 0.01, 1.0]))
    parallel = SequenceParallel("s")
    # two drafts of a root: positions 13 | 14, 15 | 14
    tree = pack(jnp.asarray([[[5, 7, 8], [5, 9, -1]]] * B), capacity=4)
    place = np.array([13, 14, 15, 14])
    with jax.set_mesh(make_mesh((4,), ("s",), devices=jax.devices()[:4])):
        cache = KVCache.empty(B, 16, K, H, dtype=jnp.float64, parallel=parallel, block_size=2)
        cache = cache.append(x["key"][:, :13], x["value"][:, :13])
        state = cache.attend(x["query"][:, 12:13], score=score)
        rows = slice(12, 13)
        measure = cache.at(x["query"][:, rows], energy=ea.FreeEnergy(score=score))
        energy = measure()
        nodes = (x[name][:, 12:16] for name in ("query", "key", "value"))
        drafts = tree_decode(*nodes, tree=tree, cache=cache, score=score)

    alibi = CASES["alibi"]
    given = {name: a[:, :13] for name, a in x.items()} | {"query": x["query"][:, rows]}
    parameters = {"slopes": score.slopes}
    out, lse = dense_energy(alibi, given, parameters, scale=H**-0.5, queries=np.array([[12]]))
    for found, exact in zip((state.out, state.lse, energy), (out, lse, lse), strict=True):
        close(found, exact)
    keys = np.concatenate([np.arange(13), place])
    ancestors = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]], bool)
    seen = np.concatenate([np.ones((4, 13), bool), ancestors], 1)
    given = {name: jnp.concatenate([a[:, :13], a[:, 12:16]], 1) for name, a in x.items()}
    given["query"] = x["query"][:, 12:16]
    exact = dense_energy(
        alibi,
        given,
        parameters,
        scale=H**-0.5,
        seen=seen,
        queries=place[None],
        keys=keys[None],
    )
    for found, y in zip(drafts, exact, strict=True):
        close(found, y)


@pytest.mark.parametrize("batch", [1, 3])
def test_vmap_over_queries_of_a_cache(batch):
    """Numbers of heads that are taken for an axis of the batch, or entries counted over all mapped calls."""
    score = scores.Function(lambda s, at: s * (1 + at.batch + 2 * at.head).astype(s.dtype))
    rng = np.random.default_rng(2)
    key, value = jnp.asarray(rng.standard_normal((2, batch, 6, 4, 8)), jnp.float32)
    queries = jnp.asarray(rng.standard_normal((3, batch, 1, 8, 8)), jnp.float32)
    with jax.set_mesh(make_mesh((4, 2), ("device", "head"))):
        spread = SequenceParallel("device", heads="head")
        cache = KVCache.empty(batch, 8, 4, 8, dtype=jnp.float32, parallel=spread)
        cache = cache.append(key, value)

        def out(query):
            return cache.attend(query, score=score).out

        found = jax.jit(jax.vmap(out))(queries)
        exact = jnp.stack([out(query) for query in queries])
        back, of_each = (
            jax.jit(jax.grad(lambda x, f=f: jnp.sin(f(x)).sum()))(queries)
            for f in (jax.vmap(out), lambda x: jnp.stack([out(y) for y in x]))
        )
    np.testing.assert_allclose(found, exact, 1e-5, 1e-5)
    np.testing.assert_allclose(back, of_each, 1e-5, 1e-5)
