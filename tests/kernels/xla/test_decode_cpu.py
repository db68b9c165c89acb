"""Kernels of few rows: `decode_cpu` in small pieces and over several devices; and those with all scores in memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn import scores
from energy_attn.distributed import collectives
from energy_attn.kernels import KernelCall, local_attention
from energy_attn.kernels.internal import PartIndices
from energy_attn.kernels.xla import _decode
from tests.kernels.derivatives import check_dense
from tests.support.compare import close, same
from tests.support.flags import EMITTERS, OLD
from tests.support.meshes import mesh_of
from tests.support.problems import Problem, call_of, cast
from tests.support.reference import dense
from tests.support.selection import few
from tests.support.traits import EVERY, SMALL_PIECES, attend

# Each way to the pieces: a score's arrays, what is hidden and how, rows of several heads, a width of values of its own,
# fewer keys than are added together. What any implementation does with a problem, `test_local_attention.py` asks.
TAKEN = (
    "everything",
    "multi_query",
    "value_wider",
    "one_key",
    "mask_nothing",
    "bias_infinite",
    "decode_cache",
    "segments_causal",
    "rule_nested",
)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.smoke] * (x == "everything")) for x in TAKEN]
)
def test_state(name):
    """A piece left out, or keys of two pieces that count twice; a key that is hidden and counts."""
    problem = EVERY[name]
    run = functools.partial(attend, problem=problem, implementation=SMALL_PIECES)
    check_dense(run, problem, jnp.float32, 4e-6, parts=("state",))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("grouped", "bfloat16"), ("value_wider", "float16"), ("ragged_keys", "bfloat16")],
)
def test_16_bits(name, dtype):
    """Weights or sums in 16 bits."""
    arrays, rounded = cast(EVERY[name], dtype)
    state = jax.jit(functools.partial(attend, problem=EVERY[name], implementation=SMALL_PIECES))(
        arrays
    )
    assert (state.out.dtype, state.lse.dtype) == (jnp.dtype(dtype), jnp.float32)
    out, lse = dense(rounded)
    close(state.out, out, name, tolerance=float(jnp.finfo(dtype).eps))
    close(state.lse, lse, name, tolerance=4e-6)


@pytest.mark.parametrize(
    "name", [pytest.param("decode_ragged", marks=pytest.mark.smoke), *few(["heads_8_8"])]
)
def test_gradients(name):
    """A backward from a state that another kernel's is not: of rows without keys, or of keys in another order."""
    problem = EVERY[name]
    run = functools.partial(attend, problem=problem, implementation=SMALL_PIECES)
    check_dense(run, problem, jnp.float32, 1e-5, parts=("state", "gradients"))


# Each way to multiply whole blocks: rows of a key head one by one, or together in one product or both.
@pytest.mark.parametrize(
    ("dtype", "queries", "heads", "kv_heads", "width"),
    [
        pytest.param("float32", 1, 4, 2, 64, marks=pytest.mark.smoke),
        ("bfloat16", 2, 4, 4, 64),
        ("float64", 3, 2, 1, 16),
        ("bfloat16", 3, 8, 2, 40),
    ],
)
def test_whole_blocks(dtype, queries, heads, kv_heads, width):
    """Sums that are folded in a wrong order, which small blocks do not fold; a row of another head."""
    key_len, random = 1200, np.random.default_rng(0)
    shapes = [(2, key_len, kv_heads, width)] * 2
    query, key, value = map(random.standard_normal, [(2, queries, heads, width), *shapes])
    lengths = np.array([key_len, 530])
    problem = Problem("whole blocks", query, key, value, key_value_seq_lengths=lengths)
    run = functools.partial(attend, problem=problem, implementation=_decode.DecodeCPU())
    tolerance = max(float(jnp.finfo(dtype).eps), 1e-14) * 16
    check_dense(run, problem, dtype, tolerance, parts=("state", "gradients"))


