"""`collectives` against programs that XLA compiles here, and against text that other compilers print.

The snippets are cut from real programs: XLA:TPU and XLA:GPU of jax 0.10 by ahead-of-time compilation, XLA:CPU of
jax 0.8 and 0.10.
"""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import collectives
from energy_attn.distributed.hlo import _parse
from energy_attn.distributed.hlo._collectives import collectives_in
from tests.support.selection import few

# Each JAX prints its programs otherwise.
pytestmark = pytest.mark.smoke

ALL = (0, 1, 2, 3, 4, 5, 6, 7)
NODES = ((0, 4), (1, 5), (2, 6), (3, 7))
DEVICES = ((0, 1, 2, 3), (4, 5, 6, 7))
BOTH = ("node", "device")
RING = [(i, (i + 1) % 8) for i in range(8)]
FLAT = Mesh(np.array(jax.devices()), ("x",))
GRID = Mesh(np.array(jax.devices()).reshape(2, 4), BOTH)


def compiled(f, mesh, ins, outs, *arguments):
    f = jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arguments]
    return jax.jit(f).lower(*shapes).compile()


def summary(found):
    return [(c.kind, c.bytes, c.group_size, c.count) for c in found]


def hop(x):
    return lax.ppermute(x, "x", RING)


X = ((8, 16), jnp.float32)


@pytest.mark.parametrize(
    ("f", "mesh", "ins", "outs", "kind", "size", "groups"),
    [
        (lambda x: lax.psum(x, BOTH), GRID, P(BOTH), P(), "all-reduce", 64, (ALL,)),
        (lambda x: lax.psum(x, "node"), GRID, P("node"), P(), "all-reduce", 256, NODES),
        (lambda x: lax.pmax(x, "device"), GRID, P("device"), P(), "all-reduce", 128, DEVICES),
        (lambda x: lax.all_gather(x, "x"), FLAT, P("x"), P(None, "x"), "all-gather", 64, (ALL,)),
        (
            lambda x: lax.all_gather(x, "device", tiled=True),
            *(GRID, P("device"), P(), "all-gather", 128, DEVICES),
        ),
        (
            lambda x: lax.psum_scatter(x, "x", tiled=True),
            *(FLAT, P(), P("x"), "reduce-scatter", 512, (ALL,)),
        ),
        (
            lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True),
            *(FLAT, P("x"), P(None, "x"), "all-to-all", 64, (ALL,)),
        ),
        (hop, FLAT, P("x"), P("x"), "collective-permute", 64, (ALL,)),
        (
            lambda x: lax.ppermute(x, "device", [(0, 1), (1, 0), (2, 3)]),
            *(GRID, P("device"), P("device"), "collective-permute", 128),
            ((0, 1), (2, 3), (4, 5), (6, 7)),
        ),
    ],
)
def test_one_collective(f, mesh, ins, outs, kind, size, groups):
    """A kind missed, bytes of the result taken for those of the operand, or groups of the wrong axis."""
    (found,) = collectives(compiled(f, mesh, ins, outs, X))
    assert summary([found]) == [(kind, size, len(groups[0]), 1)]
    assert found.groups == groups and not found.across_slices


def test_several():
    """A variadic all-reduce counted once per array, or only its first array counted; two that depend on each other
    listed in another order, or as one; bfloat16 reported where XLA:CPU widens it."""
    both = P(BOTH), P(BOTH)
    program = compiled(lambda n, d: lax.psum((n, d), BOTH), GRID, both, P(), X, ((8,), jnp.float32))
    (found,) = collectives(program)
    assert summary([found]) == [("all-reduce", (16 + 1) * 4, 8, 1)]
    assert (found.dtypes, found.shapes) == (("f32", "f32"), ((1, 16), (1,)))
    f = compiled(lambda x: lax.psum(lax.psum(x, "device"), "node"), GRID, P(BOTH), P(), X)
    assert [c.groups for c in collectives(f)] == [DEVICES, NODES]
    f = compiled(lambda x: lax.psum(x, "x"), FLAT, P("x"), P(), ((8, 16), jnp.bfloat16))
    (found,) = collectives(f)
    assert found.bytes == {"bf16": 2, "f32": 4}[found.dtypes[0]] * 16


