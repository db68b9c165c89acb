"""The calls that `Canonical` takes, and those that it declines: values, and bytes of a row in calls of other shapes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.kernels import AttentionState, local_attention, scores
from energy_attn.kernels.call._state import of_each
from energy_attn.kernels.internal import Canonical
from tests.kernels.derivatives import check_dense
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.problems import PROBLEMS, cast, cotangents, tangents
from tests.support.prompts import (
    HEADS,
    SHORT,
    Tokens,
    at,
    attend,
    cache_of,
    gradients,
    prompt,
    same_bytes,
)
from tests.support.reference import dense, dense_jvp, dense_vjp
from tests.support.scores import gradient_of, sink_of, with_key
from tests.support.selection import few, few_rows

QUICK = "everything", "no_keys", "predicates", "scale_zero_source", "bias_infinite", "mask_heads"


@pytest.mark.parametrize("problem", few(list(PROBLEMS.values()), *QUICK))
def test_values(problem):
    """A bias, mask, score, source or empty axis that is left out, or read in the place of another head, row or key."""
    options = problem.options | {"implementation": Canonical()}
    check_dense(lambda x: local_attention(**x, **options), problem, np.float64, 1e-10)


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16", "float64"], "float32"))
def test_keys_in_order(dtype):
    """A leaf that is read in another place than it is, past the end of the array, or numbered by its place in it."""
    rng, tokens, in_order = (
        np.random.default_rng(1),
        prompt(dtype).at(slice(SHORT)),
        Canonical(run=256),
    )
    cache = cache_of(tokens, 1300, rng)
    order = rng.permutation(1300)
    weights = (
        array(rng.standard_normal((SHORT, HEADS, 24)), dtype),
        1.0 * jnp.zeros((SHORT, HEADS), "float64" if dtype == "float64" else "float32"),
    )

    def both(kernel, keys):
        found = attend("causal", tokens, keys, kernel)
        return found, gradients("causal", tokens, keys, weights, kernel=kernel)

    state, (d_query, *d_keys) = jax.jit(functools.partial(both, in_order))(cache)
    found, (found_query, *found_keys) = jax.jit(functools.partial(both, Canonical()))(
        cache.at(order)
    )
    same_bytes((state, d_query, [x[order] for x in d_keys]), (found, found_query, found_keys))
    same_bytes([x[SHORT:] for x in d_keys], [0 * x[SHORT:] for x in d_keys])
    # the same without positions, which then count
    options = {"is_causal": True, "implementation": Canonical()}
    counted = local_attention(*map(jnp.asarray, tokens[:3]), **options)
    same_bytes(counted, state)
    counted = local_attention(
        *map(jnp.asarray, (tokens.query, *cache[1:3])),
        key_value_seq_lengths=jnp.int32(SHORT),
        **options,
    )
    same_bytes(counted, state)
    # one device's blocks of a larger cache
    mine = np.isin(np.arange(1300) // 256, [0, 2, 3])
    cyclic = cache._replace(positions=np.where(mine, cache.positions, -1))
    some = Tokens._make(x[mine] for x in cyclic)
    same_bytes(attend("causal", tokens, some, in_order), attend("causal", tokens, cyclic, in_order))


def wave(score, at, period):
    """A function whose products meet sums."""
    return score * 0.3 + jnp.cos(score * period[at.head]) * (at.query - at.key).astype(score.dtype)


@pytest.mark.parametrize("dtype", few(["float32", "float64"], "float32"))
def test_terms_of_scores(dtype):
    """A term whose product is fused with a sum in calls of one shape alone; a bias by slot, not by token."""
    rng, (length, keys) = np.random.default_rng(2), (70, 600)
    tokens = prompt(dtype)
    late = tokens.at(slice(keys - length, keys))
    tokens = tokens.at(slice(keys))
    bias = array(rng.standard_normal((1, HEADS, length, keys)), dtype)
    mask = array(rng.random((1, 1, length, keys)) < 0.7)
    of_keys = array(rng.standard_normal((1, HEADS, 1, keys)), dtype)
    score = scores.Compose(
        scores.ALiBi(array(np.linspace(0.01, 0.3, HEADS), dtype)),
        scores.SoftCap(7.3),
        scores.RelativeBias(
            array(rng.standard_normal((HEADS, 32)), dtype), scores.RelativeBias.t5_buckets()
        ),
        scores.Function(wave, array(np.linspace(0.2, 1.7, HEADS), dtype)),
    )
    d_out = array(rng.standard_normal((length, HEADS, 24)), dtype)

    def run(rows, keys, d_out, bias, mask):
        def state(query, key, value):
            return attend(
                "causal",
                rows._replace(query=query),
                keys._replace(key=key, value=value),
                score=score,
                bias=bias,
                mask=mask,
            )

        primals = rows.query, keys.key, keys.value
        found, pull = jax.vjp(state, *primals)
        return (
            found,
            jax.jvp(state, primals, primals)[1],
            *pull(AttentionState(d_out, 0 * found.lse)),
        )

    run = jax.jit(run)
    state, moved, d_query, *d_keys = run(late, tokens, d_out, bias, mask)
    order = rng.permutation(keys)
    found = run(late, tokens.at(order), d_out, bias[..., order], mask[..., order])
    same_bytes(found, (state, moved, d_query, *(x[order] for x in d_keys)))
    for row in (slice(31, 32), slice(5, 8))[: 1 if dtype == "float32" else 2]:
        found = run(late.at(row), tokens, d_out[row], bias[:, :, row], mask[:, :, row])
        same_bytes(found[:3], at((state, moved, d_query), row))
    a, b = (
        attend("causal", late, tokens, bias=x)
        for x in (of_keys, jnp.broadcast_to(of_keys, bias.shape))
    )
    same_bytes(a, b)


@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "value_width", "dtype"),
    few_rows(
        [
            (3, 1, 5, 3, "float32"),
            (6, 2, 7, 2, "float64"),
            (1, 1, 1, 1, "float32"),
            (8, 8, 16, 257, "float32"),
        ]
    ),
)
def test_odd_sizes(heads, key_heads, width, value_width, dtype):
    """A product of few features, or an exponential of few numbers, whose program depends on how many rows there are."""
    rng, length, few_rows = np.random.default_rng(3), 40, slice(17, 20)
    shapes = (heads, width), (key_heads, width), (key_heads, value_width), (heads, value_width)
    query, key, value, source = (array(rng.standard_normal((length, *x)), dtype) for x in shapes)
    d_out = array(rng.standard_normal(source.shape), dtype)
    d_lse = array(rng.standard_normal((length, heads)), dtype)
    mask = array(np.tri(length, dtype=bool)[None, None])

    @functools.partial(jax.jit, static_argnums=0)
    def run(size, query, source, mask, d_out, d_lse):
        def state(query, source):
            options = {"source": source, "mask": mask, "implementation": Canonical()}
            return local_attention(size * query, key, value, **options)

        found, pull = jax.vjp(state, query, source)
        return found, pull(AttentionState(d_out, d_lse))

    for size in (1.0, 3e5):  # where energies are rounded to a sixteenth
        wanted = run(size, query, source, mask, d_out, d_lse)
        for some in (few_rows, slice(30, 31)):
            rows = (x[some] for x in (query, source))
            found = run(size, *rows, mask[:, :, some], d_out[some], d_lse[some])
            same_bytes(found, at(wanted, some))


def test_exponentials():
    """An exponential of a few numbers, or where the last axis is short, that is another one than that of many."""
    x = np.random.default_rng(4).uniform(-9, 4, 8192).astype(np.float32)
    run = jax.jit(functools.partial(of_each, jnp.exp))
    for shape in ((3,), (5,), (13,), (8, 4), (16, 3)):
        size = math.prod(shape)
        for first in range(0, 8000, 800 if len(shape) == 1 else 80):
            some = slice(first, first + size)
            same_bytes(run(x[some].reshape(shape)).reshape(-1), run(x)[some])


@pytest.mark.parametrize("batched", few([True, False], True))
def test_sink(batched):
    """A sink that is left out of a row or of its derivatives, or joined in an order that depends on the call."""
    problem = dataclasses.replace(PROBLEMS["positions_causal"], source=None)
    sink = array(sink_of(problem, batched))
    arrays, problem = cast(problem, np.float64)
    options = problem.options | {"implementation": Canonical(), "return_energy": True}

    def state(arrays, sink):
        return ea.attention(**arrays, sink=sink, **options)

    cotangent, directions = cotangents(problem, np.float64), tangents(problem)
    found, pull = jax.vjp(jax.jit(state), arrays, sink)
    wanted = with_key(problem, np.asarray(sink))
    close(tuple(found), dense(wanted), "state", 1e-11)
    gradients, of_sink = pull(cotangent)
    exact = gradient_of(problem, np.asarray(sink), dense_vjp(wanted, *cotangent))
    close(gradients | {"sink": of_sink}, exact, "gradients", 1e-10)
    d_sink = np.random.default_rng(5).standard_normal(sink.shape)
    moved = jax.jvp(jax.jit(state), (arrays, sink), (directions, jnp.asarray(d_sink)))[1]
    along = {name: np.zeros_like(x) for name, x in wanted.arrays.items()}
    for name, x in directions.items():
        along[name][:, : x.shape[1]] = x
    along["bias"][..., -1] = np.atleast_2d(d_sink)[..., None]
    close(tuple(moved), dense_jvp(wanted, along), "tangent", 1e-10)


def test_memory():
    """Copies of whole arrays, in tiles or in float32."""
    kinds = [jax.ShapeDtypeStruct((1, 2048, n, 64), jnp.bfloat16) for n in (16, 4, 4, 16)]

    def held(reproducible):
        run = functools.partial(local_attention, is_causal=True, reproducible=reproducible)

        def forward(query, key, value, d_out):
            return run(query, key, value).out

        def backward(query, key, value, d_out):
            found, pull = jax.vjp(run, query, key, value)
            return pull(AttentionState(d_out, 0 * found.lse))

        return [
            jax.jit(f).lower(*kinds).compile().memory_analysis().temp_size_in_bytes
            for f in (forward, backward)
        ]

    (found, found_back), (plain, plain_back) = map(held, (True, False))
    assert found < plain and found_back < 1.2 * plain_back


def test_what_is_declined():
    """A derivative of another kernel's, without a word."""
    tokens = prompt("float32").at(slice(8))
    query, key, value = map(jnp.asarray, tokens[:3])

    def energy(query):
        return local_attention(query, key, value, implementation=Canonical()).lse.sum()

    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.hessian(energy)(query)
