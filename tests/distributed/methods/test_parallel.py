"""`free_energy` and `attention` with keys sharded over a mesh: equal to the dense reference, and as cheap as promised.

By `parallel=` and by what `jax.typeof(key)` says; energies, outputs and all gradients. Then what the compiled programs
send between devices, which is what the method is for.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn.distributed import SequenceParallel, collectives, make_mesh
from energy_attn.kernels import local_attention
from tests.support.compare import close
from tests.support.flags import spawn
from tests.support.meshes import (
    AXES,
    SHAPES,
    batches_psum,
    check,
    judge,
    mesh_of,
    on_host,
    parallel_of,
    state_and_gradients,
    with_gradients,
)
from tests.support.problems import PROBLEMS, _make, cast, cotangents, everything
from tests.support.reference import dense, dense_vjp
from tests.support.selection import few, few_rows

EVEN = everything("even", B=2, T=5, S=16)  # S divides by 8, as arrays sharded by their types must


@pytest.mark.parametrize(
    ("name", "kind"),
    few_rows(
        [
            ("primes", "2x4"),
            ("everything", "8"),
            ("decode_source", "2x4"),
            ("positions_causal", "8"),
        ]
    ),
)
def test_spread(name, kind):
    """Keys in the wrong order or place, padding that is seen, positions that count from the shard, a gradient lost.

    Numbers of keys that 8 does not divide (13, 13, 41) and that are below 8 (7); batches, several queries, grouped
    heads, causal, windows, ragged rows, bias, mask and source are all among them.
    """
    judge(PROBLEMS[name], parallel_of(kind), kind)


@pytest.mark.parametrize(
    ("name", "method"),
    few_rows(
        [
            *(("everything", method) for method in ("hybrid", "tree", "ring", "gather")),
            ("positions_causal", "tree"),
        ]
    ),
)
def test_queries_and_heads_split(name, method):
    """Fewer queries than keys, and heads on an axis of their own: a part in the wrong place, a gradient lost.

    Numbers of queries that 4 does not divide (11, 5), biases and masks for each head, and a source.
    """
    parallel = SequenceParallel(AXES, method, queries_sharded=True, heads="tensor")
    judge(PROBLEMS[name], parallel, make_mesh((2, 2, 2), (*AXES, "tensor")))


def typed(arrays, mesh, axes, batch=None):
    """The arrays on a mesh: keys, values and their biases sharded along their sequence, rows over `batch`."""
    keys, rows = P(batch, axes), P(batch)
    specs = {"key": keys, "value": keys, "bias": P(None, None, None, axes)}
    specs |= {"query": rows, "source": rows}
    return {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()}


def test_types_that_differ():
    """Arrays whose types are split otherwise than the keys' refused by JAX deep inside: they are brought together.

    Eagerly, with a batch and without one.
    """
    problem = replace(PROBLEMS["plain"], query=EVEN.query[..., :2, :], key=EVEN.key, value=EVEN.key)
    mesh, whole = mesh_of("2x4 explicit"), problem.arrays
    placed = [
        {"query": P(None, None), "key": P(None, "device"), "value": P()},
        {"query": P(), "key": P(None, None, "node"), "value": P(None, "device")},
    ]
    with jax.set_mesh(mesh):
        for specs in placed:
            arrays = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in whole.items()}
            close(ea.attention(**arrays), dense(problem)[0], str(specs))
        first = {n: jax.reshard(x[0], P(*specs[n][1:])) for n, x in arrays.items()}
        close(ea.attention(**first), dense(problem)[0][0], "the sequence is the first axis")


@pytest.mark.full
@pytest.mark.parametrize(
    "kinds", [("auto", "auto"), ("auto", "explicit"), ("explicit", "explicit")], ids="-".join
)
def test_batch_on_another_axis(kinds):
    """A mesh axis that is not ours (a batch over it) summed over as well, or refused."""
    types = tuple(AxisType.Auto if kind == "auto" else AxisType.Explicit for kind in kinds)
    mesh = jax.make_mesh((2, 4), ("data", "device"), axis_types=types)
    parallel = SequenceParallel("device") if kinds[1] == "auto" else None
    arrays, given = on_host(EVEN)
    batch = "data" if kinds[0] == kinds[1] else None
    with jax.set_mesh(mesh):
        if batch:
            given = jax.device_put(given, NamedSharding(mesh, P(batch)))
        check(
            state_and_gradients(EVEN, parallel)(typed(arrays, mesh, "device", batch), given), EVEN
        )


@pytest.mark.parametrize("method", few(["tree", "ring"], "tree"))
def test_rows_of_an_automatic_axis(method):
    """Rows that the compiler gathers, as no type says that they are sharded; bias and lengths of other rows."""
    mesh = make_mesh((2, 4), ("data", "device"))
    parallel = SequenceParallel("device", method, "gather", queries_sharded=False, batch="data")
    arrays, given = on_host(EVEN)
    with jax.set_mesh(mesh):
        arrays = typed(arrays, mesh, "device", batch="data")
        given = jax.device_put(given, NamedSharding(mesh, P("data")))
        run = state_and_gradients(EVEN, parallel).lower(arrays, given).compile()
        check(run(arrays, given), EVEN)
    sent = {(c.kind, c.group_size) for c in collectives(run)}
    # the query's gradient is a sum over the devices, that of the bias one over the rows
    moved = {"tree": "all-gather", "ring": "collective-permute"}[method]
    assert sent == {(moved, 4), ("all-reduce", 4), ("all-reduce", 2)}


@pytest.mark.full
@batches_psum
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_mapped_over_an_explicit_axis(implementation):
    """Grouped heads under a `vmap` over a batch that types split: reshapes that JAX refuses, as a model's block meets.

    The state and its gradients, their own derivative, and an observable.
    """
    problem = replace(PROBLEMS["grouped"], key=EVEN.key, value=EVEN.value)
    arrays, _ = cast(problem, jnp.float64)
    given = cotangents(problem, jnp.float64)

    def attend(query, key, value):
        return ea.attention(query, key, value, implementation=implementation, return_energy=True)

    def state(arrays):
        return jax.vmap(attend)(**arrays)

    def ask(query, key, value):
        return ea.FreeEnergy().at(query, key, value).entropy()

    @jax.jit
    def run(arrays, cotangent):
        found, back = jax.vjp(state, arrays)
        (slope,) = back(cotangent)
        twice = jax.grad(lambda x: (jax.vjp(state, x)[1](cotangent)[0]["query"] ** 2).sum())
        return found, slope, twice(arrays), jax.vmap(ask)(**arrays)

    *_, twice, entropy = run(arrays, given)
    mesh = make_mesh((2, 4), ("batch", "device"), explicit=True)
    with jax.set_mesh(mesh):
        arrays = typed(arrays, mesh, "device", batch="batch")
        given = jax.device_put(given, NamedSharding(mesh, P("batch")))
        *found, twice_spread, entropy_spread = run(arrays, given)
    check(found, problem)
    close([entropy_spread, twice_spread], [entropy, twice])


def test_heads_on_another_axis():
    """Heads that types split, gathered, or folded with each other; nothing but the keys' states is sent.

    Gradients have the shardings of their arrays.
    """
    mesh = make_mesh((2, 4), ("model", "device"), explicit=True)
    arrays, given = on_host(EVEN)
    heads = P(None, None, "model")
    specs = {name: P(None, "device", "model") for name in ("key", "value")}
    specs |= {"query": heads, "source": heads, "bias": P(None, "model", None, "device")}
    run = state_and_gradients(EVEN)
    with jax.set_mesh(mesh):
        arrays = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()}
        given = jax.device_put(given, NamedSharding(mesh, heads))
        compiled = run.lower(arrays, given).compile()
        state = compiled(arrays, given)
    check(state, EVEN)
    for name, x in state[1].items():
        assert x.sharding.is_equivalent_to(arrays[name].sharding, x.ndim), name
    found = collectives(compiled)
    assert {c.group_size for c in found} == {4}
    half = 8 * EVEN.key.size // 8  # of one device, in bytes
    assert all(c.bytes != half for c in found), found


BFLOAT16 = """
import os
import jax, jax.numpy as jnp, numpy as np
import energy_attn as ea
from energy_attn.distributed import SequenceParallel, make_mesh

