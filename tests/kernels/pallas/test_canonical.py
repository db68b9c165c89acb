"""The canonical kernels for TPUs and GPUs, interpreted: folds in parts and in nodes, masks, scores and sinks.

The law of all canonical kernels is in `tests/kernels/fold/test_canonical.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn import masks, scores
from energy_attn.kernels import AttentionState, local_attention
from energy_attn.kernels.internal import LEAF, candidates, platform_here
from energy_attn.kernels.internal import cotangents as directions_of
from tests.support.compare import close
from tests.support.problems import call_of
from tests.support.prompts import (
    HEADS,
    VALUE_WIDTH,
    Tokens,
    attend,
    cache_of,
    gradients,
    prompt,
    same_bytes,
    tangent,
)
from tests.support.selection import few, few_rows

TPU, GPU, CPU = candidates(None, reproducible=True)
KERNELS = {"tpu": TPU, "gpu": GPU}
# XLA:CPU compiles a program of an interpreted kernel in parts, whose number and bits follow its length.
UNDIVIDED = {"xla_cpu_parallel_codegen_split_count": 1}


def array_tokens(rng, length, first):
    """Random ones at positions from `first` on."""
    sizes = (HEADS, 16), (2, 16), (2, VALUE_WIDTH)
    arrays = (rng.standard_normal((length, *x)).astype(np.float32) for x in sizes)
    places = np.arange(first, first + length, dtype=np.int32)
    return Tokens._make((*arrays, places, np.zeros_like(places)))


def tokens_of(seed=0, length=300):
    return prompt("float32", seed).at(slice(length))


@pytest.mark.parametrize("name", few([*KERNELS], "tpu"))
def test_in_parts(name, monkeypatch):
    """A fold in parts, for calls of few rows, in another order than in one kernel, or that rounds less."""
    kernel, rng, first = KERNELS[name], np.random.default_rng(5), 2 * LEAF + 90
    # 11 leaves, of which the first is the third of the tree
    keys = array_tokens(rng, 10 * LEAF, first)
    rows = keys.at(slice(9 * LEAF - 20, 9 * LEAF + 20))
    seeds = tuple(rng.standard_normal(x.shape).astype(x.dtype) for x in (rows[0], *keys[1:3]))
    weights = [
        rng.standard_normal((40, HEADS, *x)).astype(np.float32) for x in ((VALUE_WIDTH,), ())
    ]
    found = []
    for least_tiles in (1, 1 << 16):
        monkeypatch.setattr(type(kernel), "least_tiles", least_tiles)
        jax.clear_caches()
        state = attend("causal", rows, keys, kernel)
        to_query = gradients("causal", rows, keys, weights, kernel=kernel)[0]
        found.append((state, to_query, tangent("causal", rows, keys, seeds, kernel=kernel)))
    same_bytes(*found)


@pytest.mark.parametrize("name", KERNELS)
def test_masks(name):
    """A mask by numbers of tokens that is not read."""
    tokens = tokens_of()
    query, key, value, ids = (jnp.asarray(x)[None] for x in (*tokens[:3], tokens.segments))
    mask = masks.Prefix(jnp.asarray([217], np.int32)) | masks.Segments(ids, ids)
    run = functools.partial(local_attention, query, key, value, mask=mask)
    found, wanted = (run(implementation=x) for x in (KERNELS[name], "reference"))
    close(found, wanted, name, 1e-5)


@pytest.mark.parametrize("name", few([*KERNELS], "tpu"))
def test_nodes(name):
    """Nodes of two devices, each with every other two leaves, that are folded in another order than on one device."""
    rng, tokens = np.random.default_rng(4), tokens_of(length=1900)
    cache = cache_of(tokens, 8 * LEAF, rng)
    # without some leaves, so that numbers of those beside each other differ in any bits
    gone = np.repeat(rng.random(64) < 0.5, LEAF // 8) | np.isin(np.arange(8 * LEAF) // LEAF, (2, 5))
    cache = cache._replace(positions=np.where(gone, -1, cache.positions).astype(np.int32))
    one, own = (type(KERNELS[name])(run) for run in (None, 2 * LEAF))
    place = np.arange(8 * LEAF) // (2 * LEAF) % 2
    shards = [cache.at(place == device) for device in range(2)]
    d_out, d_lse = (rng.standard_normal((1, 1900, HEADS, *x)) for x in ((VALUE_WIDTH,), ()))
    cotangent = AttentionState(*(jnp.asarray(x, np.float32) for x in (d_out, d_lse)))

    def call(keys):
        rows, keys = (Tokens._make(jnp.asarray(y)[None] for y in x) for x in (tokens, keys))
        positions = {"query_positions": rows.positions, "key_positions": keys.positions}
        arrays = rows.query, keys.key, keys.value, None, None, None
        return call_of(*arrays, is_causal=True, **positions, platform=platform_here())

    # not compiled together: XLA:CPU fuses what the interpreter emits of a tile with what is around it
    def across():
        calls = [call(x) for x in shards]

        def fold(method, *others):
            folds = [getattr(own, method)(x, *others) for x in calls]
            nodes, numbers = zip(*(x.nodes(2) for x in folds), strict=True)
            joined = [jnp.concatenate(x) for x in zip(*nodes, strict=True)]
            return folds[0].of_nodes(joined, jnp.concatenate(numbers, 1))

        state, _ = fold("state_fold")
        to_query = fold("query_fold", state, cotangent)
        directions = directions_of(calls[0].operands.query, None, None, None)
        moved = fold("tangent_fold", state, directions)
        return state, to_query, moved

    def alone():
        whole = call(cache)
        state = one.forward(whole)
        directions = directions_of(whole.operands.query, None, None, None)
        to_query = one.query_cotangent(whole, state, cotangent)
        return state, to_query, one.tangent(whole, state, directions), own.forward(whole)

    *found, in_place = alone()
    same_bytes(across(), tuple(found))
    same_bytes(in_place, found[0])


@pytest.mark.parametrize("name", KERNELS)
def test_gaps_between_leaves(name):
    """More nodes that wait than those of as many leaves in a row: one that is written in another's place."""
    tokens = tokens_of(length=6 * LEAF)
    blocks = np.asarray([0, 16, 24, 28, 30, 31], np.int32)
    positions = (LEAF * blocks[:, None] + np.arange(LEAF, dtype=np.int32)).reshape(-1)
    keys, rows = tokens._replace(positions=positions), tokens.at(slice(40))
    found = attend("full", rows, keys, type(KERNELS[name])(LEAF))
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = attend("full", rows, keys, type(CPU)(LEAF))
    close(found, wanted, name, 1e-5)