def test_scores_of_blocks():
    """Keys, or rows of the batch, that count from the start of their block."""
    query, key = np.random.default_rng(0).standard_normal((2, 2, 19, 2, 4)).astype(np.float32)
    query = query[:, :3]

    def of_place(s, at):
        return s * (1 + at.batch).astype(s.dtype) - 0.1 * (at.key - at.query).astype(s.dtype)

    score = scores.Function(of_place)
    call = call_of(*map(jnp.asarray, (query, key, key)), score=score)
    operands = call.operands._replace(indices=PartIndices(batch=jnp.array([5, 2])))
    found = SMALL_PIECES.forward(KernelCall(operands, call.settings, "cpu"))
    raw = np.einsum("btnh,bsnh->btns", query.astype(float), key) / 2
    raw = raw * np.array([6, 3]).reshape(2, 1, 1, 1)
    raw -= 0.1 * (np.arange(19) - np.arange(3)[:, None, None])
    close(found.lse, np.log(np.exp(raw).sum(-1)), tolerance=1e-6)


@pytest.mark.parametrize("lengths", [None, 9])
def test_a_value_of_two_blocks_that_is_not_finite(lengths):
    """Read by both, of which the second one multiplies it by zero: a NaN."""
    value = np.ones((1, 9, 1, 4), np.float32)
    value[0, 4, 0, 1] = np.inf
    x = jnp.zeros((1, 9, 1, 4), jnp.float32)
    given = {} if lengths is None else {"key_value_seq_lengths": jnp.array([lengths])}
    found = local_attention(
        x[:, :1], x, jnp.asarray(value), implementation=_decode.DecodeCPU(6), **given
    )
    np.testing.assert_allclose(found.out[0, 0, 0], [1, np.inf, 1, 1], rtol=1e-6)


@pytest.mark.parametrize("kernel", [_decode.DecodeCPU(), SMALL_PIECES])
def test_absent_values_are_not_read(kernel):
    """0 · NaN, or a maximum that an absent key has a part in."""
    key = np.random.default_rng(0).standard_normal((2, 17, 4, 8)).astype(np.float32)
    length = np.array([5, 0])
    hidden = (np.arange(17)[None] >= length[:, None])[..., None, None]

    @jax.jit
    def run(value):
        return local_attention(
            jnp.asarray(key[:, :1]),
            jnp.asarray(key),
            value,
            key_value_seq_lengths=jnp.asarray(length),
            implementation=kernel,
        )

    wanted = run(jnp.asarray(np.where(hidden, 0, key)))
    for bad in (np.nan, np.inf):
        same(run(jnp.asarray(np.where(hidden, bad, key))).out, wanted.out)
    assert np.isneginf(wanted.lse[1]).all() and not np.asarray(wanted.out[1]).any()


@pytest.mark.parametrize("name", ["decode_cpu", "blockwise"])
def test_loops_copy_no_keys(name):
    """A loop before which XLA:CPU takes the bits of all keys, or casts them: a copy of the cache."""
    query = jax.ShapeDtypeStruct((1, 1, 2, 256), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, 16384, 1, 256), jnp.bfloat16)
    run = jax.jit(functools.partial(local_attention, implementation=name))
    as_users: dict[str, bool | str] | None = {EMITTERS.strip("-"): True} if OLD else None
    memory = run.lower(query, key, key).compile(as_users).memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 16384 * 256