arrays = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8), jnp.bfloat16)

def loss(query, key, value, **options):
    out, energy = ea.attention(query, key, value, return_energy=True, **options)
    return (out.astype(energy.dtype) ** 2).sum() + energy.sum(), out

for rows, method, merge in CASES:
    parallel = SequenceParallel(("node", "device"), method, merge)
    query, key, value = arrays[0, :, :rows], *arrays[1:]
    def slope(query, key, value, **options):
        return jax.grad(lambda *x: loss(*x, **options), (0, 1, 2), has_aux=True)(query, key, value)
    def run(*arrays, **options):
        program = jax.jit(lambda *x: slope(*x, **options))
        return jax.device_get(program(*arrays))
    with jax.set_mesh(make_mesh((2, 2, 2), ("data", "node", "device"))):
        found = run(query, key, value, parallel=parallel)
    with jax.enable_x64():
        exact = run(*(np.asarray(x, np.float64) for x in (query, key, value)))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, atol=0.02 * np.abs(y).max())
print("done")
"""


@pytest.mark.full
def test_bfloat16_beside_another_axis():
    """Sums of bfloat16 over some axes of a mesh, on which XLA:CPU aborts the process: a process of their own."""
    cases = [(16, "tree", "auto"), (1, "ring", "auto")]
    cases += [(1, "tree", merge) for merge in ("gather", "hierarchical")]
    assert spawn("-c", BFLOAT16.replace("CASES", repr(cases)), devices=8) == "done\n"


@pytest.mark.parametrize("implementation", few([None, "reference"], None))
def test_inside_shard_map(implementation):
    """A zero source that is equal on all devices: its gradient, attention, would be summed over them, in silence.

    Batches split by a `jax.shard_map` of the user's own: attention and its gradients are those of each device, and
    those of weights that all share (here the query) are summed. The gradient of F in a shared source is a sum, too.
    """
    problem = PROBLEMS["plain"]
    # a batch of 8, and a query that all share
    arrays = {n: np.concatenate([x, 2 * x, 3 * x, -x]) for n, x in problem.arrays.items()}
    arrays["query"] = arrays["query"][:1]
    everyone = replace(problem, **arrays | {"query": np.repeat(arrays["query"], 8, axis=0)})
    out, lse = dense(everyone)
    weight = problem.rng("weight").standard_normal(out.shape)
    rows, options = P("device"), {"implementation": implementation}
    specs = ({"query": P(), "key": rows, "value": rows},)

    def attend(arrays):
        return ea.attention(**arrays, **options)

    def of_source(arrays):
        def total(source):
            return ea.free_energy(**arrays, source=source, **options).sum()

        return jax.grad(total)(np.zeros_like(out[:1]))  # equal on all devices, as the source is

    with jax.set_mesh(mesh_of("8")):
        spread = jax.shard_map(attend, in_specs=specs, out_specs=rows)
        found, gradients = with_gradients(spread)(arrays, weight)
        shared = jax.jit(jax.shard_map(of_source, in_specs=specs, out_specs=P()))(arrays)
    exact = dense_vjp(everyone, weight, np.zeros_like(lse))
    exact["query"] = exact["query"].sum(0, keepdims=True)
    close(found, out)
    close(gradients, exact)
    close(shared, out.sum(0, keepdims=True))


def test_inside_shard_map_costs_the_kernel():
    """A source of zeros concatenated to the query where the zero has to differ between devices: half as much again."""
    query, key = (jax.ShapeDtypeStruct((8, n, h, H), "float32") for n, h in ((1, N), (512, K)))
    with jax.set_mesh(mesh_of("8")):
        by_hand, attention = (
            jax.jit(jax.shard_map(f, in_specs=P("device"), out_specs=P("device")))
            .lower(query, key, key)
            .compile()
            .cost_analysis()
            for f in (lambda *x: local_attention(*x).out, ea.attention)
        )
    for what in ("flops", "bytes accessed"):
        np.testing.assert_allclose(attention[what], by_hand[what], rtol=0.02)


def test_not_jitted_inside_shard_map():
    """The energy by a mask that JAX cannot run in a `shard_map` that is not jitted."""
    problem = PROBLEMS["plain"]
    query, key, value = (np.concatenate([x] * 4) for x in problem.arrays.values())
    with jax.set_mesh(mesh_of("8")):
        energy = jax.shard_map(ea.free_energy, in_specs=P("device"), out_specs=P("device"))
        close(energy(query, key, value), np.concatenate([dense(problem)[1]] * 4))


@batches_psum
def test_rows_that_vmap_maps_over():
    """Data parallelism of a mapped model: what the error says to write is right, and sends no rows to others.

    `batch=` names axes of rows that a call has, and of those of a `vmap` it has one.
    """
    problem = _make("mapped", B=4, T=8, S=8, is_causal=True)
    arrays, cotangent = on_host(problem)
    rows = P("data", "device")

    def mapped(**options):
        parallel = SequenceParallel("device", **options)
        return jax.vmap(lambda arrays: ea.attention(**arrays, is_causal=True, parallel=parallel))

    with jax.set_mesh(make_mesh((2, 4), ("data", "device"))):
        with pytest.raises(ValueError, match=r"of the 2 devices .*got 1; .*jax\.shard_map.*vmap"):
            mapped(batch="data")(arrays)
        run = with_gradients(jax.shard_map(mapped(), in_specs=rows, out_specs=rows))
        compiled = run.lower(arrays, cotangent[0]).compile()
        found, gradients = compiled(arrays, cotangent[0])
    close(found, dense(problem)[0])
    close(gradients, dense_vjp(problem, cotangent[0], np.zeros(cotangent[1].shape)))
    assert {c.group_size for c in collectives(compiled)} == {4}


@batches_psum
def test_mapped_rows_of_sharded_heads():
    """The whole process aborted: XLA's partitioner takes no gather, which slices become under `vmap`, of such heads."""
    problem = _make("mapped heads", B=4, T=8, S=8, N=4)
    arrays, cotangent = on_host(problem)
    mesh = make_mesh((2, 2, 2), ("data", "tensor", "device"))
    parallel = SequenceParallel("device")
    run = with_gradients(jax.vmap(lambda arrays: ea.attention(**arrays, parallel=parallel)))
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, P("data", "device", "tensor"))
        found, gradients = run(*jax.device_put((arrays, cotangent[0]), place))
    close(found, dense(problem)[0])
    close(gradients, dense_vjp(problem, cotangent[0], np.zeros(cotangent[1].shape)))


