"""A sink over devices: counted once by every method, merge and layout, in a cache and a tree, and inside `shard_map`.

The judge is dense attention with one more key, in float64.
"""

import functools
from dataclasses import replace

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
    ring_attention,
    tree_attention,
    ulysses_attention,
    unshard_sequence,
)
from energy_attn.prefix_tree import pack, tree_decode
from tests.support.measures import answers, measure
from tests.support.meshes import close, mesh_of
from tests.support.methods import (
    AXES,
    DECODE,
    EMPTY,
    GROUPED,
    METHODS,
    ODD,
    SELF,
    is_whole,
    laid_out,
    static_options,
)
from tests.support.observables import directions, exactly
from tests.support.problems import Problem, cast, cotangents
from tests.support.reference import dense, dense_vjp, rows
from tests.support.selection import few, few_rows
from tests.support.sinks import gradient_of, sink_of, with_key


def check(problem: Problem, parallel: SequenceParallel, mesh: str, batched=False, place=None):
    """Attention, energies and all gradients at the problem's source, against the judge's."""
    static, sink = static_options(problem), sink_of(problem, batched)
    whole = with_key(problem, sink)

    def pair(arrays):
        sink = arrays["sink"]
        arrays = laid_out(problem, parallel, {n: x for n, x in arrays.items() if n != "sink"})
        source = arrays.pop("source")

        def total(source):
            energy = ea.free_energy(**arrays, source=source, **static, sink=sink, parallel=parallel)
            return energy.sum(), energy

        found = jax.grad(total, has_aux=True)(source)
        if not is_whole(problem) or parallel.layout == "contiguous":
            return found
        return tuple(unshard_sequence(x, parallel) for x in found)

    @jax.jit
    def run(arrays, given):
        found, back = jax.vjp(pair, arrays)
        if place is not None:  # cotangents of the types of the results
            given = tuple(
                jax.reshard(x, jax.typeof(y).sharding) for x, y in zip(given, found, strict=True)
            )
        return found, back(given)[0]

    arrays = cast(problem, jnp.float64)[0] | {"sink": jnp.asarray(sink)}
    given = cotangents(problem, jnp.float64)
    with jax.set_mesh(mesh_of(mesh)):
        if place is not None:
            arrays |= {n: jax.device_put(arrays[n], spec) for n, spec in place.items()}
        (out, energy), gradients = run(arrays, given)
    close(out, dense(whole)[0], "attention")
    close(energy, dense(whole)[1], "energy")
    exact = gradient_of(problem, sink, dense_vjp(whole, *map(np.asarray, given)))
    for name, x in exact.items():
        close(gradients[name], x, name)


@pytest.mark.parametrize(
    ("method", "layout", "problem"),
    few_rows(
        [
            ("tree", "contiguous", DECODE),
            ("ring", "zigzag", SELF),
            ("ulysses", "striped", SELF),
            ("hybrid", "zigzag", SELF),
            ("gather", "contiguous", ODD),
            ("tree", "zigzag", SELF),
            ("tree", "contiguous", EMPTY),
            ("ring", "contiguous", ODD),
            ("ring", "contiguous", GROUPED),
            ("ulysses", "contiguous", EMPTY),
        ],
        5,
    ),
    ids=str,
)
def test_methods(method, layout, problem):
    """A sink counted on each of eight devices, or on none; its gradient summed over devices once too often."""
    parallel = SequenceParallel(AXES, method, layout=layout)
    check(problem, parallel, "2x4", batched=method != "tree")


@pytest.mark.parametrize("merge", few(cost.MERGES, "hierarchical"))
def test_merges(merge):
    """A merge that folds the sink with the states of the devices."""
    check(DECODE, SequenceParallel(AXES, "tree", merge), "2x4")


def test_heads():
    """A sink of all heads on each of the devices that share them."""
    parallel = SequenceParallel("device", heads="node")
    check(DECODE, parallel, "2x4", batched=True)
    check(SELF, parallel, "2x4", place={"sink": P("node")})


def test_types():
    """A sink that mesh axes in the types of the other arrays do not let in."""
    plain = replace(DECODE, bias=None, mask=None)
    parallel = SequenceParallel("device", heads="node")
    sharded = P(None, "device", "node")
    place = {"key": sharded, "value": sharded, "sink": P("node")}
    place |= {"query": P(None, None, "node"), "source": P(None, None, "node")}
    check(plain, parallel, "2x4 explicit", place=place)
    check(plain, parallel, "2x4 explicit", place={n: x for n, x in place.items() if n != "sink"})


@pytest.mark.full
@pytest.mark.parametrize("problem", [DECODE, SELF])
def test_observables(problem):
    """A sink that each device's part of the keys brings to a reduction."""
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
    for name, x in exactly(replace(whole, name=problem.name)).items():
        close(found[name], x, name)
    exact, drawn = rows(whole).weights, np.asarray(drawn)
    for b, t, n in np.ndindex(drawn.shape[:-1]):
        assert (drawn[b, t, n] >= 0).all() == (exact[b, n, t].sum() > 0)
        assert (exact[b, n, t, drawn[b, t, n][drawn[b, t, n] >= 0]] > 0).all()


INSIDE = {
    "tree": (tree_attention, {}, P()),
    "tree of shards": (tree_attention, {"queries_sharded": True}, P(None, "device")),
    "ring": (ring_attention, {"rotate": "keys"}, P(None, "device")),
    "ring of queries": (ring_attention, {"rotate": "queries"}, P(None, "device")),
    "ulysses": (ulysses_attention, {}, P(None, "device")),
    "energy": (None, {}, P(None, "device")),
}


