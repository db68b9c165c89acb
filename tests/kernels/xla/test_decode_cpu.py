"""`decode_cpu` in many small pieces, on problems of each kind that it takes, and in programs over several devices."""

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
from energy_attn.kernels.internal import PartIndices, arguments
from energy_attn.kernels.xla import _decode
from energy_attn.kernels.xla._decode import DecodeCPU
from energy_attn.kernels.xla._loops import scores_of
from tests.support.compare import close, same
from tests.support.flags import EMITTERS, OLD
from tests.support.problems import Problem, cast, cotangents
from tests.support.reference import dense, dense_vjp
from tests.support.selection import few, few_rows
from tests.support.traits import EVERY, SMALL_PIECES, attend, state_and_gradients

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
    arrays, rounded = cast(EVERY[name], jnp.float32)
    run = functools.partial(attend, problem=EVERY[name], implementation=SMALL_PIECES)
    close(tuple(jax.jit(run)(arrays)), dense(rounded), name, tolerance=4e-6)


@pytest.mark.parametrize(
    ("name", "dtype"),
    few_rows(
        [
            ("grouped", "bfloat16"),
            ("value_wider", "float16"),
            ("ragged_keys", "bfloat16"),
            ("grouped", "float16"),
            ("value_wider", "bfloat16"),
            ("ragged_keys", "float16"),
        ],
        3,
    ),
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
    arrays, rounded = cast(EVERY[name], jnp.float32)
    dout, dlse = cotangents(EVERY[name], jnp.float32)
    found = state_and_gradients(SMALL_PIECES, EVERY[name])(arrays, dout, dlse)
    out, lse = dense(rounded)
    wanted = {"out": out, "lse": lse} | dense_vjp(rounded, dout, dlse)
    close(found, wanted, name, tolerance=1e-5)


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
    arrays, rounded = cast(problem, dtype)
    given = cotangents(problem, dtype)
    found = state_and_gradients(DecodeCPU(), problem)(arrays, *given)
    out, lse = dense(rounded)
    wanted = {"out": out, "lse": lse} | dense_vjp(rounded, *given)
    close(found, wanted, tolerance=max(float(jnp.finfo(dtype).eps), 1e-14) * 16)


def test_scores_of_blocks():
    """Keys, or rows of the batch, that count from the start of their block."""
    query, key = np.random.default_rng(0).standard_normal((2, 2, 19, 2, 4)).astype(np.float32)
    query = query[:, :3]

    def of_place(s, at):
        return s * (1 + at.batch).astype(s.dtype) - 0.1 * (at.key - at.query).astype(s.dtype)

    score = scores.Function(of_place)
    call = arguments.check_call(*map(jnp.asarray, (query, key, key)), score=score)
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
    found = local_attention(x[:, :1], x, jnp.asarray(value), implementation=DecodeCPU(6), **given)
    np.testing.assert_allclose(found.out[0, 0, 0], [1, np.inf, 1, 1], rtol=1e-6)


@pytest.mark.parametrize("kernel", [DecodeCPU(), SMALL_PIECES])
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
    read = []

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
        implementation=DecodeCPU(size),
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


def test_a_partitioned_program_has_decode():
    """The pieces of sharded values would be sent between devices."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("keys",))
    sharded = NamedSharding(mesh, P(None, "keys"))
    query = jax.ShapeDtypeStruct((1, 1, 4, 8), jnp.float32, sharding=NamedSharding(mesh, P()))
    key = jax.ShapeDtypeStruct((1, 64, 4, 8), jnp.float32, sharding=sharded)
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