# --- what is sent

B, T, N, K, H = 2, 3, 4, 2, 8
STATE = [("all-reduce", 4 * B * T * N), ("all-reduce", 4 * B * T * N * (H + 1))]
DQ = [("all-reduce", 4 * B * T * N * H)]


def sent(kind, keys, function, implementation=None, dtype="float32"):
    """`(kind, bytes)` of the collectives of `function(attend, query, key, value)` with keys on all devices."""
    mesh, axes = mesh_of(kind), SHAPES[kind.split()[0]][1]
    parallel = SequenceParallel(axes, method="tree", merge="allreduce")

    def argument(length, heads, spec):
        return jax.ShapeDtypeStruct(
            (B, length, heads, H), dtype, sharding=NamedSharding(mesh, spec)
        )

    query, key = argument(T, N, P()), argument(keys, K, P(None, axes))
    attend = functools.partial(ea.attention, parallel=parallel, implementation=implementation)
    with jax.set_mesh(mesh):
        compiled = jax.jit(functools.partial(function, attend)).lower(query, key, key).compile()
    found = collectives(compiled)
    assert all(c.group_size == 8 and c.count == 1 for c in found), found
    return [(c.kind, c.bytes) for c in found]


def decode(attend, query, key, value):
    return attend(query, key, value, return_energy=True)