@pytest.mark.parametrize(
    ("dtype", "name", "bits"),
    [
        (jnp.float64, "f64", 64),
        (jnp.complex64, "c64", 64),
        (jnp.int8, "s8", 8),
        (jnp.bool_, "pred", 8),
        (jnp.uint2, "u2", 2),
    ],
)
def test_dtypes(dtype, name, bits):
    """Element sizes guessed from a table of the common dtypes, or packed elements counted as bytes."""
    (found,) = collectives(compiled(hop, FLAT, P("x"), P("x"), ((8, 16), dtype)))
    assert (found.dtypes, found.shapes) == ((name,), ((1, 16),))
    assert found.bytes == 16 * bits // 8


def nested(x):
    def outer(_, x):
        x = lax.fori_loop(0, 3, lambda _, x: jnp.sin(hop(x)), x)
        return x + lax.psum(x, "x")

    return lax.fori_loop(0, 5, outer, hop(x))


def until(x):
    return lax.while_loop(lambda x: lax.pmax(x.sum(), "x") < 100, lambda x: hop(x) * 2, x)


def chosen(x):
    return lax.cond(lax.psum(x.sum(), "x") > 3, hop, lambda x: x, x)


HOP = "collective-permute", 64, 8
FLOWS = {
    nested: [("all-reduce", 64, 8, 5), (*HOP, 1), (*HOP, 15)],
    until: [("all-reduce", 4, 8, None), (*HOP, None)],
    chosen: [("all-reduce", 4, 8, 1), (*HOP, None)],
    lambda x: jnp.sin(x).sum(1): [],
}


@pytest.mark.parametrize(("f", "wanted"), FLOWS.items())
def test_flows(f, wanted):
    """A collective in a loop counted once, or by the innermost trip count alone; arithmetic taken for communication.

    A count invented for a loop that runs as long as the data say, or for a branch; its condition overlooked.
    """
    assert sorted(summary(collectives(compiled(f, FLAT, P("x"), P("x"), X)))) == wanted


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_forward_and_backward(reverse):
    """The gradient's own loop missed; a counter that runs down not understood."""

    def f(x, steps):
        def body(x, step):
            return lax.psum(jnp.sin(x * step), "x"), None

        return jax.grad(lambda x: lax.scan(body, x, steps, reverse=reverse)[0].sum())(x)

    program = compiled(f, FLAT, (P(), P()), P(), ((4,), jnp.float32), ((7,), jnp.float32))
    assert summary(collectives(program)) == 2 * [("all-reduce", 16, 8, 7)]


def test_one_device():
    """A program without devices to talk to that raises."""
    assert collectives(jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct(*X)).compile()) == ()


AXES = ("a", "b", "c")
ORDERS = list(itertools.permutations(range(3)))


@pytest.mark.parametrize("order", few(ORDERS, (1, 2, 0), (0, 2, 1)))
def test_groups_of_the_partitioner(order):
    """Groups misread when XLA's partitioner writes them: as an iota (jax 0.8), as mesh axes (jax 0.10).

    The mesh's axes are permuted against the devices, so that the writing is neither trivial nor a plain transpose.
    """
    places = np.arange(8).reshape(2, 2, 2).transpose(order)
    mesh = Mesh(np.array(jax.devices())[places], AXES)
    for axes in [c for n in (1, 2, 3) for c in itertools.combinations(AXES, n)]:
        x = jax.ShapeDtypeStruct((4, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, axes)))
        total = jax.jit(lambda x: x.sum(1), out_shardings=NamedSharding(mesh, P()))
        (found,) = collectives(total.lower(x).compile())
        assert (found.kind, found.bytes, found.group_size) == ("all-reduce", 16, 2 ** len(axes))
        # Places in the mesh: the numbers that a program knows its devices by.
        kept = [i for i, axis in enumerate(AXES) if axis not in axes]
        summed = [i for i, axis in enumerate(AXES) if axis in axes]
        wanted = np.arange(8).reshape(2, 2, 2).transpose(kept + summed).reshape(-1, 2 ** len(axes))
        assert {frozenset(g) for g in found.groups} == {frozenset(g) for g in wanted.tolist()}


def computation(name, *lines):
    body = "\n".join(f"  {line}" for line in lines)
    return f"%{name} (q: f32[4]) -> f32[4] {{\n{body}\n}}\n\n"


def entry(*lines, header="num_partitions=8", before=""):
    main = "ENTRY " + computation("main", *lines)
    return f"HloModule m, is_scheduled=true, {header}\n\n{before}{main}"