@pytest.mark.parametrize("method", list(INSIDE))
def test_inside_shard_map(method):
    """A sink merged before the fold, by each device; a gradient that is one device's."""
    attend, options, queries = INSIDE[method]
    problem = replace(SELF, source=None, bias=None, mask=None, is_causal=False)
    problem = replace(problem, local_window_size=None, query_seq_lengths=None)
    problem = replace(problem, key_value_seq_lengths=None)
    problem = replace(problem, query_segment_ids=None, key_segment_ids=None)
    sink = sink_of(problem)
    keys = P(None, "device")

    def local(query, key, value, sink):
        if attend is None:
            parallel = SequenceParallel("device")
            return ea.attention(
                query, key, value, scale=0.4, sink=sink, parallel=parallel, return_energy=True
            )
        return tuple(attend(query, key, value, scale=0.4, sink=sink, axis_name="device", **options))

    run = jax.shard_map(local, in_specs=(queries, keys, keys, P()), out_specs=(queries, queries))
    arrays = cast(problem, jnp.float64)[0] | {"sink": jnp.asarray(sink)}
    given = cotangents(problem, jnp.float64)
    whole = with_key(problem, sink)
    with jax.set_mesh(mesh_of("8")):
        found, back = jax.vjp(jax.jit(run), *arrays.values())
        gradients = dict(zip(arrays, back(given), strict=True))
    close(found[0], dense(whole)[0], "attention")
    close(found[1], dense(whole)[1], "energy")
    exact = gradient_of(problem, sink, dense_vjp(whole, *map(np.asarray, given)))
    for name, x in exact.items():
        close(gradients[name], x, name)


@pytest.mark.parametrize("mesh", few([None, "8", "2x4 explicit"], "8"))
def test_cache_and_tree(mesh):
    """A sink counted with the cache and again with the tree; one that each device of a cache adds."""
    rng = np.random.default_rng(0)
    sink = jnp.asarray(rng.standard_normal(4))
    keys, values = jnp.asarray(rng.standard_normal((2, 1, 11, 2, 5)))
    query = jnp.asarray(rng.standard_normal((1, 4, 4, 5)))
    new_keys, new_values = jnp.asarray(rng.standard_normal((2, 1, 4, 2, 5)))
    tree = pack(jnp.array([[[5, 7, 1], [5, 8, 2]]]), capacity=4)

    def run(keys, values, query, sink):
        axes = {"8": "device", "2x4 explicit": AXES}
        parallel = None if mesh is None else SequenceParallel(axes[mesh])
        cache = KVCache.empty(
            1, 32, 2, 5, dtype=jnp.float64, block_size=2, parallel=parallel
        ).append(keys, values)
        asked = cache.attend(query[:, :1], sink=sink)
        at = cache.at(query[:, :1], energy=ea.FreeEnergy(sink=sink))
        nodes = tree_decode(query, new_keys, new_values, tree=tree, cache=cache, sink=sink)
        return asked, at.attention(return_energy=True), nodes, at.entropy()

    def exact(keys, values, query, sink):
        asked = ea.attention(
            query[:, :1], keys, values, sink=sink, return_energy=True, implementation="reference"
        )
        own = jnp.broadcast_to(jnp.ones(11, bool), (1, 1, 4, 11))
        mask = jnp.concatenate([own, tree.mask[:, None]], -1)
        whole = (jnp.concatenate(x, 1) for x in ((keys, new_keys), (values, new_values)))
        nodes = ea.attention(
            query, *whole, mask=mask, sink=sink, return_energy=True, implementation="reference"
        )
        F = ea.FreeEnergy(sink=sink).at(query[:, :1], keys, values)
        return asked, asked, nodes, F.entropy()

    def total(f):
        return jax.jit(jax.grad(lambda *x: sum(y.sum() for y in jax.tree.leaves(f(*x))), range(4)))

    arrays = keys, values, query, sink
    wanted, of_wanted = jax.jit(exact)(*arrays), total(exact)(*arrays)

    def compare():
        for x, y in zip(jax.tree.leaves(run_jit(*arrays)), jax.tree.leaves(wanted), strict=True):
            close(x, y)
        for x, y in zip(total(run)(*arrays), of_wanted, strict=True):
            close(x, y, tolerance=1e-10)

    run_jit = jax.jit(run)
    if mesh is None:
        return compare()
    with jax.set_mesh(mesh_of(mesh)):
        compare()


@pytest.mark.full
def test_second_order():
    """A second derivative that a device's part of a sum over devices is left out of, in the sink and in the keys."""
    problem = replace(SELF, source=None, bias=None)
    sink = jnp.asarray(sink_of(problem))
    arrays, _ = cast(problem, jnp.float64)

    def loss(key, sink, **options):
        out, energy = ea.attention(
            **(arrays | {"key": key}), **problem.options, sink=sink, return_energy=True, **options
        )
        return jnp.sin(out).sum() + jnp.where(energy == -jnp.inf, 0.0, energy).sum()

    rng = np.random.default_rng(0)
    along = tuple(jnp.asarray(rng.standard_normal(x.shape)) for x in (arrays["key"], sink))

    def product(**options):
        gradient = jax.grad(functools.partial(loss, **options), (0, 1))
        return jax.jit(lambda *x: jax.jvp(gradient, x, along)[1])(arrays["key"], sink)

    exact = product(implementation="reference")
    for method in METHODS:
        with jax.set_mesh(mesh_of("2x4")):
            found = product(parallel=SequenceParallel(AXES, method))
        for x, y in zip(found, exact, strict=True):
            close(x, y, method, 1e-10)
