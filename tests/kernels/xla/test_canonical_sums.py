"""Gradients of biases, of scores' arrays and of sinks: one order of their sums, whatever is beside the tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.kernels import AttentionState, scores
from energy_attn.kernels.internal import Canonical
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.flags import LEVEL, flags, spawn
from tests.support.prompts import same_bytes
from tests.support.selection import few, few_rows

BATCH, ROWS, KEYS, HEADS = 2, 270, 290, 4  # two tiles of queries, two leaves of keys
BIASES = [(BATCH, HEADS, ROWS, KEYS), (1, 1, ROWS, 1), (BATCH, 1, 1, KEYS), (1, HEADS, 1, 1)]


def wave(score, at, period):
    """A score whose gradient is a sum of products."""
    far = (at.query - at.key).astype(score.dtype)
    return score + jnp.cos(score * period[at.head]) * jnp.tanh(0.01 * far)


def learned(dtype, shape):
    """A bias, a score of several arrays, and a sink."""
    rng = np.random.default_rng(1)
    score = scores.Compose(
        scores.ALiBi(array(np.linspace(0.01, 0.3, HEADS), dtype)),
        scores.RelativeBias(
            array(rng.standard_normal((HEADS, 32)), dtype), scores.RelativeBias.t5_buckets()
        ),
        scores.Function(wave, array(np.linspace(0.2, 1.7, HEADS), dtype)),
    )
    bias, sink = rng.standard_normal(shape), rng.standard_normal(HEADS)
    return array(bias, dtype), score, array(sink, dtype)


def tokens(dtype, seed=2):
    """Query, key, value, cotangent, and the positions of rows and keys."""
    rng = np.random.default_rng(seed)
    shapes = (ROWS, HEADS, 16), (KEYS, 2, 16), (KEYS, 2, 24), (ROWS, HEADS, 24)
    arrays = (array(rng.standard_normal((BATCH, *x)), dtype) for x in shapes)
    places = (np.arange(first, first + n, dtype=np.int32) for first, n in ((20, ROWS), (0, KEYS)))
    return *arrays, *(np.broadcast_to(x, (BATCH, len(x))) for x in places)


# the state by the canonical kernel, of which a sink is the last partial of a row
attend = functools.partial(ea.attention, implementation=Canonical(), return_energy=True)


@jax.jit
def gradients(learned, q, k, v, d_out, rows, keys):
    """Of the bias, the score's arrays and the sink; of cotangents that no program rounds in another way."""

    def state(learned):
        bias, score, sink = learned
        places = {"query_positions": rows, "key_positions": keys}
        options = {"bias": bias, "score": score, "sink": sink, "is_causal": True}
        return attend(q, k, v, **options, **places)

    (_, energy), pull = jax.vjp(state, learned)
    return pull((d_out, 0.3 * energy))[0]


def shuffled(x, axis, order, capacity, fill):
    """Tokens in another order, among absent ones."""
    if x.shape[axis] == 1:
        return x
    junk = np.full((*x.shape[:axis], capacity, *x.shape[axis + 1 :]), fill, x.dtype)
    index = *[slice(None)] * axis, order
    junk[index] = x
    return junk


@pytest.mark.parametrize(
    ("dtype", "shape"), few_rows([("float32", x) for x in BIASES] + [("bfloat16", BIASES[1])])
)
def test_order(dtype, shape):
    """A sum in the order of the tokens in memory, or of absent ones, too."""
    given, (q, k, v, d_out, rows, keys) = learned(dtype, shape), tokens(dtype)
    bias, score, sink = given
    wanted = gradients(given, q, k, v, d_out, rows, keys)
    rng = np.random.default_rng(3)
    of_rows, of_keys = rng.permutation(400)[:ROWS], rng.permutation(560)[:KEYS]

    def moved(x, fill):
        x = shuffled(np.asarray(x), 2, of_rows, 400, fill)
        return shuffled(x, 3, of_keys, 560, fill)

    q, d_out, rows = (
        shuffled(np.asarray(x), 1, of_rows, 400, fill)
        for x, fill in ((q, 3), (d_out, 2), (rows, -1))
    )
    k, v, keys = (
        shuffled(np.asarray(x), 1, of_keys, 560, fill) for x, fill in ((k, 5), (v, 1), (keys, -1))
    )
    found = gradients((moved(bias, 1), score, sink), q, k, v, d_out, rows, keys)
    of_bias = np.asarray(wanted[0])
    same_bytes(found, (moved(of_bias, 0), *wanted[1:]))


@pytest.mark.parametrize("shape", few(BIASES, BIASES[0]))
def test_values(shape):
    """A tile, head or entry that is left out or counted twice; another query's position."""
    given, arrays = learned("float64", shape), tokens("float64")

    def state(learned):
        (q, k, v, *_, rows, keys), (bias, score, sink) = arrays, learned
        k, v = (jnp.repeat(x, HEADS // 2, 2) for x in (k, v))
        raw = jnp.einsum("btnh,bsnh->bnts", q, k) / 4
        own, other = jnp.asarray(rows[0, None, :, None]), jnp.asarray(keys[0, None, None])
        heads = jnp.arange(HEADS)[:, None, None]
        raw = jnp.stack(
            [score(x, scores.ScoreIndices(b, heads, own, other)) for b, x in enumerate(raw)]
        )
        raw = jnp.where((other <= own)[None], raw + bias, -jnp.inf)
        energy = jax.nn.logsumexp(raw, 3)
        energy = jnp.logaddexp(energy, sink[None, :, None])
        out = jnp.einsum("bnts,bsnh->btnh", jnp.exp(raw - energy[..., None]), v)
        return AttentionState(out, energy.swapaxes(1, 2))

    @jax.jit
    def exact(learned):
        found, pull = jax.vjp(state, learned)
        return pull(AttentionState(arrays[3], 0.3 * found.lse))[0]

    wanted = exact(given)
    close(jax.tree.leaves(gradients(given, *arrays)), jax.tree.leaves(wanted), "gradients", 1e-11)


@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 3, 0), (0, 3, 5)])
def test_empty(sizes):
    """A division by the number of tiles; a row without keys whose energy is the sink's."""
    batch, queries, keys = sizes
    q, k, v = (jnp.ones((batch, n, HEADS, 8), jnp.float32) for n in (queries, keys, keys))
    bias, score, sink = learned("float32", (1, 1, 1, 1))

    def energy(learned):
        bias, score, sink = learned
        return attend(q, k, v, bias=bias, score=score, sink=sink)[1].sum()

    *others, of_sink = jax.tree.leaves(jax.grad(energy)((bias, score, sink)))
    assert not any(x.any() for x in others)
    np.testing.assert_array_equal(of_sink, np.full(HEADS, batch * queries))


def test_two_queries_of_one_position():
    """One of them that hides the other in a sum, without a word."""
    *given, rows, keys = tokens("float32")
    found = gradients(learned("float32", BIASES[0]), *given, np.where(rows == 240, 239, rows), keys)
    assert all(np.isnan(x).any() for x in jax.tree.leaves(found))


@pytest.mark.full
def test_as_users_compile():
    """Programs that LLVM makes vectors of, and that XLA fuses, which the suite's are not."""
    file = "tests/kernels/xla/test_canonical_sums.py"
    marks = "-m", "full or not full"
    spawn("-m", "pytest", "-x", file, "-k", "order", *marks, XLA_FLAGS=flags(given=f"{LEVEL}=3"))