def one(*lines, **options):
    (found,) = collectives_in(entry(*lines, **options))
    return found


def root(opcode, attributes, **options):
    return one(P4, f"ROOT %r = f32[4]{{0}} {opcode}(%p), {attributes}", **options)


P4 = "%p = f32[4]{0} parameter(0)"
Q4 = "%q = f32[4]{0} parameter(0)"
REST = "channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true"


@pytest.mark.parametrize(
    ("text", "kind", "size"),
    [
        ("%s = f32[4]{0} all-reduce-start(%p), REST, to_apply=%add", "all-reduce", 16),
        ("%s = (f32[4]{0}, f32[16]{0}) all-gather-start(%p), REST", "all-gather", 16),
        (
            "%s = ((f32[4]{0}), f32[1]{0}) reduce-scatter-start(%p), REST, to_apply=%add",
            *("reduce-scatter", 16),
        ),
        (
            "%q = bf16[3]{0} parameter(1)\n"
            "%s = ((f32[4]{0}, bf16[3]{0}), (f32[16]{0}, bf16[12]{0})) all-gather-start(%p, %q), REST",
            *("all-gather", 22),
        ),
        (
            "%s = ((f32[4]{0}), f32[4]{0}) collective-broadcast-start(%p), REST",
            *("collective-broadcast", 16),
        ),
        (
            "%s = (f32[4]{0:T(128)}, f32[4]{0:T(128)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) "
            "collective-permute-start(%p), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
            *("collective-permute", 16),
        ),
    ],
)
def test_asynchronous_pairs(text, kind, size):
    """A pair counted twice, or with the bytes of a start's result, which repeats the operands."""
    lines = text.replace("REST", REST).split("\n")
    found = one(P4, *lines, f"ROOT %d = f32[16]{{0}} {kind}-done(%s)")
    assert summary([found]) == [(kind, size, 4, 1)]


REDUCED = f"ROOT %r = f32[4]{{0}} all-reduce(%q), {REST}"
GATHER = (
    "%g = f32[32]{0} all-gather(%q), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, "
    'use_global_device_ids=true, frontend_attributes={chain_id="0"}'
)
AROUND = 'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}'
NAMED = r'metadata={op_name="f(\"a, b)\") all-reduce(%p), {" source_file="x}.py"}'
# What a parser may get wrong: the computations in front, the lines of the program, and what is found.
WRITINGS = {
    "a wrapped computation that start, update and done name": (
        computation("w", Q4, f"ROOT %r = f32[1]{{0}} reduce-scatter(%q), {REST}, dimensions={{0}}"),
        "%s = ((f32[4]{0}), f32[1]{0}, u32[]) async-start(%p), calls=%w",
        "%u = ((f32[4]{0}), f32[1]{0}, u32[]) async-update(%s), calls=%w",
        "ROOT %d = f32[1]{0} async-done(%u), calls=%w",
        [("reduce-scatter", 16, 4, 1)],
    ),
    "XLA:TPU v5e repeats a gather in a start, in each matmul beside it, and in a done": (
        computation(
            "start",
            *(Q4, GATHER),
            "ROOT %c = (f32[4]{0}, u32[]{:S(2)}) custom-call(%g), "
            'custom_call_target="AsyncCollectiveStart"',
        )
        + computation("beside", Q4, GATHER, "ROOT %c = f32[32]{0} negate(%g)")
        + computation(
            "done",
            *(Q4, GATHER),
            'ROOT %c = f32[32]{0} custom-call(%g), custom_call_target="AsyncCollectiveDone"',
        ),
        "%a = (f32[4]{0}, u32[]{:S(2)}) fusion(%p), kind=kCustom, calls=%start",
        "%b = f32[32]{0} fusion(%p), kind=kOutput, calls=%beside",
        "ROOT %c = f32[32]{0} fusion(%p), kind=kCustom, calls=%done",
        [("all-gather", 16, 8, 1)],
    ),
    "a computation that two instructions call, one of them a fusion": (
        computation("f", Q4, REDUCED),
        "%a = f32[4]{0} fusion(%p), kind=kCustom, calls=%f",
        "ROOT %b = f32[4]{0} call(%a), to_apply=%f",
        2 * [("all-reduce", 16, 4, 1)],
    ),
    "a permute that XLA:GPU took apart, beside a device's traffic with its own host": (
        "",
        "%t = token[] after-all()",
        f"%s = (f32[4]{{0}}, u32[], token[]) send(%p, %t), channel_id=1, {AROUND}",
        f"%r = (f32[4]{{0}}, u32[], token[]) recv(%t), channel_id=1, {AROUND}",
        "%h = (f32[4]{0}, u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true",
        "ROOT %rd = (f32[4]{0}, token[]) recv-done(%r), channel_id=1",
        [("collective-permute", 16, 3, 1)],
    ),
    "branches that are not a list": (
        computation("yes", Q4, REDUCED) + computation("no", Q4, "ROOT %r = f32[4]{0} negate(%q)"),
        "%b = pred[] constant(true)",
        "ROOT %r = f32[4]{0} conditional(%b, %p, %p), true_computation=%yes, false_computation=%no",
        [("all-reduce", 16, 4, None)],
    ),
    "an only branch, which a choice between platforms leaves, always runs": (
        computation("yes", Q4, REDUCED),
        "%i = s32[] constant(0)",
        "ROOT %r = f32[4]{0} conditional(%i, %p), branch_computations={%yes}",
        [("all-reduce", 16, 4, 1)],
    ),
    "operands that carry their types, and names without %": (
        "",
        f"ROOT r = (f32[4]{{0}}, f32[4]{{0}}) all-reduce(f32[4]{{0}} p, f32[4]{{0}} p), {REST}",
        [("all-reduce", 32, 4, 1)],
    ),
    "metadata that looks like HLO": (
        "",
        f"%a = f32[4]{{0}} negate(%p), {NAMED}",
        f"ROOT %r = f32[4]{{0}} all-reduce(%a), {NAMED}, {REST}",
        [("all-reduce", 16, 4, 1)],
    ),
    "offsets and the output buffer of a ragged all-to-all": (
        "",
        "%o = s64[8]{0} parameter(1)",
        f"ROOT %r = f32[4]{{0}} ragged-all-to-all(%p, %p, %o, %o, %o, %o), {REST}",
        [("ragged-all-to-all", 16, 4, 1)],
    ),
}


