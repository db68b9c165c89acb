"""What our GPU kernels become on an H200, compiled ahead of time, without GPU or driver.

Needs jax-cuda12-plugin and nvidia-cuda-nvcc-cu12 (`make test-cuda`). Programs are read, never run: that what they
compute is right, the interpreter shows on any machine (tests/kernels/dispatch/test_local_attention.py).
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from energy_attn import masks, scores
from energy_attn.distributed import KVCache, SequenceParallel, sharded_attention
from energy_attn.kernels import AttentionState, local_attention
from energy_attn.kernels.pallas.gpu._plan import make_plan, need_of
from tests.support.cuda import assembled, nodes
from tests.support.problems import call_of
from tests.support.programs import cache_and_query, sent
from tests.support.selection import few, few_rows

WIDTH = 128
KEYS = 640 * 1024
PREFILL = 8192
heads = pytest.mark.parametrize("heads", few([(16, 16), (32, 8)], (32, 8)), ids=str)
pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("user_settings")]

DECODE = {"attention_forward", "attention_merge"}
TANGENT = {"attention_forward", "attention_tangent"}
BACKWARD = {"attention_forward", "attention_backward_query", "attention_backward_key"}


def attend(query, key, value, **options):
    return local_attention(query, key, value, implementation="pallas_gpu", **options)


def with_gradients(query, key, value, dout, dlse):
    state, back = jax.vjp(lambda *x: attend(*x, is_causal=True), query, key, value)
    return state, back(AttentionState(dout, dlse))


def with_tangent(*arrays):
    run = functools.partial(attend, is_causal=arrays[0].shape[1] > 1)
    return jax.jvp(run, arrays[:3], arrays[3:])


def one(dtype, *shape):
    """An array on one H200."""
    sharding = SingleDeviceSharding(nodes(1, 1).devices.item())
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


class Compiled:
    """A program for one H200, and its assembled kernels."""

    def __init__(self, run, *shapes, dtype=jnp.bfloat16, folder=None):
        arguments = [one(dtype, *x) if isinstance(x, tuple) else x for x in shapes]
        # newer versions of XLA write instructions only with a flag
        dump = {"xla_dump_to": str(folder), "xla_dump_emitter_re": ".*"}
        options = None if folder is None else dump
        program = jax.jit(run).lower(*arguments).compile(options)
        self.text = program.as_text()
        self.memory = program.memory_analysis()
        self.sent = sent(program)
        self.folder = folder

    @property
    def kernels(self):
        return kernels(self.text)

    @property
    def share(self):
        """Temporary memory, relative to the memory of the arguments."""
        return self.memory.temp_size_in_bytes / self.memory.argument_size_in_bytes

    def assembled(self):
        """Our kernels by name, assembled, at least one: for programs with a folder."""
        found = assembled(self.folder)
        assert found
        return found


def kernels(text):
    """The Triton kernels of a program, by name."""
    calls = [
        line for line in text.splitlines() if 'custom_call_target="__gpu$xla.gpu.triton"' in line
    ]
    return {re.search(r'name = "(\w+)"', line)[1] for line in calls}


@pytest.mark.toolkits
@heads
def test_decode(heads):
    """Keys copied, padded or transposed for the kernel; XLA's products instead of ours; parts merged by many small
    kernels, each of which costs as much as reading some megabytes."""
    n, k = heads
    program = Compiled(attend, (1, 1, n, WIDTH), (1, KEYS, k, WIDTH), (1, KEYS, k, WIDTH))
    assert program.kernels == DECODE
    assert program.share < 0.001
    assert "fusion(" not in program.text


@heads
def test_decode_from_a_cache(heads):
    """The same with a length, which needs only positions: 4 bytes beside 4096 or more of a key and a value."""
    n, k = heads
    length = one(jnp.int32, 1)

    def run(query, key, value, length):
        return attend(query, key, value, key_value_seq_lengths=length)

    program = Compiled(run, (1, 1, n, WIDTH), (1, KEYS, k, WIDTH), (1, KEYS, k, WIDTH), length)
    assert program.kernels == DECODE
    assert program.share < 0.002


def test_decode_beyond_32_bits():
    """Offsets in 32 bits: four million keys take eight gibibytes."""
    shape = (1, 4 * 1024 * 1024, 8, WIDTH)
    program = Compiled(attend, (1, 1, 32, WIDTH), shape, shape)
    assert program.kernels == DECODE
    assert program.share < 0.001


def test_decode_over_a_node():
    """A kernel that fails in a shard_map, by its results' types or by positions that are equal on all devices."""
    mesh = nodes(1, 8)
    sharded = P(None, "device")
    arguments = [
        jax.ShapeDtypeStruct((1, s, h, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for s, h, spec in ((1, 32, P()), (8 * KEYS, 8, sharded), (8 * KEYS, 8, sharded))
    ]
    run = jax.shard_map(
        lambda *x: sharded_attention(*x, axis_name="device", implementation="pallas_gpu"),
        mesh=mesh,
        in_specs=(P(), sharded, sharded),
        out_specs=P(),
    )
    with jax.set_mesh(mesh):
        program = jax.jit(run).lower(*arguments).compile()
    assert kernels(program.as_text()) == DECODE
    used = program.memory_analysis()
    assert used.temp_size_in_bytes < 0.01 * used.argument_size_in_bytes


# The most instructions of a step, of width 128, that needs no mask: docs/kernels.md has those of CUDA 12, which are
# fewer.
STEPS = {
    "attention_forward": 640,
    "attention_backward_query": 350,
    "attention_backward_key": 430,
    "attention_tangent": 530,
}
TWO_STAGES = {"attention_tangent"}  # which reads twice as much


KINDS = {
    "attention_forward": "forward",
    "attention_backward_query": "query",
    "attention_backward_key": "key",
    "attention_tangent": "tangent",
}


def check_memory(name, kernel, rows, keys):
    """Stages that are not counted: tiles that a smaller GPU is given and has no memory for."""
    query, key = (np.broadcast_to(np.zeros((), jnp.bfloat16), x) for x in (rows, keys))
    call = call_of(query, key, key)
    plan = make_plan(call.operands, call.settings, KINDS[name])
    sides = (plan.keys, plan.rows) if KINDS[name] == "key" else (plan.rows, plan.keys)
    need = need_of(call.operands, call.settings, KINDS[name], None, None)
    counted = need.memory(*sides, plan.stages)
    # Triton may hold fewer numbers of each row than tiles, and has some of its own
    assert counted - 1024 <= kernel.shared <= counted + 2048, name


def check_stages(name, kernel):
    """Three stages: copies on their way while a step computes, in registers and memory that suffice."""
    assert "wgmma" in kernel.ptx and "cp.async.cg.shared.global" in kernel.ptx, name
    assert kernel.spilled == 0, name
    assert all(kernel.waits) or name in TWO_STAGES, name
    assert min(kernel.steps) <= STEPS[name], name
    assert kernel.ptx.count("ex2.approx.ftz.f32") == kernel.ptx.count("ex2.approx"), name


@pytest.mark.toolkits
@heads
def test_prefill_and_backward(heads, tmp_path):
    """Copies of arrays in another layout; tiles too large for the registers, which are read back from memory in
    every step; products without the tensor cores' instruction for groups of warps."""
    n, k = heads
    rows, keys = (1, PREFILL, n, WIDTH), (1, PREFILL, k, WIDTH)
    dlse = one(jnp.float32, *rows[:-1])
    program = Compiled(with_gradients, rows, keys, keys, rows, dlse, folder=tmp_path)
    assert program.kernels == BACKWARD
    assert program.memory.temp_size_in_bytes <= 3 * 4 * PREFILL * n  # delta and two forms of lse
    found = program.assembled()
    assert set(found) == BACKWARD
    for name, kernel in found.items():
        check_stages(name, kernel)
        check_memory(name, kernel, rows, keys)


@pytest.mark.full
@pytest.mark.parametrize("width", [64, 256])
def test_prefill_of_other_widths(width, tmp_path):
    """Sums that leave no registers for the products beside them, or scores by too few warps."""
    rows = (1, PREFILL, 8, width)
    program = Compiled(with_gradients, *(rows,) * 4, one(jnp.float32, *rows[:-1]), folder=tmp_path)
    found = program.assembled()
    assert set(found) == BACKWARD
    for name, kernel in found.items():
        assert kernel.spilled == 0, name
        check_memory(name, kernel, rows, rows)


@pytest.mark.toolkits
@heads
def test_prefill_and_tangent(heads, tmp_path):
    """The same of the derivative in a direction, which needs no memory beside its results."""
    n, k = heads
    rows, keys = (1, PREFILL, n, WIDTH), (1, PREFILL, k, WIDTH)
    program = Compiled(with_tangent, *(rows, keys, keys) * 2, folder=tmp_path)
    assert program.kernels == TANGENT
    assert program.memory.temp_size_in_bytes < 1024
    kernel = program.assembled()["attention_tangent"]
    check_stages("attention_tangent", kernel)
    check_memory("attention_tangent", kernel, rows, keys)


@heads
def test_tangent_of_decode(heads):
    """Keys or their directions copied; parts that are as large as the keys."""
    n, k = heads
    keys = (1, KEYS, k, WIDTH)
    program = Compiled(with_tangent, *((1, 1, n, WIDTH), keys, keys) * 2)
    assert program.kernels == DECODE | TANGENT
    assert program.share < 0.001


# Rows of a key head: registers that let as many programs on a multiprocessor as its shared memory does, groups of
# copies (of keys, of values) that are on their way while a step waits, and the products' instruction.
DECODED = {4: (128, 4, "mma.sync"), 33: (255, 2, "wgmma"), 128: (255, 4, "wgmma")}


@pytest.mark.parametrize("rows", few(list(DECODED), 33))
def test_decode_is_assembled_well(rows, tmp_path):
    """Keys read in pieces of less than 16 bytes, or one after the other; above all a cliff between 32 rows and 33."""
    shape = (1, KEYS, 1, WIDTH)
    found = Compiled(attend, (1, 1, rows, WIDTH), shape, shape, folder=tmp_path).assembled()
    kernel = found["attention_forward"]
    check_memory("attention_forward", kernel, (1, 1, rows, WIDTH), shape)
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (0x10|16)", kernel.ptx)
    assert len(sizes) == len(re.findall(r"cp\.async\.c[ag]\.", kernel.ptx)) > 0
    registers, under_way, products = DECODED[rows]
    assert kernel.registers <= registers
    assert kernel.waits == (under_way,)
    assert products in kernel.ptx
    assert all(kernel.spilled == 0 for kernel in found.values())


CACHED = 128 * 1024
PARTS = 10 * 2**20  # bytes of those of up to 528 programs; dequantized keys and values take 512 MiB
# The same of a step over a cache of eight bits, with the copies of scales and positions, and the most instructions of
# a tile. Of eight queries CUDA 13 makes two programs to a multiprocessor, in two turns: 231 registers for 128.
EIGHT_BITS = {
    (1, "bfloat16"): (128, 8, 470),
    (8, "bfloat16"): (255, 8, 660),
    (9, "bfloat16"): (255, 8, 780),
    (32, "bfloat16"): (255, 8, 630),
    (1, "float32"): (255, 8, None),
}


def step_over_a_cache(devices, queries, dtype, quantize="int8", folder=None):
    """A step of so many queries, of 32 heads, over a cache of eight, of `CACHED` tokens a device."""
    mesh = Mesh(nodes(1, devices).devices[0], ("device",))
    parallel = SequenceParallel("device", "tree", "allreduce") if devices > 1 else None
    options = {"dtype": dtype, "quantize": quantize, "parallel": parallel}
    empty = functools.partial(KVCache.empty, 1, devices * CACHED, 8, WIDTH, **options)
    with jax.set_mesh(mesh):
        given = cache_and_query(mesh, empty, (1, queries, 32, WIDTH), dtype)
        return Compiled(KVCache.attend, *given, folder=folder)


@pytest.mark.toolkits
@pytest.mark.parametrize(("queries", "dtype"), few_rows(list(EIGHT_BITS)))
def test_decode_of_eight_bits(queries, dtype, tmp_path):
    """Keys or values that are dequantized in memory, of 256 MiB in bfloat16 each; registers that are spilled or, of one
    query, too many for four programs on a multiprocessor; tiles of which too few are on their way."""
    program = step_over_a_cache(1, queries, dtype, folder=tmp_path)
    assert program.kernels == DECODE
    assert program.memory.temp_size_in_bytes < PARTS
    (call,) = (x for x in program.text.splitlines() if 'name = "attention_forward"' in x)
    assert f"s8[1,{CACHED},8,{WIDTH}]" in call
    found = program.assembled()
    kernel = found["attention_forward"]
    registers, under_way, most = EIGHT_BITS[queries, dtype]
    assert kernel.registers <= registers
    assert all(x.spilled == 0 for x in found.values())
    assert kernel.waits[0] == under_way
    assert most is None or min(kernel.steps) <= most


@pytest.mark.full
def test_eight_bits_over_a_node():
    """Keys that a device dequantizes or sends; other collectives than over a cache that is not quantised."""
    program, plain = (step_over_a_cache(8, 1, "bfloat16", x) for x in ("int8", None))
    assert program.kernels == DECODE
    assert program.memory.temp_size_in_bytes < PARTS
    assert program.sent == plain.sent != []


@pytest.mark.parametrize(
    ("dtype", "width", "value_width"),
    few_rows(
        [("bfloat16", 80, 80), ("float16", 64, 64), ("bfloat16", 256, 128), ("float32", 192, 64)]
    ),
)
def test_widths(dtype, width, value_width):
    """Shapes that Triton's compiler refuses, or never finishes: odd widths, a source, long programs for float32."""
    rows, keys, values = (2, 33, 6, width), (2, 1000, 2, width), (2, 1000, 2, value_width)
    given = rows, keys, values, (*rows[:-1], value_width), one(jnp.float32, *rows[:-1])
    program = Compiled(with_gradients, *given, dtype=dtype)
    assert program.kernels >= BACKWARD
    program = Compiled(with_tangent, *(rows, keys, values) * 2, dtype=dtype)
    assert program.kernels >= TANGENT


def test_source():
    """Products of two dtypes: a source makes queries and keys float32, while values stay narrow."""

    def run(query, key, value, source):
        return jax.vjp(lambda *x: attend(*x[:3], source=x[3]), query, key, value, source)[1](
            AttentionState(query, source[..., 0].astype(jnp.float32))
        )

    rows, keys = (1, 100, 8, 64), (1, 300, 2, 64)
    assert Compiled(run, rows, keys, keys, rows).kernels >= BACKWARD


SCORES = {  # a function of parameters, their shape
    "soft_cap": (lambda x: scores.SoftCap(x[0]), (1,)),
    "alibi": (scores.ALiBi, (16,)),
}


def gradients_of_score(make):
    """The state by a score, and all gradients."""

    def run(query, key, value, parameters, dout, dlse):
        state, back = jax.vjp(
            lambda *x: attend(*x[:3], is_causal=True, score=make(x[3])),
            *(query, key, value, parameters),
        )
        return state, back(AttentionState(dout, dlse))

    return run


def tangent_of_score(make):
    """The state and its derivative in all directions, that of the parameters among them."""

    def run(*arrays):
        return jax.jvp(
            lambda *x: attend(*x[:3], is_causal=True, score=make(x[3])), arrays[:4], arrays[4:]
        )

    return run


@pytest.mark.full
@pytest.mark.parametrize("name", SCORES)
def test_scores(name, tmp_path):
    """A score that costs registers, copies or memory; and its derivatives, which hold more of a tile."""
    make, shape = SCORES[name]
    rows, keys = (1, PREFILL, 16, WIDTH), (1, PREFILL, 16, WIDTH)
    given = rows, keys, keys, one(jnp.float32, *shape)
    back = gradients_of_score(make), *given, rows, one(jnp.float32, *rows[:-1])
    forward = tangent_of_score(make), *given, *given
    for kind, wanted, most in ((back, BACKWARD, 3), (forward, TANGENT, 1)):
        folder = tmp_path / str(most)
        program = Compiled(*kind, folder=folder)
        assert program.kernels == wanted
        # beside what gradients take without a score, the parameters' in each row
        assert program.memory.temp_size_in_bytes <= (most + 0.01) * 4 * PREFILL * 16
        for name, kernel in program.assembled().items():
            assert "wgmma" in kernel.ptx, name
            assert kernel.spilled == 0, name


def _every_function(s, at, x, table):
    """All that the kernel says that it computes, of the product or of positions."""
    whole = at.query - at.key
    t = jnp.tanh(s)
    positive = 1 + s * s
    for f in (jnp.cosh, jnp.sinh, jnp.sin, jnp.cos, jnp.tan, jnp.expm1, jnp.exp2, jnp.abs):
        s = s + f(t)
    for f in (jnp.log, jnp.log1p, jnp.sqrt, jnp.cbrt, jax.lax.rsqrt, jnp.exp, jnp.sign):
        s = s - f(positive)
    s = s + jnp.floor(t) * jnp.ceil(t) + jax.nn.sigmoid(t) + t**3 + jnp.square(t)
    s = s + positive ** x[at.head] + jnp.arctan2(t, positive) + jnp.clip(t, -0.5, 0.5)
    s = s + jnp.where((whole % 3 == 1) ^ (whole < 4) | jnp.isfinite(s) & ~(t > 0), t, -t)
    s = s + jax.nn.relu(t) + jnp.logaddexp(t, s) + jnp.minimum(t, s) / jnp.maximum(s, 1.0)
    return s + jnp.remainder(s, 2.0) + table[at.head, jnp.clip(abs(whole) // 2, 0, 8)]


def test_functions_of_scores():
    """A function that the kernel promises, and Triton or CUDA's library lacks."""

    rows, keys = (1, 4, 4, 16), (1, 16, 2, 16)  # one small tile: each function is a long program
    given = rows, keys, keys, one(jnp.float32, 2, 4)

    def make(x):
        return scores.Function(_every_function, x[0], jnp.broadcast_to(x[1][:, None], (4, 9)))

    program = Compiled(gradients_of_score(make), *given, rows, one(jnp.float32, *rows[:-1]))
    assert program.kernels >= BACKWARD
    assert Compiled(tangent_of_score(make), *given, *given).kernels >= TANGENT


@pytest.mark.parametrize("name", few(["prefix", "table"], "prefix"))
def test_rules(name):
    """Operations on pairs, or a list of tiles, that Triton refuses; another kernel in their place."""
    rule = masks.Causal() | masks.Prefix(100)
    if name == "table":
        rule = masks.tabulate(rule & masks.Function(lambda q, k: (q - k) % 3 < 2), 512)

    def run(query, key, value):
        state, back = jax.vjp(functools.partial(attend, mask=rule), query, key, value)
        return back(state)

    rows, keys = (1, 512, 8, 64), (1, 512, 2, 64)
    assert Compiled(run, rows, keys, keys).kernels >= BACKWARD
