"""The TPU kernel, compiled ahead of time for real chips: no TPU is needed, only libtpu.

Programs are compiled for the paper's sizes (16 heads of 128), those of Llama 3 (32 query heads that share 8), and
others, and their memory is read; they are never run.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn import masks, scores
from energy_attn.kernels import AttentionState, local_attention
from tests.support.selection import few, few_rows
from tests.support.tpu import compiled, devices, every_chip, kernels_memory, operands, temporary

HEADS = [(16, 16), (32, 8)]  # of queries, of keys
VMEM = {"v4": 16, "v5e": 128, "v5p": 64, "v6e": 128, "tpu7x": 64}  # MiB of a core
pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("user_settings")]
attention = functools.partial(local_attention, implementation="pallas_tpu")


def size(*shapes):
    return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for dtype, *shape in shapes)


def both_gradients(query, key, value):
    """The state of causal attention and the gradients of both of its outputs."""
    state, back = jax.vjp(functools.partial(attention, is_causal=True), query, key, value)
    return state, back(AttentionState(state.out, state.lse))


def with_tangent(*arrays):
    """The state of causal attention and its derivative in a direction of all operands."""
    run = functools.partial(attention, is_causal=arrays[0].shape[1] > 1)
    return jax.jvp(run, arrays[:3], arrays[3:])


def check_memory(program, chip):
    """Kernels that use more of a core's memory than their blocks were counted for, or ask for more than half of it."""
    if chip == "tpu7x":  # JAX 0.10.2 cannot read the text of some of its programs (async-update)
        return
    half = max(VMEM[chip] // 2, 16) * 2**20
    for granted, used in kernels_memory(program):
        assert used <= granted <= half


@pytest.mark.parametrize(("heads", "kv_heads"), few_rows(HEADS))
@every_chip
def test_decode_copies_nothing(chip, heads, kv_heads):
    """A copy of 640k keys or values, in another layout or padded to whole blocks."""
    shapes = operands(1, 640_000, heads, kv_heads)
    program = compiled(chip, attention, *shapes, kernels=1)
    assert temporary(program) < 0.001 * size(*shapes)
    check_memory(program, chip)


@pytest.mark.parametrize("chip", few(["v5p", "tpu7x"], "v5p"))
def test_ragged_decode_copies_nothing(chip):
    """Positions of a cache that take a row of a tile each."""
    shapes = operands(1, 640_001, 32, 8)

    def decode(query, key, value, query_positions, key_positions):
        return attention(
            query,
            key,
            value,
            query_positions=query_positions,
            key_positions=key_positions,
            is_causal=True,
        )

    positions = ("int32", 1, 1), ("int32", 1, 640_001)
    program = compiled(chip, decode, *shapes, *positions, kernels=1)
    # the position of each key, in four bytes, once for each head
    assert temporary(program) < 0.01 * size(*shapes)


@pytest.mark.parametrize(
    ("width", "kv_heads"),
    few_rows(
        [
            *((64, kv_heads) for kv_heads in (3, 1)),
            *((width, 8) for width in (80, 64, 96, 192, 256)),
            *((128, kv_heads) for kv_heads in (1, 2, 3, 4, 12)),
        ],
        3,
    ),
)
def test_no_width_or_number_of_heads_is_copied(width, kv_heads):
    """A padded copy of keys whose width is not a multiple of 128, or whose heads do not fill a tile."""
    shapes = operands(1, 100_000, 24, kv_heads, width)
    program = compiled("v5p", attention, *shapes, kernels=1)
    assert temporary(program) < 0.01 * size(*shapes)


@every_chip
def test_prefill_and_its_backward(chip):
    """A matrix of scores in memory, or more copies of the operands than tiles need."""
    shapes = operands(8192, 8192, 32, 8)
    program = compiled(chip, both_gradients, *shapes, kernels=3)
    # Heads move to the front: of keys, values and their gradients, and of up to four arrays of the
    # queries' size at once.
    copies = 2 * size(*shapes[1:]) + 4 * size(shapes[0])
    assert temporary(program) < 1.05 * copies
    check_memory(program, chip)


@every_chip
def test_prefill_and_its_tangent(chip):
    """A matrix of scores in memory, or more copies of the operands and directions than tiles need."""
    shapes = operands(8192, 8192, 32, 8)
    program = compiled(chip, with_tangent, *shapes, *shapes, kernels=2)
    # heads move to the front: of keys, values and their directions; of queries, out and theirs
    copies = 4 * size(shapes[1]) + 4 * size(shapes[0])
    assert temporary(program) < 1.05 * copies
    check_memory(program, chip)


@pytest.mark.parametrize("chip", few(["v5p", "tpu7x"], "tpu7x"))
@pytest.mark.parametrize(("heads", "kv_heads"), few_rows(HEADS))
def test_tangent_of_decode_copies_nothing(chip, heads, kv_heads):
    """A copy of 640k keys or values, or of their directions."""
    shapes = operands(1, 640_000, heads, kv_heads)
    program = compiled(chip, with_tangent, *shapes, *shapes, kernels=2)
    assert temporary(program) < 0.001 * size(*shapes)


@pytest.mark.parametrize(
    ("queries", "keys", "width", "value_width", "dtype"),
    few_rows(
        [
            (3, 1001, 5, 7, "float32"),
            (8, 5001, 256, 80, "bfloat16"),
            (1, 7, 64, 32, "bfloat16"),
            (700, 1001, 96, 128, "float32"),
            (70, 1001, 1024, 512, "float32"),
        ],
        2,
    ),
)
def test_odd_shapes_compile(queries, keys, width, value_width, dtype):
    """Blocks that do not fit into a chip's memory, or that its compiler cannot cut."""
    shapes = operands(queries, keys, 8, 2, width, value_width, dtype)
    compiled("v4", both_gradients, *shapes, kernels=3)  # the chip with the least memory
    compiled("v4", with_tangent, *shapes, *shapes, kernels=2)


def test_source_and_segments():
    """Wide queries beside narrow values; positions and segments together."""
    shapes = operands(300, 1001, 8, 2)

    def attend(query, key, value, source, query_segments, key_segments):
        return attention(
            query,
            key,
            value,
            source=source,
            is_causal=True,
            query_segment_ids=query_segments,
            key_segment_ids=key_segments,
        )

    marks = ("int32", 1, 300), ("int32", 1, 1001)
    compiled("v5e", attend, *shapes, shapes[0], *marks, kernels=1)


def test_inside_shard_map():
    """Results whose types do not vary over the mesh; a fall-back to XLA's operations."""
    mesh = Mesh(np.array(devices("v5e")[:2]), ("shards",))
    sharded = P(None, "shards")
    specs = P(), sharded, sharded
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (dtype, *shape), spec in zip(operands(2, 4096, 8, 2), specs, strict=True)
    ]

    def total(query, key, value):
        return lax.psum(attention(query, key, value, is_causal=True).lse.sum(), "shards")

    gradients = jax.shard_map(
        jax.grad(total, (0, 1, 2)), mesh=mesh, in_specs=specs, out_specs=specs
    )
    lowered = jax.jit(gradients).lower(*arrays)
    assert lowered.as_text().count("tpu_custom_call") == 3
    lowered.compile()
    tangents = jax.shard_map(
        lambda *x: jax.jvp(total, x[:3], x[3:]), mesh=mesh, in_specs=specs * 2, out_specs=P()
    )
    lowered = jax.jit(tangents).lower(*arrays, *arrays)
    assert lowered.as_text().count("tpu_custom_call") == 2
    lowered.compile()