@pytest.mark.parametrize("what", WRITINGS)
def test_writings(what):
    """Instructions counted again, passed over, or cut short; a second program of a text that is not read."""
    before, *lines, wanted = WRITINGS[what]
    text = entry(P4.replace("%p", "p") if "names without" in what else P4, *lines, before=before)
    assert summary(collectives_in(text)) == wanted
    assert summary(collectives_in(text + "\n\n" + text)) == 2 * wanted


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[8,128]{1,0:T(8,128)S(1)}", 4096),
        ("bf16[8,128]{1,0:T(8,128)(2,1)}", 2048),
        ("f8e4m3fn[8,128]{1,0:T(8,128)(4,1)}", 1024),
        ("f8e8m0fnu[8,128]", 1024),
        ("s4[8,128]{1,0:T(8,128)(8,1)E(4)}", 512),
        ("s4[8,128]{1,0}", 1024),
        ("f4e2m1fn[3]{0:E(4)}", 2),
        ("pred[]", 1),
        ("pred[9]{0:E(1)}", 2),
        ("c128[2]{0}", 32),
        ("f32[<=8,4]{1,0}", 128),
        ("f32[0,4]{1,0}", 0),
        ("(token[])", 0),
        ("(f32[2]{0}, (bf16[3]{0}, token[]), /*index=2*/opaque[])", 14),
    ],
)
def test_bytes_of_shapes(shape, size):
    """Layouts, tilings and memory spaces read as sizes; packed elements, tokens and tuples miscounted."""
    found = one(f"%p = {shape} parameter(0)", f"ROOT %r = {shape} all-reduce(%p), {REST}")
    assert found.bytes == size
    arrays = re.findall(r"(\w+)\[", shape)
    assert found.dtypes == tuple(dtype for dtype in arrays if dtype not in ("token", "opaque"))


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", DEVICES),
        ("{{0,4},{1,5},{2,6},{3,7}}", NODES),
        ("{}", (ALL,)),
        ("{{0,1,2},{3}}", ((0, 1, 2), (3,))),
        ("[2,4]<=[8]", DEVICES),
        ("[1,8]<=[8]", (ALL,)),
        ("[4,2]<=[2,4]T(1,0)", NODES),
        ("[4,2]<=[2,2,2]T(1,0,2)", ((0, 1), (4, 5), (2, 3), (6, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", DEVICES),
        ("mesh['a'=2,'b'=4] {'a'}", NODES),
        ("mesh['a'=2,'b'=4] {'b','a'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=4,'b'=2], device_ids=(7,6,5,4,3,2,1,0) {'b'}", ((7, 6), (5, 4), (3, 2), (1, 0))),
        ("mesh['a'=8] {'a':(1)2}", NODES),
        ("mesh['a'=8] {'a':(2)4}", DEVICES),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=8] {'a':(4)2,'a':(1)2}", ((0, 4, 1, 5), (2, 6, 3, 7))),
    ],
)  # fmt: skip
def test_replica_groups(groups, wanted):
    """One of the three ways to write groups, or a transposition within it, misread."""
    found = root("all-reduce", f"channel_id=1, replica_groups={groups}, use_global_device_ids=true")
    assert found.groups == wanted
    assert found.group_size == max(map(len, wanted))


