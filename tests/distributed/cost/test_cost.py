"""The cost model: it predicts what compiled programs send, it computes the paper's equations, and it chooses by them.

Programs are compiled and never run, so sizes of keys may be real ones. On a TPU's and a GPU's compiler:
test_tpu_programs.py and tests/cuda.
"""

import collections
import dataclasses
import functools
import math
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from energy_attn import attention as attend
from energy_attn.distributed import (
    SequenceParallel,
    collectives,
    cost,
    logsumexp_across,
    make_mesh,
    sharded_attention,
)
from energy_attn.distributed.internal import METHOD_OPTIONS
from energy_attn.distributed.internal import network as model
from energy_attn.distributed.merge._strategies import MergeName, automatic_merges
from energy_attn.distributed.methods._choice import METHODS, VARIANTS, MethodName
from tests.support.complaints import refused
from tests.support.meshes import MERGES, merges_for
from tests.support.selection import few, few_rows

NAMES = ("slice", "node", "device")
ROWS = [(p,) for p in range(2, 9)]
GRIDS = [(2, 3), (2, 4), (2, 2, 2)]
DECODE = cost.Shape(2, 1, 1680, 4, 2, 6, 10, dtype="float32")


def topology(sizes):
    links = tuple(cost.Link(size, 0, 1) for size in sizes)
    return cost.Topology("test", links, platform="cpu")


def attention(method, merge, shape, implementation="reference", **options):
    """An attention of a `cost.Shape`, and the types of its arguments, and which are sharded.

    Its kernel is the one that compiles fastest: what is sent is decided all the same.
    """
    assert merge is not None or shape.queries_sharded
    of_method = [] if merge is None else [merge]
    widths = (
        (shape.queries, shape.heads, shape.width),
        (shape.keys, shape.kv_heads, shape.width),
        (shape.keys, shape.kv_heads, shape.out_width),
    )
    arrays = [jax.ShapeDtypeStruct((shape.batch, *x), shape.dtype) for x in widths]
    specs = [shape.queries_sharded, True, True]
    f = functools.partial(
        sharded_attention,
        method=METHODS[method](*of_method),
        queries_sharded=shape.queries_sharded,
        implementation=implementation,
        **options,
    )
    if not shape.causal:
        return f, arrays, specs

    def causal(query, key, value, query_positions, key_positions, axis_name):
        return f(
            *(query, key, value),
            axis_name=axis_name,
            is_causal=True,
            query_positions=query_positions,
            key_positions=key_positions,
        )

    positions = [
        jax.ShapeDtypeStruct((1, count), jnp.int32) for count in (shape.queries, shape.keys)
    ]
    return causal, arrays + positions, [*specs, *specs[:2]]


