"""`decode_cpu` in many small pieces, on problems of each kind that it takes, and in programs over several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import collectives
from energy_attn.kernels import local_attention
from energy_attn.kernels.xla._decode_cpu import DecodeCPU
from energy_attn.kernels.xla._weighed_sum import Pieces
from tests.support.compare import close, same
from tests.support.flags import EMITTERS, OLD
from tests.support.problems import cast, cotangents
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


@pytest.mark.parametrize("pieces", [Pieces(), Pieces(keys=3, numbers=64)])
def test_absent_values_are_not_read(pieces):
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
            implementation=DecodeCPU(pieces),
        )

    wanted = run(jnp.asarray(np.where(hidden, 0, key)))
    for bad in (np.nan, np.inf):
        same(run(jnp.asarray(np.where(hidden, bad, key))).out, wanted.out)
    assert np.isneginf(wanted.lse[1]).all() and not np.asarray(wanted.out[1]).any()


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16"], "float32"))
def test_weights_are_written_over_the_scores(dtype):
    """A second array of the size of the scores: as long again, in page faults."""
    assert temporary(64, 64, 8, dtype) < 1.5 * 4 * 16384 * 64


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16"], "bfloat16"))
def test_values_of_one_key_head_are_not_copied(dtype):
    """An axis of size 1, for which XLA:CPU copies all values before it reads them."""
    assert temporary(2, 1, 256, dtype) < 16384 * 256


def temporary(heads, kv_heads, width, dtype):
    """Bytes beside arguments and results of a decode step with 16384 keys."""
    query = jax.ShapeDtypeStruct((1, 1, heads, width), dtype)
    key = jax.ShapeDtypeStruct((1, 16384, kv_heads, width), dtype)
    run = jax.jit(functools.partial(local_attention, implementation="decode_cpu"))
    as_users: dict[str, bool | str] | None = {EMITTERS.strip("-"): True} if OLD else None
    memory = run.lower(query, key, key).compile(as_users).memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


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


def test_many_rows_of_few_key_heads_have_decode():
    x = jnp.ones((1, 5, 2, 8), jnp.float32)
    with pytest.raises(NotImplementedError, match="at most 4 rows a key head, got 5"):
        local_attention(x, x, x, implementation="decode_cpu")
    assert local_attention(x[:, :4], x, x, implementation="decode_cpu").lse.shape == (1, 4, 2)


def test_vmap_over_nothing():
    """A division by the number of calls."""
    x = jnp.ones((0, 1, 2, 4, 8), jnp.float32)
    found = jax.vmap(lambda x: local_attention(x, x, x, implementation="decode_cpu"))(x)
    assert found.out.shape == x.shape and found.lse.shape == x.shape[:-1]
    back = jax.grad(lambda x: jax.vmap(lambda x: local_attention(x, x, x).out)(x).sum())(x)
    assert back.shape == x.shape