@pytest.mark.parametrize(
    ("opcode", "attributes", "wanted"),
    [
        ("all-reduce", "replica_groups={}", ((0, 2), (1, 3))),
        ("all-reduce", "channel_id=1, replica_groups={}", ((0, 1, 2, 3),)),
        ("all-reduce", "channel_id=1, replica_groups={{0},{1}}", ((0, 1), (2, 3))),
        ("all-to-all", "channel_id=1, replica_groups={}", ((0, 1), (2, 3))),
        ("all-gather", "channel_id=1, replica_groups={}, use_global_device_ids=true", ((0, 1, 2, 3),)),
        ("collective-permute", "source_target_pairs={{0,1}}", ((0, 2), (1, 3))),
        ("collective-permute", "channel_id=1, source_target_pairs={{0,1}}", ((0, 1), (2, 3))),
    ],
)  # fmt: skip
def test_what_the_numbers_count(opcode, attributes, wanted):
    """Replicas, partitions and devices confused; an empty list taken for no group instead of all."""
    found = root(opcode, attributes, header="replica_count=2, num_partitions=2")
    assert found.groups == wanted


@pytest.mark.parametrize(
    ("pairs", "wanted"),
    [
        ("{{0,1},{1,2},{2,3},{3,0}}", ((0, 1, 2, 3),)),
        ("{{0,1},{1,0},{2,3},{3,2}}", ((0, 1), (2, 3))),
        ("{{2,3},{1,2},{0,1}}", ((0, 1, 2, 3),)),
        ("{{0,1},{1,2},{4,5}}", ((0, 1, 2), (4, 5))),
        ("{}", ()),
    ],
)
def test_permutes(pairs, wanted):
    """A permute's pairs taken for groups of two; a chain or an empty permute that raises."""
    found = root("collective-permute", f"channel_id=1, source_target_pairs={pairs}")
    assert found.groups == wanted
    assert found.group_size == max(map(len, wanted), default=0)


@pytest.mark.parametrize(
    "line",
    [
        "ROOT %r = f32[4]{0} all-reduce(%p), replica_groups={{0},{1}}",
        "ROOT %r = f32[4]{0} collective-permute(%p), channel_id=1, source_target_pairs={{3,3}}",
    ],
)
def test_nothing_is_sent_to_oneself(line):
    """A collective of each device with itself counted as communication: JAX says so that values are equal."""
    assert collectives_in(entry(P4, line)) == ()


MEGASCALE = '_xla_megascale_target={},_xla_megascale_transfer_type="{}"'