def compiled(f, arrays, specs, sizes):
    """A function of arrays whose second axis is sharded over all devices, or not at all."""
    axes = NAMES[-len(sizes) :]
    mesh = make_mesh(sizes, axes, devices=jax.devices()[: math.prod(sizes)])
    sharded = [P(None, axes) if x else P() for x in specs]
    run = jax.shard_map(
        functools.partial(f, axis_name=axes),
        mesh=mesh,
        in_specs=tuple(sharded),
        out_specs=sharded[0],
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        return jax.jit(run).lower(*arrays).compile()


def sent(program):
    """How often a program runs collectives: by kind and bytes."""
    found = collections.Counter()
    for c in collectives(program):
        found[c.kind, c.bytes] += c.count
    return found


def predicted(method, merge, shape, sizes, **options):
    found = collections.Counter()
    for t in cost.transfers(method, merge, shape, topology(sizes), **options):
        found[t.kind, t.bytes] += t.count
    return found


def program_of(method, merge, shape, sizes, derived=None, moving=3):
    """An attention; or with its gradients, or its tangent along the first `moving` of query, key and value."""
    f, arrays, specs = attention(method, merge, shape, "blockwise" if derived else "reference")
    if derived is None:
        return compiled(f, arrays, specs, sizes)

    def run(*given, axis_name):
        primals, directions = given[: len(arrays)], given[len(arrays) :]

        def state(*some):
            return f(*some, *primals[len(some) :], axis_name=axis_name)

        if derived == "tangent":
            return jax.jvp(state, primals[:moving], directions)
        found, back = jax.vjp(state, *primals[:3])
        return found, back(found)

    more = moving if derived == "tangent" else 0
    return compiled(run, [*arrays, *arrays[:more]], [*specs, *specs[:more]], sizes)


def hold(method, merge, shape, sizes, derived=None):
    """Checks that a program sends what is predicted."""
    found = sent(program_of(method, merge, shape, sizes, derived))
    more = {derived: True} if derived else {}
    assert found == predicted(method, merge, shape, sizes, **more), (method, merge, sizes)


@pytest.mark.parametrize("sizes", few([*ROWS, *GRIDS], (2, 4)), ids=str)
def test_decode_sends_what_is_predicted(sizes):
    """A merge that sends more, less or more often than the model says, whatever the number of devices."""
    for merge in merges_for(len(sizes)):
        hold("tree", merge, DECODE, sizes)


# Of a tree every other merge sends what a gather does. What the others send is in their tangents and gradients, too.
PREFILL = ("tree", "gather"), ("ring", "keys"), ("ulysses", None), ("gather", None)
OTHER_PREFILL = ("tree", "allreduce"), ("ring", "queries"), ("hybrid", None)


@pytest.mark.parametrize(
    ("sizes", "ways"),
    few_rows([((2, 4), PREFILL), *((sizes, PREFILL + OTHER_PREFILL) for sizes in [*ROWS, (2, 4)])]),
    ids=lambda x: str(x) if isinstance(x[0], int) else f"{len(x)} ways",
)
def test_prefill_sends_what_is_predicted(sizes, ways):
    """As for decode, of every method that shards queries."""
    p = math.prod(sizes)
    shape = cost.Shape(1, 2 * p, 3 * p, 2 * p, p, 2, 3, dtype="float32", queries_sharded=True)
    for method, merge in ways:
        if method != "hybrid" or len(sizes) > 1:
            hold(method, merge, shape, sizes)


def sharded(queries, keys, heads, kv_heads, **options):
    """A call of sharded queries and few numbers."""
    options = {"dtype": "float32", "queries_sharded": True} | options
    return cost.Shape(1, queries, keys, heads, kv_heads, 2, 3, **options)


def of_few_heads(sizes):
    """A call of fewer heads of keys than devices: copies of keys that a model may leave out."""
    p = math.prod(sizes)
    return sharded(2 * p, 3 * p, 2 * p, 2 if sizes == (3, 2) else 1, causal=True)


CAUSAL = sharded(8, 12, 2, 1, causal=True)
SMOKE = {
    # devices in threes: several states in some rounds, or one that is left over
    **{f"six, {x}": ("tree", x, DECODE, (6,)) for x in ("butterfly", "halving")},
    "few heads": ("hybrid", None, of_few_heads((2, 4)), (2, 4)),
    "pieces of nine keys": ("gather", None, sharded(4, 36, 2, 1), (4,)),
}
LONGER = {
    **{f"pieces of {n}": ("gather", None, sharded(4, 4 * n, 2, 1), (4,)) for n in (1, 7, 32)},
    **{
        f"few heads, {method}, {sizes}": (method, None, of_few_heads(sizes), sizes)
        for sizes in ((2, 4), (3, 2), (2, 2, 2))
        for method in ("ulysses", "hybrid")
        if (method, sizes) != ("hybrid", (2, 4))
    },
    **{
        f"a ring of one query, {rotate}, {sizes}": ("ring", rotate, DECODE, sizes)
        for sizes in [*ROWS, (2, 4)]
        for rotate in ("keys", "queries")
    },
    # positions sent for nothing in the model, or in every step
    **{f"positions, {rotate}": ("ring", rotate, CAUSAL, (4,)) for rotate in ("keys", "queries")},
    "positions, gather": ("gather", None, CAUSAL, (4,)),
    # `lse` counts as float32 or float64, and so do sums
    **{
        f"{merge} of {dtype}": ("tree", merge, dataclasses.replace(DECODE, dtype=dtype), (2, 2))
        for dtype in ("bfloat16", "float64")
        for merge in MERGES
    },
    "a tangent of one query": ("ring", "queries", DECODE, (4,), "tangent"),
}


@pytest.mark.parametrize(
    "call",
    [
        *(pytest.param(row, id=name, marks=pytest.mark.smoke) for name, row in SMOKE.items()),
        *(pytest.param(row, id=name, marks=pytest.mark.full) for name, row in LONGER.items()),
    ],
)
def test_other_calls_send_what_is_predicted(call):
    """Copies of keys, pieces, positions or dtypes that the model does not count as the program does."""
    hold(*call)


@pytest.mark.parametrize(
    ("layout", "derived"),
    few_rows([("zigzag", False), ("zigzag", True), ("contiguous", True), ("striped", True)]),
)
def test_nothing_but_keys_goes_around(layout, derived):
    """Positions or segments that travel with their keys, where every device could have known them."""
    parallel = SequenceParallel("device", method="ring", layout=layout)
    shapes = [(1, 8, heads, 2) for heads in (2, 1, 1)]
    arrays = [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes]
    segments = jax.ShapeDtypeStruct((1, 8), jnp.int32)

    def both(query, key, value, segments):
        def out(*arrays):
            ids = {"query_segment_ids": segments, "key_segment_ids": segments}
            return attend(*arrays, is_causal=True, parallel=parallel, **ids)

        if not derived:
            return out(query, key, value)
        return jax.vjp(out, query, key, value)[1](query)

    with jax.set_mesh(make_mesh((4,), ("device",), devices=jax.devices()[:4])):
        program = jax.jit(both).lower(*arrays, segments).compile()
    around = [c for c in collectives(program) if c.kind == "collective-permute"]
    assert {dtype for c in around for dtype in c.dtypes} == {"f32"}
    assert {shape for c in around for shape in c.shapes} == {(1, 2, 1, 2)}


@pytest.mark.full
@pytest.mark.parametrize("merge", MERGES)
def test_a_tangent_is_one_reduction(merge):
    """Forward mode of a tree that sends more than R (H + 1) numbers beside the attention's, by any merge."""
    hold("tree", merge, DECODE, (2, 4), "tangent")
    wanted = predicted("tree", merge, DECODE, (2, 4), tangent=True)
    more = wanted - predicted("tree", merge, DECODE, (2, 4))
    assert more == {("all-reduce", DECODE.rows * (DECODE.out_width + 1) * 4): 1}


TANGENTS = ("tree", "allreduce"), ("ring", "queries")
MORE = ("tree", "gather"), ("ring", "keys"), ("ulysses", None), ("hybrid", None), ("gather", None)


@pytest.mark.parametrize(
    ("dtype", "ways"),
    few_rows([("float32", TANGENTS), ("float32", MORE), ("bfloat16", TANGENTS + MORE)]),
    ids=["float32", "float32 more", "bfloat16"],
)
def test_tangents_send_what_is_predicted(dtype, ways):
    """Directions of keys that go around twice, or with the first round; tangents that the model leaves out."""
    shape = cost.Shape(1, 8, 16, 8, 4, 2, 3, dtype=dtype, causal=True, queries_sharded=True)
    for method, merge in ways:
        plain = dataclasses.replace(shape, causal=method != "tree")
        hold(method, merge, plain, (2, 2) if method == "hybrid" else (4,), "tangent")


# method, merge, whether causal, devices. In the hybrid heads are exchanged and keys go around.
HYBRID = ("hybrid", None, False, (4, 2))
OTHERS = (
    ("ring", "keys", True, (4,)),
    ("ring", "keys", False, (2,)),
    *(("gather", None, causal, sizes) for causal, sizes in ((True, (4,)), (False, (8,)))),
    ("ulysses", None, False, (4,)),
    ("hybrid", None, False, (2, 2)),
)


@pytest.mark.parametrize(
    ("dtype", "ways"),
    few_rows([("bfloat16", (HYBRID,)), ("bfloat16", OTHERS), ("float32", (HYBRID, *OTHERS))]),
    ids=["bfloat16", "bfloat16 others", "float32"],
)
def test_gradients_send_what_is_predicted(dtype, ways):
    """Gradients of keys that go around a hop too far; pieces that are gathered once too often."""
    for method, merge, causal, sizes in ways:
        shape = cost.Shape(1, 8, 16, 8, 4, 2, 3, dtype=dtype, causal=causal, queries_sharded=True)
        hold(method, merge, shape, sizes, "gradient")


def test_a_query_that_moves_alone():
    """Directions of keys that are zero, sent around a ring."""
    shape = cost.Shape(1, 8, 12, 8, 4, 2, dtype="float32", queries_sharded=True)
    found = sent(program_of("ring", "keys", shape, (4,), "tangent", moving=1))
    wanted = predicted("ring", "keys", shape, (4,), tangent=True)
    for size in {size for _, size in wanted}:  # keys and values, of one size
        wanted["collective-permute", size] -= 2 * 3
    assert found == wanted


EXACT = cost.Shape(2, 64, 64, 4, 2, 6, 10, dtype="float32", causal=True, queries_sharded=True)
LONG = cost.Shape(2, 4096, 8192, 12, 6, 64, dtype="bfloat16", queries_sharded=True)
LEAVES = cost.Shape(2, 1, 4 * 6 * 256, 12, 2, 6, 10, dtype="bfloat16")
REPRODUCIBLE = (
    *((EXACT, {}), (EXACT, {"gradient": True}), (LEAVES, {"gradient": True}), (LEAVES, {})),
    *((LONG, {"gradient": True}), (LONG, {"tangent": True}), (LEAVES, {"tangent": True})),
    (dataclasses.replace(EXACT, keys=128, dtype="bfloat16"), {"gradient": True}),
    (dataclasses.replace(EXACT, layout="zigzag", window=(3, 0)), {"tangent": True}),
    (dataclasses.replace(EXACT, queries_sharded=False), {"gradient": True}),
    (dataclasses.replace(LONG, queries_sharded=False, keys=8196), {"gradient": True}),
    (dataclasses.replace(LEAVES, queries=70, kv_heads=3, dtype="float64"), {"gradient": True}),
    (dataclasses.replace(LEAVES, keys=4 * 256, layout="striped"), {}),
    (dataclasses.replace(LEAVES, layout="zigzag"), {"gradient": True}),
)


@pytest.mark.parametrize(("shape", "derived"), few_rows(REPRODUCIBLE, 4))
def test_reproducible_calls_send_what_is_predicted(shape, derived):
    """Rows without those that fill a tile, a root for each leaf; a model of parts of heads that is not the method's."""
    options = {"layout": shape.layout, "queries_sharded": shape.queries_sharded}
    parallel = SequenceParallel("device", **options)
    arrays = attention("tree", "gather", shape)[1][:3]
    mask = {"is_causal": shape.causal, "local_window_size": shape.window}

    def run(*given):
        def state(*arrays):
            options = {"parallel": parallel, "reproducible": True, "return_energy": True}
            return attend(*arrays, **options, **mask)

        if "tangent" in derived:
            return jax.jvp(state, given[:3], given[3:])
        if "gradient" in derived:
            found, back = jax.vjp(state, *given[:3])
            return found, back(found)
        return state(*given[:3])

    with jax.set_mesh(make_mesh((4,), ("device",), devices=jax.devices()[:4])):
        program = jax.jit(run).lower(*arrays, *arrays).compile()
    assert sent(program) == predicted("reproducible", None, shape, (4,), **derived)


@pytest.mark.full
@pytest.mark.parametrize("merge", MERGES)
def test_decode_does_not_depend_on_keys(merge):
    """A tree that sends something that grows with the context: 512k keys beside what is predicted for 8."""
    many, few_keys = (dataclasses.replace(DECODE, keys=keys) for keys in (2**19, 8))
    found = sent(compiled(*attention("tree", merge, many), (2, 4)))
    assert found == predicted("tree", merge, few_keys, (2, 4))
    most = {"gather": 1, "allreduce": 2, "ring": 7, "halving": 7}
    assert sum(found.values()) <= most.get(merge, 4)


@pytest.mark.parametrize(
    ("sizes", "merges"),
    few_rows([((2, 4), ["allreduce", "halving"]), ((2, 4), merges_for(2)), ((6,), merges_for(1))]),
    ids=["2x4", "2x4 all", "6"],
)
def test_energies_send_what_is_predicted(sizes, merges):
    """`logsumexp_across` is the fold of states without values: no more than one number a row."""
    shape = cost.Shape(1, 5, 0, 3, 1, 0, dtype="float32")
    for merge in merges:
        f = functools.partial(logsumexp_across, merge=merge)
        lse = jax.ShapeDtypeStruct((5, 3), jnp.float32)
        program = compiled(f, [lse], [False], sizes)
        assert sent(program) == predicted("tree", merge, shape, sizes), merge


def test_states_of_a_platform():
    """Where `out` and `lse` are one array, in `lse`'s dtype, and where `out` keeps its own."""
    shape = cost.Shape(1, 8, 16, 8, 4, 2, 3, "bfloat16", queries_sharded=True)
    for platform, each in (("cpu", (3 + 1) * 4), ("gpu", 3 * 2 + 4)):
        there = dataclasses.replace(topology((4,)), platform=platform)
        *_, states = cost.transfers("ulysses", None, shape, there)
        assert (states.kind, states.bytes) == ("all-to-all", 2 * 8 * each)


def test_one_list_of_merges():
    """A strategy that type checkers or the page about choosing do not know, or that `"auto"` should not choose."""
    assert MERGES == get_args(MergeName)
    assert get_args(MethodName) == METHOD_OPTIONS
    assert {*METHODS} - {*METHOD_OPTIONS} == {"reproducible"}
    page = Path(__file__).resolve().parents[3] / "docs" / "choosing.md"
    table = page.read_text(encoding="utf-8").split("| tree, queries on all devices |")[1]
    table = table.split("\n\n")[0]
    for merge in MERGES:
        assert f'\n| `"{merge}"`' in table, merge
    assert automatic_merges(1) == ("allreduce", "gather", "butterfly", "halving")
    assert {*automatic_merges(2)} == {*automatic_merges(1), "hierarchical"}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_method_says_what_it_sends(name, sharded):
    """A method with options of its own, or by default, that sends what none of its variants does."""
    method, derivatives = METHODS[name](), model.Derivatives(tangent=True)
    if not sharded and not method.replicated_queries:
        return
    shape = cost.Shape(2, 8, 1680, 8, 8, 6, 10, dtype="float32", queries_sharded=sharded)
    mesh = topology((2, 4))
    said = [tuple(x.transfers(shape, mesh, derivatives)) for x in VARIANTS[name].values()]
    assert tuple(method.transfers(shape, mesh, derivatives)) in said
    by_name = [cost.transfers(name, merge, shape, mesh, tangent=True) for merge in VARIANTS[name]]
    assert said == by_name


def test_only_options_are_options(unchecked):
    """A method that users cannot ask for, as its kernels are chosen by a policy, taken by its name."""
    with pytest.raises(ValueError, match="method: wanted one of 'tree', .* got str 'reproducible'"):
        SequenceParallel("device", method="reproducible")
    shape = cost.Shape(1, 1, 8192, 8, 8, 8, queries_sharded=True)
    assert cost.choose_method(shape, topology((4,))) in METHOD_OPTIONS


def test_a_table_of_methods():
    """The page's hops, bytes and memory on eight nodes of eight devices, which are the model's."""
    shape = cost.Shape(1, 2**18, 2**18, 32, 8, 128, queries_sharded=True)
    page = Path(__file__).resolve().parents[3] / "docs" / "choosing.md"
    table = page.read_text(encoding="utf-8").split("| MB that a device holds |")[1]
    rows = [line.strip("| ").split(" | ") for line in table.split("\n\n")[0].split("\n")[2:]]
    assert [row[0] for row in rows] == ['`"ring"`', '`"hybrid"`', '`"gather"`']
    for name, *figures in rows:
        method = name.strip('`"')
        way = (
            method,
            "keys" if method == "ring" else None,
            shape,
            cost.topology("dgx_h100", (8,), nodes=8),
        )
        permutes = [t.count for t in cost.transfers(*way) if t.kind == "collective-permute"]
        found = max(permutes, default=0), cost.volume(*way) / 1e6, cost.memory(*way) / 1e6
        assert [int(x) for x in figures] == [round(x) for x in found], method


def test_equations():
    """The paper's volumes and memory (eqs. 29 to 35), in its setting: as many heads for keys, one dtype."""
    b, t, heads, width, p = 3, 640, 16, 128, 8
    d, word = heads * width, 4
    shape = cost.Shape(b, 1, t * p, heads, heads, width, dtype="float32")
    mesh = topology((p,))
    # eq. 32 counts a hop more than are needed
    assert cost.volume("ring", "keys", shape, mesh) == 2 * b * t * d * (p - 1) * word
    tree = 2 * (p - 1) / p * (b * d + 2 * b * heads) * word
    assert cost.volume("tree", "allreduce", shape, mesh) == pytest.approx(tree)
    busiest = dataclasses.replace(mesh, all_reduce="tree")
    assert cost.volume("tree", "allreduce", shape, busiest) == pytest.approx(tree * p / (p - 1))
    ends = 2 * b * d + 2 * b * heads
    assert cost.memory("tree", "allreduce", shape, mesh) == (2 * b * t * d + ends) * word
    # eq. 29, the maxima and sums that it leaves out, and the shard that is under way meanwhile
    assert cost.memory("ring", "keys", shape, mesh) == (4 * b * t * d + ends + 2 * b * t * d) * word


def test_keys_of_some_heads():
    """A reproducible call that holds the keys of all heads at once, or of one part while it gathers the next."""
    keys = 2 * 2048 * 6 * 2 * 64 * 2  # with values, on one of four devices
    rows = 2 * 1024 * 12
    held = keys + rows * (64 * 2 + (64 + 2) * 4)
    found = cost.memory("reproducible", None, LONG, topology((4,)))
    assert found == held + 4 * keys // 2 + 4 * 4 * 2048


def test_nothing_is_sent_over_one_device():
    """A model that prices collectives which no program has."""
    for method, merge in (("tree", "allreduce"), ("tree", "butterfly"), ("ring", "keys")):
        for sizes in ((1,), (1, 1)):
            assert cost.transfers(method, merge, DECODE, topology(sizes)) == ()
    assert cost.choose_merge(DECODE, topology((1,))) in MERGES


def test_the_order_that_was_measured():
    """Eight hosts, gloo, 2 ms: packed all-reduces took 125 ms, a gather 32, a butterfly 13.6. Order and scale."""
    shape = cost.Shape(1, 1, 32_768, 16, 16, 64, dtype="float32")
    for one_way in (2e-4, 2e-3):
        network = cost.topology("ethernet", nodes=8, latency=2 * one_way)
        seconds = {
            m: cost.latency("tree", m, shape, network) for m in ("allreduce", "gather", "butterfly")
        }
        assert seconds["butterfly"] < seconds["gather"] < seconds["allreduce"]
        assert cost.choose_merge(shape, network) == "butterfly"
        assert cost.latency("ring", "keys", shape, network) > 60 * seconds["butterfly"]
        assert cost.latency("ring", "queries", shape, network) > seconds["butterfly"]
    measured = {"allreduce": 0.125, "gather": 0.032, "butterfly": 0.0136}
    assert seconds == pytest.approx(measured, rel=0.15)


def test_two_levels():
    """Hosts of several devices: a flat all-reduce chosen where every step of it waits for the network."""
    network = cost.topology("ethernet", (2,), nodes=4, latency=4e-3)
    shape = cost.Shape(1, 1, 32_768, 16, 16, 64, dtype="float32")
    seconds = {m: cost.latency("tree", m, shape, network) for m in MERGES}
    assert seconds["allreduce"] > 1.7 * seconds["hierarchical"]
    assert cost.choose_merge(shape, network) in ("butterfly", "hierarchical")
    # with many rows it is bytes that count, and a host's devices share its card
    large = dataclasses.replace(shape, batch=256)
    assert cost.choose_merge(large, network) in ("hierarchical", "halving")


def test_neighbours_on_a_torus():
    """A message to a distant chip priced as one to the next: the butterfly chosen where every hop is a wire."""
    slice_, nodes = cost.topology("tpu_v5p", (4, 4, 8)), cost.topology("dgx_h100", (8,))
    shape = cost.Shape(1, 1, 640_000, 16, 16, 128)
    found = cost.transfers("tree", "butterfly", shape, slice_)
    assert [t.distance for t in found] == [1, 2, 4, 1, 2, 1, 2]
    assert cost.choose_merge(shape, slice_) == "hierarchical"
    few = cost.topology("tpu_v5p", (4, 4))
    assert cost.choose_merge(shape, few) == cost.choose_merge(shape, nodes) == "gather"


def test_methods():
    """Decode by anything but the tree; Ulysses where heads cannot be shared out; a ring where the network is bytes."""
    mesh = cost.topology("dgx_h100", (8,))
    decode = cost.Shape(1, 1, 640_000, 32, 8, 128)
    prefill = dataclasses.replace(decode, queries=32_768, keys=32_768, queries_sharded=True)
    assert cost.choose_method(decode, mesh) == "tree"
    assert cost.choose_method(prefill, mesh) == "ulysses"
    # heads that 12 hosts, or 64, cannot share; eight of one host can
    assert cost.choose_method(prefill, cost.topology("ethernet", nodes=12)) == "ring"
    pods = cost.topology("dgx_h100", (8,), nodes=8)
    assert cost.choose_method(prefill, pods) == "hybrid"
    hybrid = cost.transfers("hybrid", None, prefill, pods)
    ring = cost.transfers("ring", "keys", prefill, pods)
    assert [max(t.count for t in found) for found in (hybrid, ring)] == [7, 63]
    # and twelve that eight cannot share, either: few bytes of keys, in fewer messages than a ring's
    twelve = dataclasses.replace(prefill, heads=12, kv_heads=1)
    assert cost.choose_method(twelve, cost.topology("tpu_v5p", (8, 8))) == "gather"
    # one head of keys for each of queries: a tree sends as little in fewer steps, but holds p times the states
    long = dataclasses.replace(prefill, queries=2**20, keys=2**20, kv_heads=32)
    slow = cost.topology("ethernet", nodes=64, latency=2.0)
    assert cost.latency("tree", "gather", long, slow) < cost.latency("ring", "keys", long, slow)
    assert cost.choose_method(long, slow) == "ring"


def test_many_rows_over_many_hosts():
    """Halving chosen where its rounds do not pay, or an all-reduce where they do."""
    chosen = {}
    for rows in (16, 1024, 65_536):
        shape = cost.Shape(1, 1, 0, rows, rows, 128)
        for network in (
            cost.topology("ethernet", nodes=4),
            cost.topology("ethernet", nodes=32),
            cost.topology("dgx_h100", (8,), nodes=16),
        ):
            chosen[network.devices, rows] = cost.choose_merge(shape, network)
    assert [chosen[32, rows] for rows in (16, 1024, 65_536)] == [
        "butterfly",
        "halving",
        "allreduce",
    ]
    assert not {chosen[128, rows] for rows in (16, 1024, 65_536)} & {"halving"}
    for devices in (5, 6, 8):  # what a ring all-reduce sends, and a share, on any number of devices
        network = topology((devices,))
        shape = cost.Shape(1, 1, 0, 120, 120, 3, dtype="float32")
        sent = (2 * devices - 1) / devices * shape.rows * shape.state
        assert cost.volume("tree", "halving", shape, network) == pytest.approx(sent)


SMALL = (1, 8, 8, 1, 1, 4)
LINK, TWO, ONE_HOST = cost.Link(2, 0, 1), topology((2,)), ("tree", "gather", DECODE)
SHARDED, RING = dataclasses.replace(DECODE, queries_sharded=True), ("ring", "keys", DECODE)
WRONG = {
    "ValueError devices: .*at least 1, got 0": lambda: cost.Link(0, 0, 1),
    "ValueError latency: .*0 or more, got -1.0": lambda: cost.Link(2, -1.0, 1),
    "ValueError bandwidth: .*above 0, got 0": lambda: cost.Link(2, 0, 0),
    "TypeError links: .*tuple of Link, got list": lambda: cost.Topology("x", [1]),
    "ValueError links: .*got none": lambda: cost.Topology("x", ()),
    "ValueError all_reduce: .*got str 'star'": lambda: cost.Topology("x", (LINK,), "star"),
    "ValueError launch: .*0 or more, got -1": lambda: cost.Topology("x", (LINK,), launch=-1),
    "ValueError kv_heads: .*4 heads, got 3": lambda: cost.Shape(1, 1, 8, 4, 3, 2),
    "ValueError keys: .*at least 0, got -8": lambda: cost.Shape(1, 1, -8, 4, 4, 2),
    "TypeError window: wanted two integers or None, got int 5": lambda: cost.Shape(
        *SMALL, window=5
    ),
    "ValueError window: wanted at least 0, got -1": lambda: cost.Shape(*SMALL, window=(-1, 0)),
    "ValueError layout: wanted one of 'contiguous'": lambda: cost.Shape(*SMALL, layout="mixed"),
    "TypeError dtype: .*float16": lambda: cost.Shape(1, 1, 8, 4, 4, 2, dtype="int8"),
    "ValueError method: .*'reproducible', got str 'star'": lambda: cost.volume(
        "star", None, DECODE, TWO
    ),
    "ValueError merge: .*got str 'keys'": lambda: cost.volume("tree", "keys", DECODE, TWO),
    "ValueError merge: .*two .* got one": lambda: cost.volume("tree", "hierarchical", DECODE, TWO),
    "TypeError shape: .* got int 3": lambda: cost.latency("tree", "gather", 3, TWO),
    "TypeError topology: .* got str 'dgx'": lambda: cost.latency(*ONE_HOST, "dgx"),
    "TypeError tangent: wanted": lambda: cost.transfers(*ONE_HOST, TWO, tangent=1),
    "ValueError gradient: .* 'tree' with": lambda: cost.latency(*ONE_HOST, TWO, gradient=True),
    "ValueError gradient: .* tangent": lambda: cost.volume(*RING, TWO, gradient=True, tangent=True),
    "TypeError shape: wanted a Shape": lambda: cost.choose_method(3, TWO),
    "ValueError method: .* for 'u": lambda: cost.volume("ulysses", None, DECODE, TWO),
    "ValueError method: .*share 4 heads of queries and 2 of keys .*, got 3": lambda: cost.volume(
        "ulysses", None, SHARDED, topology((3,))
    ),
    "ValueError method: .*two or more .*'hybrid'": lambda: cost.volume("hybrid", None, DECODE, TWO),
    "ValueError method: .*sharded queries for 'g": lambda: cost.volume("gather", None, DECODE, TWO),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wanted", WRONG)
def test_wrong_arguments(wanted):
    """A wrong argument that is taken for a right one, or refused without saying which it was."""
    with refused(wanted):
        WRONG[wanted]()