def train(attend, *arrays, arguments=(0, 1, 2)):
    return jax.value_and_grad(lambda *x: (attend(*x) ** 2).sum(), arguments)(*arrays)


@pytest.mark.parametrize("kind", few(["8", "2x4", "2x4 explicit"], "2x4"))
def test_decode_sends_two_all_reduces(kind):
    """A collective more, or bytes that grow with the keys: the whole point of the method (MATH, sections 3 and 4).

    `b n_h` and `b d + b n_h` numbers for each query, whether there are 64 keys or 512, and one row of devices or two.
    """
    for keys in (64, 512):
        assert sent(kind, keys, decode) == STATE
    # sums narrowed to bfloat16 on their way: the energies of 8 shards would err by 0.16
    assert sent(kind, 64, decode, dtype="bfloat16") == STATE
    assert sum(size for _, size in STATE) == 4 * T * (B * H * N + 2 * B * N)  # MATH: b d + 2 b n_h


def test_training_sends_one_more():
    """Gradients of keys and values sent around, which are local; that of the query is one sum, if it is wanted."""
    assert sent("2x4", 64, train) == STATE + DQ
    assert sent("2x4", 64, functools.partial(train, arguments=(1, 2))) == STATE


def gradient_in_source(attend, query, key, value):
    """Of F itself, in a source that is not known to be zero."""

    def total(source):
        options = {name: attend.keywords[name] for name in ("parallel", "implementation")}
        return ea.free_energy(query, key, value, source=source, **options).sum()

    return jax.grad(total)(query)