@pytest.mark.parametrize(
    ("transfer", "target", "kind", "groups"),
    [
        ("ALL_REDUCE", '"{1,2,3}x{0:1}"', "all-reduce", ((100000, 200000, 300000), (100001, 200001, 300001))),
        ("ALL_GATHER", '"{1,2}x{0:1,5}"', "all-gather", ((100000, 200000), (100001, 200001), (100005, 200005))),
        ("ALL_TO_ALL", "{{100000,200000},{100001,200001}}", "all-to-all", ((100000, 200000), (100001, 200001))),
        ("REDUCE_SCATTER", "{{100000,300000}}", "reduce-scatter", ((100000, 300000),)),
        ("ONE_TO_ONE", "{{100000->200000},{200000->100000}}", "collective-permute", ((100000, 200000),)),
    ],
)  # fmt: skip
def test_between_slices(transfer, target, kind, groups):
    """XLA:TPU sends between slices through the host's runtime: an all-reduce there seen as none."""
    attributes = (
        f"is_host_transfer=true, frontend_attributes={{{MEGASCALE.format(target, transfer)}}}"
    )
    found = one(
        P4,
        "%t = token[] after-all()",
        f"%s = (f32[4]{{0}}, u32[], token[]) send(%p, %t), channel_id=2, {attributes}",
        f"%r = (f32[4]{{0}}, u32[], token[]) recv(%t), channel_id=1, {attributes}",
        "%sd = token[] send-done(%s), channel_id=2, is_host_transfer=true",
        "ROOT %rd = (f32[4]{0}, token[]) recv-done(%r), channel_id=1, is_host_transfer=true",
    )
    assert summary([found]) == [(kind, 16, max(map(len, groups)), 1)]
    assert found.groups == groups
    assert found.across_slices


def loop(start, step, limit, direction="LT", dtype="s32", config="", hoisted="constant"):
    """A while loop as XLA:TPU prints it, with a permute in its body and an all-reduce in its condition."""
    state = f"({dtype}[]{{:T(128)}}, f32[4]{{0:T(128)S(1)}}, {dtype}[]{{:T(128)}})"
    return f"""HloModule ring, num_partitions=8

%body (c: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {{
  %c = {state} parameter(0)
  %i = {dtype}[]{{:T(128)}} get-tuple-element(%c), index=0
  %k = {dtype}[]{{:T(128)}} get-tuple-element(%c), index=2
  %x = f32[4]{{0:T(128)S(1)}} get-tuple-element(%c), index=1
  %y = f32[4]{{0:T(128)S(1)}} collective-permute(%x), channel_id=1, source_target_pairs={{{{0,1}},{{1,0}}}}
  %j = {dtype}[]{{:T(128)}} add(%i, %k), backend_config={{"flag_configs":[]}}
  ROOT %n = {state} tuple(%j, %y, %k)
}}

%compare (a: {dtype}[]) -> pred[] {{
  %a = {dtype}[] parameter(0)
  %limit = {dtype}[] constant({limit})
  ROOT %lt = pred[] compare(%a, %limit), direction={direction}
}}

%condition (c: (s32[], f32[4], s32[])) -> pred[] {{
  %c = {state} parameter(0)
  %x = f32[4]{{0:T(128)S(1)}} get-tuple-element(%c), index=1
  %r = f32[4]{{0:T(128)}} all-reduce(%x), {REST}
  %i = {dtype}[]{{:T(128)}} get-tuple-element(%c), index=0
  ROOT %go = pred[]{{:T(512)}} fusion(%i), kind=kLoop, calls=%compare
}}

ENTRY %main (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0:T(128)}} parameter(0)
  %start = {dtype}[]{{:T(128)}} constant({start})
  %copied = {dtype}[]{{:T(128)}} copy(%start)
  %step = {dtype}[]{{:T(128)}} {hoisted}({step})
  %init = {state} tuple(%copied, %p, %step)
  %while = {state} while(%init), condition=%condition, body=%body{config}
  ROOT %out = f32[4]{{0:T(128)}} get-tuple-element(%while), index=1
}}
"""


def counts(text):
    return {c.kind: c.count for c in collectives_in(text)}


@pytest.mark.parametrize(
    ("options", "trips"),
    [
        ((0, 1, 7), 7),
        ((2, 3, 12), 4),
        ((5, -1, 0, "GT"), 5),
        ((5, -1, -1, "NE"), 6),
        ((7, 1, 7), 0),
        ((0, 1, 7, "LE"), 8),
        ((250, 3, 10, "GE", "u8"), 2),
        ((2, 255, 0, "NE", "u8"), 2),
    ],
)
def test_counters_are_followed(options, trips):
    """XLA:TPU prints no trip count: a ring's hops unknown there. And a condition runs once more than its body."""
    assert counts(loop(*options)) == {"collective-permute": trips, "all-reduce": trips + 1}


@pytest.mark.parametrize(
    "options", [{"hoisted": "parameter"}, {"dtype": "f32"}, {"step": 0}, {"direction": "GE"}]
)
def test_counters_that_cannot_be_followed(options, monkeypatch):
    """A step that is an argument, a counter that rounds, a loop without an end: none of them may hang or guess."""
    monkeypatch.setattr(_parse, "_STEPS", 100)
    text = loop(**{"start": 0, "step": 1, "limit": 7, **options})
    known = options.get("direction") == "GE"  # 0 ≥ 7 fails at once
    assert counts(text) == {
        "collective-permute": 0 if known else None,
        "all-reduce": 1 if known else None,
    }