def by_place(x, at):
    """Of the product, both positions, the entry of the batch and the head."""
    apart = (at.query - at.key).astype(x.dtype)
    return x * jnp.cos(0.01 * apart) + (at.batch + 2 * at.head).astype(x.dtype) / 10


def of_many(x, at, *several):
    """Of more numbers than have one digit."""
    for n, y in enumerate(several):
        x = 0.9 * x + y * jnp.sin(x * (n + 1) / 10)
    return x


SCORES = {
    "many numbers": scores.Function(of_many, *np.linspace(0.1, 1.2, 12).astype(np.float32)),
    "soft cap": scores.SoftCap(2.0),
    "of places": scores.Function(by_place),
}


SCORED = [("tpu", "many numbers", False), ("gpu", "of places", True)]
SCORED += [(name, score, name == "gpu") for score in SCORES for name in KERNELS]


@pytest.mark.parametrize(("name", "score", "of_entries"), few_rows(list(dict.fromkeys(SCORED)), 2))
def test_scores_and_sinks(name, score, of_entries):
    """A score or a sink that is left out of the state, a gradient or the tangent; a score that is told another head,
    position or entry; a sink whose gradient is summed in an order that depends on the call.
    """
    rng = np.random.default_rng(3)
    texts = [tokens_of(seed) for seed in (0, 1)]
    arrays = [jnp.asarray(np.stack(x)) for x in zip(*(x[:3] for x in texts), strict=True)]
    arrays.append(jnp.asarray(rng.standard_normal((2, HEADS) if of_entries else HEADS), "float32"))
    moves = [jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in arrays]
    slopes = jnp.asarray(rng.uniform(0.01, 0.1, HEADS), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0, compiler_options=UNDIVIDED)
    def derivatives(implementation, slopes, moves, arrays, cotangent, options):
        of_heads = scores.Compose(SCORES[score], scores.ALiBi(slopes))
        given = {"score": of_heads, "is_causal": True, "return_energy": True, **options}

        def run(query, key, value, sink):
            return ea.attention(
                query, key, value, sink=sink, implementation=implementation, **given
            )

        state, back = jax.vjp(run, *arrays)
        return state, back(cotangent), jax.jvp(run, tuple(arrays), tuple(moves))[1]

    shape = 2, 300, HEADS
    cotangent = tuple(
        rng.standard_normal((*shape, *x)).astype(np.float32) for x in ((VALUE_WIDTH,), ())
    )
    found = derivatives(KERNELS[name], slopes, moves, arrays, cotangent, {})
    wanted = derivatives("reference", slopes, moves, arrays, cotangent, {})
    close(found, wanted, name, 3e-4)  # both in float32, through twelve sines
    # the last rows, beside all keys; no others have a cotangent
    some = slice(270, 300)
    places = (np.broadcast_to(np.arange(n, 300, dtype=np.int32), (2, 300 - n)) for n in (270, 0))
    options = dict(zip(("query_positions", "key_positions"), places, strict=True))
    few_moves, few_arrays = ([x[0][:, some], *x[1:]] for x in (moves, arrays))
    last = tuple(x[:, some] for x in cotangent)
    rows, gradients, moved = derivatives(
        KERNELS[name], slopes, few_moves, few_arrays, last, options
    )
    same_bytes((rows, moved), jax.tree.map(lambda x: x[:, some], (found[0], found[2])))
    late = np.arange(300) >= 270
    alone = tuple(np.where(late.reshape(-1, *[1] * (x.ndim - 2)), x, 0) for x in cotangent)
    _, wanted, _ = derivatives(KERNELS[name], slopes, moves, arrays, alone, {})
    same_bytes(gradients[1:], wanted[1:])


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_declined(name):
    """A score or an array that is left out, or its derivative; heads whose tiles do not fit."""
    kernel, tokens = KERNELS[name], tokens_of(length=20)
    query, key, value = (jnp.asarray(x)[None] for x in tokens[:3])
    run = functools.partial(local_attention, query, key, value, implementation=kernel)
    with pytest.raises(NotImplementedError, match="score: wanted one without tables"):
        run(score=scores.RelativeBias(jnp.zeros((HEADS, 9), np.float32)))
    with pytest.raises(NotImplementedError, match="score: wanted one whose arrays have no"):
        jax.grad(lambda x: run(score=scores.ALiBi(x)).lse.sum())(jnp.ones(HEADS, np.float32))
    with pytest.raises(NotImplementedError, match="score: wanted one whose arrays have no"):
        jax.jvp(lambda x: run(score=scores.ALiBi(x)), *[(jnp.ones(HEADS, np.float32),)] * 2)
    with pytest.raises(NotImplementedError, match=r"bias: wanted None, got an array"):
        run(bias=jnp.zeros((1, 1, 20, 20), query.dtype))
    wide = [jnp.tile(x, 30) for x in (query, key, value)]
    with pytest.raises(NotImplementedError, match=r"query: wanted a width of at most 256, got 480"):
        local_attention(*wide, implementation=kernel)