def test_algorithms_2_and_3():
    """The custom rule (two all-reduces) and what autodiff makes of the sharded F (three) must be one gradient.

    Plain autodiff: the fold, and the sum of the devices' gradients.
    """
    third = sent("8", 64, gradient_in_source)
    second = sent("8", 64, gradient_in_source, implementation="reference")
    assert third == STATE
    assert len(second) == 3 and second[:2] == STATE
    assert second[2][0] == "all-reduce" and second[2][1] >= DQ[0][1]


@pytest.mark.full
def test_algorithms_2_and_3_agree():
    """The same, in numbers."""
    problem = PROBLEMS["decode_source"]
    with jax.set_mesh(mesh_of("2x4")):
        found = [
            state_and_gradients(problem, SequenceParallel(), **options)(*on_host(problem))
            for options in ({}, {"implementation": "reference"})
        ]
    for x in found:
        check(x, problem)
    (mine, _), (plain, _) = jax.device_get(found)
    close(mine[0], plain[0], tolerance=1e-14)


def test_nothing_is_sent_without_a_mesh():
    """Collectives, or copies of the keys, in the program of someone who has one device."""
    query, key = (jax.ShapeDtypeStruct((B, n, h, H), "float32") for n, h in ((T, N), (64, K)))
    assert collectives(jax.jit(ea.attention).lower(query, key, key).compile()) == ()
    with jax.set_mesh(make_mesh((8,), ("device",))):
        assert collectives(jax.jit(ea.attention).lower(query, key, key).compile()) == ()


@pytest.mark.skipif(jaxlib.version.__version_info__ >= (0, 11, 1), reason="is right there")
def test_cache_of_programs(tmp_path):
    """Silence where XLA reads a program of a CPU mesh back from JAX's cache, with wrong values."""
    x = jnp.ones((1, 16, 8, 4))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        with (
            jax.set_mesh(mesh_of("8")),
            pytest.warns(RuntimeWarning, match="jax_enable_compilation_cache=False"),
        ):
            jax.eval_shape(lambda x: ea.attention(x, x, x, parallel=SequenceParallel("device")), x)
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