@pytest.mark.parametrize(
    "config",
    [
        '{"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"}}',
        r'"{\"known_trip_count\":{\"n\":\"5\"}}"',
    ],
)
def test_printed_trip_counts(config):
    """The compiler's own count passed over, in the writing of today or of older versions."""
    text = loop(0, 1, 7, config=f", backend_config={config}")
    assert counts(text) == {"collective-permute": 5, "all-reduce": 6}


def test_followed_counters_agree_with_the_compiler():
    """The count that is followed for TPU off by one: where XLA:CPU prints its own, both must be equal."""

    def f(x, steps):
        def body(x, step):
            return jnp.sin(hop(x)) * step, x.sum()

        def outer(_, x):
            x, _ = lax.scan(body, x, steps, reverse=True)
            return lax.scan(body, x, steps, unroll=2)[0]

        return lax.fori_loop(2, 6, outer, x)

    text = compiled(f, FLAT, (P("x"), P()), P("x"), X, ((7,), jnp.float32)).as_text()
    assert text.count("known_trip_count") == 3
    found = collectives_in(text)
    assert collectives_in(text.replace("known_trip_count", "unknown")) == found
    assert math.fsum(c.count or math.nan for c in found) == 4 * (7 + 7)


def test_long_operand_lists():
    """The comments that XLA prints between many operands taken for part of a name."""
    shapes = ", ".join(["f32[4]{0}"] * 5 + ["/*index=5*/f32[4]{0}", "f32[4]{0}"])
    names = ", ".join(["%p"] * 5 + ["/*index=5*/%p", "%p"])
    found = one(P4, f"ROOT %r = ({shapes}) all-to-all({names}), {REST}")
    assert (found.bytes, found.shapes) == (7 * 16, 7 * ((4,),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "wanted HLO text"),
        ("module @jit_f {}", "wanted HLO text, 'HloModule ...', got 'module @jit_f"),
        ("HloModule m\n", "wanted an ENTRY computation in 'HloModule m'"),
        (entry(P4, "%r all-reduce"), "wanted an HLO instruction, got '  %r all-reduce'"),
        (entry(f"ROOT %r = f32[4] all-reduce(%p), {REST}"), "that %?main defines, got"),
        (entry(P4, "ROOT %r = f32[4] all-reduce(%p), channel_id=1"), "groups of devices .* in r, got"),
        (entry(P4, "ROOT %r = f32[4] all-reduce(%p), replica_groups=<new>"), "replica_groups=<new>"),
        (entry(P4, "ROOT %r = f32[4] all-reduce(%p), replica_groups=mesh['a'=8] {'b'}"), "as XLA prints them"),
        (entry("%p = f32[?] parameter(0)", f"ROOT %r = f32[?] all-reduce(%p), {REST}"), "f32\\[\\?\\]"),
        (entry("%p = float parameter(0)", f"ROOT %r = float all-reduce(%p), {REST}"), "'float'"),
        (entry(P4, f"ROOT %r = f32[4] send(%p), frontend_attributes={{{MEGASCALE.format('{}', 'NEW')}}}"), "NEW"),
        (entry(P4, "ROOT %r = f32[4] send(%p), channel_id=1"), "groups of devices .* in r, got"),
        (entry(P4, "ROOT %r = f32[4] collective-permute(%p, %p), slice_sizes={{1}}"), "slices of them"),
    ],
)  # fmt: skip
def test_text_that_is_not_understood(text, message):
    """A collective left out in silence, or an error that does not say which line is at fault."""
    with pytest.raises(ValueError, match=message):
        collectives_in(text)


@pytest.mark.parametrize("what", ["text", "function", "lowered"])
def test_only_compiled_programs(what, unchecked):
    """Collectives read from a program that is not compiled yet, whose partitioning is not decided."""
    f = jax.jit(jnp.sin)
    given = {"text": "HloModule m", "function": f, "lowered": f.lower(jnp.ones(3))}[what]
    with pytest.raises(TypeError, match=r"compiled: wanted jax\.stages\.Compiled, .*, got "):
        collectives(given)