def spaced(query, key, step):
    return (query - key) % step == 0


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(masks.Causal() | masks.Prefix(100), marks=pytest.mark.full),
        masks.tabulate(masks.Causal() & (masks.Window(64, None) | masks.Function(spaced, 4)), 1024),
        masks.Function(lambda q, k: (jnp.sign(q - k) == 1) | ((q ^ k) & (k << 2) == 0)),
        pytest.param(
            masks.Function(lambda q, k: jnp.where(q > k, q % 2 == 0, abs(q // 64 - k // 64) < 2)),
            marks=pytest.mark.full,
        ),
    ],
    ids=["prefix", "table", "bits", "select"],
)
def test_rules_compile(rule):
    """Operations on pairs, or a list of blocks, that the chip's compiler refuses."""
    shapes = operands(1024, 1024, 8, 2)

    def run(*arrays):
        state, back = jax.vjp(functools.partial(attention, mask=rule), *arrays)
        return back(state)

    compiled("v5e", run, *shapes, kernels=3)


def gradients_of_score(make):
    """The state by a score, and all gradients."""

    def run(query, key, value, *parameters):
        def attend(query, key, value, parameters):
            return attention(query, key, value, is_causal=True, score=make(*parameters))

        state, back = jax.vjp(attend, query, key, value, parameters)
        return state, back(AttentionState(state.out, state.lse))

    return run


def tangent_of_score(make):
    """The state and its derivative in all directions, that of the parameters among them."""

    def run(*arrays):
        def attend(query, key, value, *parameters):
            return attention(query, key, value, is_causal=True, score=make(*parameters))

        half = len(arrays) // 2
        return jax.jvp(attend, arrays[:half], arrays[half:])

    return run


SCORES = {  # a score, and the parameters that it is of
    "soft_cap": (lambda x: scores.SoftCap(x[0]), ("float32", 1)),
    "alibi": (scores.ALiBi, ("float32", 32)),
    "t5": (lambda x: scores.RelativeBias(x, scores.RelativeBias.t5_buckets()), ("float32", 32, 32)),
}


@pytest.mark.parametrize("chip", few(["v4", "tpu7x"], "v4"))
@pytest.mark.parametrize("name", few(list(SCORES), "alibi"))
def test_scores(name, chip):
    """A matrix of scores in memory, or blocks that do not fit beside those of a score's derivative."""
    make, parameters = SCORES[name]
    shapes = operands(8192, 8192, 32, 8)
    program = compiled(chip, gradients_of_score(make), *shapes, parameters, kernels=3)
    copies = 2 * size(*shapes[1:]) + 4 * size(shapes[0])
    # in each row a number or the entries of a table, and its gradient: in the layout of both kernels
    entries = math.prod(parameters[2:])
    assert temporary(program) < 1.05 * copies + 8 * entries * size(("float32", 8192, 32))
    given = *shapes, parameters
    program = compiled(chip, tangent_of_score(make), *given, *given, kernels=2)
    copies = 4 * size(shapes[1]) + 4 * size(shapes[0])
    assert temporary(program) < 1.05 * copies + 8 * entries * size(("float32", 8192, 32))


@pytest.mark.parametrize("name", few(["alibi", "t5"], "t5"))
def test_decode_with_scores_copies_nothing(name):
    """A copy of keys or values; positions that take a row of a tile each."""
    make, parameters = SCORES[name]
    shapes = operands(1, 640_000, 32, 8)

    def decode(query, key, value, parameters):
        return attention(query, key, value, score=make(parameters))

    program = compiled("v5p", decode, *shapes, parameters, kernels=1)
    assert temporary(program) < 0.02 * size(*shapes)


def _every_function(s, at, x, table):
    """All that the kernel says that it computes, of the product or of positions."""
    whole = at.query - at.key
    t = jnp.tanh(s)
    positive = 1 + s * s
    for f in (jnp.sin, jnp.cos, jnp.tan, jnp.exp2, jnp.floor, jnp.ceil):
        s = s + f(t)
    for f in (jnp.log, jnp.log1p, jnp.sqrt, jax.lax.rsqrt, jnp.exp):
        s = s - f(positive)
    s = s + jax.nn.sigmoid(t) + t**3 + jnp.square(t) + positive ** x[at.head]
    s = s + jnp.clip(t, -0.5, 0.5) + jnp.logaddexp(t, s) + jax.nn.relu(t)
    s = s + jnp.where((whole % 3 == 1) ^ (whole < 4) | jnp.isfinite(s) & ~(t > 0), t, -t)
    s = s + jnp.minimum(t, s) / jnp.maximum(s, 1.0) + jnp.remainder(s, 2.0)
    return s + table[at.head, jnp.clip(abs(whole) // 2, 0, 8)]


@pytest.mark.parametrize("chip", few(["v4", "tpu7x"], "tpu7x"))
def test_functions_of_scores(chip):
    """A function that the kernel promises, and Mosaic or a chip lacks."""

    def make(*x):
        return scores.Function(_every_function, *x)

    given = *operands(16, 128, 4, 2), ("float32", 4), ("float32", 4, 9)
    compiled(chip, gradients_of_score(make), *given, kernels=3)
    compiled(chip, tangent_of_score(make), *given, *given, kernels=2)