@pytest.mark.smoke
@pytest.mark.parametrize("capacity", [64, 60])  # 60: the last block overlaps the one before
@pytest.mark.parametrize("window", [None, 5])
def test_blocks_without_a_live_slot_are_not_read(monkeypatch, capacity, window):
    """A step that takes as long as the capacity of its cache; rows that read the blocks of the longest."""
    read, scores_of = [], _decode.scores_of

    def counted(query, key, how):
        jax.debug.callback(lambda: read.append(1))
        return scores_of(query, key, how)

    monkeypatch.setattr(_decode, "scores_of", counted)
    random = np.random.default_rng(0)
    lengths, size = np.array([0, 1, 8, 9, 23, capacity]), 8
    rows = len(lengths)
    key, value = random.standard_normal((2, rows, capacity, 2, 4)).astype(np.float32)
    query = random.standard_normal((rows, 1, 4, 4)).astype(np.float32)
    slots = np.arange(capacity)[None]
    positions = np.where(slots < lengths[:, None], slots, -1)
    last = lengths[:, None] - 1
    state = local_attention(
        *map(jnp.asarray, (query, key, value)),
        is_causal=True,
        local_window_size=None if window is None else (window, 0),
        query_positions=jnp.asarray(last),
        key_positions=jnp.asarray(positions),
        implementation=_decode.DecodeCPU(size),
    )
    jax.effects_barrier()
    seen = (positions >= 0) & (window is None or positions >= last - window)
    padded = np.pad(seen, ((0, 0), (0, -capacity % size)))
    assert len(read) == padded.reshape(rows, -1, size).any(-1).sum()
    scores = np.einsum("bkgh,bskh->bkgs", query.reshape(rows, 2, 2, 4).astype(float), key) / 2
    scores = np.where(seen[:, None, None], scores, -np.inf)
    with np.errstate(divide="ignore"):
        wanted = np.log(np.exp(scores).sum(-1)).reshape(rows, 1, 4)
    close(state.lse, wanted, tolerance=1e-6)


def sharded(mesh, length, width):
    """One query, and keys whose tokens are on all axes of a mesh."""
    query, key = (jax.ShapeDtypeStruct((1, n, 4, width), jnp.float32) for n in (1, length))
    spec = P(None, mesh.axis_names)
    return query.update(sharding=NamedSharding(mesh, P())), key.update(
        sharding=NamedSharding(mesh, spec)
    )


def test_a_partitioned_program_has_decode():
    """The pieces of sharded values would be sent between devices."""
    query, key = sharded(Mesh(np.array(jax.devices()[:2]), ("keys",)), 64, 8)
    sent = collectives(jax.jit(local_attention).lower(query, key, key).compile())
    assert {x.kind for x in sent} == {"all-reduce"}
    with pytest.raises(NotImplementedError, match="XLA cannot split it over devices"):
        named = functools.partial(local_attention, implementation="decode_cpu")
        jax.jit(named).lower(query, key, key)


def test_vmap_over_nothing():
    """A division by the number of calls."""
    x = jnp.ones((0, 1, 2, 4, 8), jnp.float32)
    found = jax.vmap(lambda x: local_attention(x, x, x, implementation="decode_cpu"))(x)
    assert found.out.shape == x.shape and found.lse.shape == x.shape[:-1]
    back = jax.grad(lambda x: jax.vmap(lambda x: local_attention(x, x, x).out)(x).sum())(x)
    assert back.shape == x.shape


def test_a_tangent_gathers_no_keys():
    """A loop over blocks of keys in a tangent that XLA partitions: keys and values are gathered."""
    query, key = sharded(mesh_of("8"), 4096, 64)

    def state(*arrays):
        return tuple(local_attention(*arrays, implementation="decode"))

    arrays = query, key, key
    run = jax.jit(lambda arrays, along: jax.jvp(state, arrays, along))
    assert {x.kind for x in collectives(run.lower(arrays, arrays).compile())} == {"all-reduce"}


def test_float16_cotangents_do_not_underflow():
    """Weights that are rounded before they are divided by a total of thousands, in the kernel that judges others."""
    rng = np.random.default_rng(0)
    shapes = (1, 4, 2, 16), (1, 4096, 2, 16), (1, 4096, 2, 16), (1, 4, 2, 16)
    query, key, value, weights = (rng.standard_normal(x).astype(np.float16) for x in shapes)

    def gradient(dtype):
        def loss(query):
            arrays = (jnp.asarray(x, dtype) for x in (query, key, value))
            out = local_attention(*arrays, scale=0.1, implementation="reference").out
            return (out.astype(jnp.float32) * weights.astype(np.float32) * 1e-3).sum()

        return np.asarray(jax.grad(loss)(jnp.asarray(query, dtype)), np.float64)

    wanted = gradient(jnp.float32)
    error = np.linalg.norm(gradient(jnp.float16) - wanted) / np.linalg.norm(wanted)
    assert error < 0.004
