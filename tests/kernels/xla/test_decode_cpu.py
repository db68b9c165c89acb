"""`decode_cpu` in many small pieces, on all problems that it can take, and in programs over several devices."""

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
from tests.support.flags import EMITTERS, OLD
from tests.support.naive import assert_all_close
from tests.support.problems import cast
from tests.support.traits import EMPTY, EVERY, SMALL_PIECES, arrays_of, attend, state_and_gradients

TAKEN = [
    x
    for name, x in EVERY.items()
    if name not in EMPTY and x.query.shape[1] * x.query.shape[2] <= 128
]


@pytest.mark.parametrize("problem", TAKEN, ids=repr)
def test_state(problem):
    state = jax.jit(functools.partial(attend, problem=problem, implementation=SMALL_PIECES))(
        arrays_of(SMALL_PIECES, problem)
    )
    assert_all_close(state._asdict(), problem, np.dtype("float32"), "both", label="decode_cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["grouped", "value_wider", "ragged_keys"])
def test_16_bits(name, dtype):
    arrays, rounded = cast(EVERY[name], dtype)
    state = attend(arrays, EVERY[name], SMALL_PIECES)
    assert (state.out.dtype, state.lse.dtype) == (jnp.dtype(dtype), jnp.float32)
    assert_all_close(state._asdict(), rounded, jnp.dtype(dtype), "both", label="decode_cpu")


@pytest.mark.parametrize("name", ["heads_8_8", "decode_ragged"])
def test_gradients(name):
    problem = EVERY[name]
    arrays = arrays_of(SMALL_PIECES, problem)
    shape = problem.query.shape[:-1] + problem.value.shape[-1:]
    cotangent = (np.random.default_rng(0).standard_normal(s, "float32") for s in (shape, shape[:3]))
    cotangent = tuple(cotangent)
    found = state_and_gradients(SMALL_PIECES, problem)(arrays, *cotangent)
    wanted = state_and_gradients("reference", problem)(arrays, *cotangent)
    for mine, theirs in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pieces", [Pieces(), Pieces(keys=3, numbers=64)])
def test_absent_values_are_not_read(pieces):
    key = jax.random.normal(jax.random.key(0), (2, 17, 4, 8), jnp.float32)
    query, length = key[:, :1], jnp.array([5, 0])
    hidden = jnp.arange(17)[None] >= length[:, None]
    run = functools.partial(
        local_attention,
        query,
        key,
        key_value_seq_lengths=length,
        implementation=DecodeCPU(pieces),
    )
    wanted = run(jnp.where(hidden[..., None, None], 0, key))
    for bad in (np.nan, np.inf):
        found = run(jnp.where(hidden[..., None, None], bad, key))
        np.testing.assert_array_equal(found.out, wanted.out)
    assert np.isneginf(wanted.lse[1]).all() and not wanted.out[1].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_written_over_the_scores(dtype):
    assert temporary(64, 64, 8, dtype) < 1.5 * 4 * 16384 * 64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_of_one_key_head_are_not_copied(dtype):
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
