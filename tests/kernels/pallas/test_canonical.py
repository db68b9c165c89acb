"""The law of the canonical kernels for TPUs and GPUs, interpreted: a row has the same bytes however it is computed.

That a tile is the same text in all programs, tests/tpu and tests/cuda show.
"""

import functools

import jax
import numpy as np
import pytest

from energy_attn import masks, scores
from energy_attn.kernels import AttentionState, KernelCall, local_attention
from energy_attn.kernels.call._arguments import check_call
from energy_attn.kernels.call._operands import cotangents as cotangents_of
from energy_attn.kernels.call._tokens import LEAF
from energy_attn.kernels.dispatch._lowering import platform_here
from energy_attn.kernels.dispatch._registry import attend as attend_operands
from energy_attn.kernels.pallas.canonical._kernel import CanonicalGPU, CanonicalTPU
from energy_attn.kernels.xla._canonical import Canonical
from tests.support.compare import close
from tests.support.problems import Problem, cotangents
from tests.support.prompts import (
    HEADS,
    OPTIONS,
    VALUE_WIDTH,
    Tokens,
    at,
    attend,
    cache_of,
    gradients,
    in_batch,
    junk_like,
    prompt,
    same_bytes,
    tangent,
)
from tests.support.reference import dense, dense_jvp, dense_vjp
from tests.support.selection import few, few_rows

LENGTH = 1030  # five leaves of 256 keys
KERNELS = {"tpu": CanonicalTPU(), "gpu": CanonicalGPU()}
DTYPES = {"causal": "float32", "window": "bfloat16", "segments": "bfloat16", "full": "float32"}
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.01}
ROWS = [(kernel, option) for option in OPTIONS for kernel in KERNELS]
rows = pytest.mark.parametrize(("name", "option"), few_rows(ROWS, 2))


def array_tokens(rng, length, first):
    """Random ones at positions from `first` on."""
    sizes = (HEADS, 16), (2, 16), (2, VALUE_WIDTH)
    arrays = (rng.standard_normal((length, *x)).astype(np.float32) for x in sizes)
    places = np.arange(first, first + length, dtype=np.int32)
    return Tokens._make((*arrays, places, np.zeros_like(places)))


def tokens_of(option, seed=0, length=LENGTH):
    return prompt(DTYPES[option], seed).at(slice(length))


@rows
def test_rows(name, option):
    """A tile or a tree that follows the call: its rows, capacity, order of slots, batch; junk that counts."""
    kernel, rng, tokens = KERNELS[name], np.random.default_rng(0), tokens_of(option)
    run = functools.partial(attend, option, kernel=kernel)
    wanted = run(tokens, tokens)
    for begin, end in ((0, 1), (40, 41), (250, 390), (1000, LENGTH)):
        known = LENGTH if option == "full" else end
        keys = cache_of(tokens.at(slice(known)), 1200, rng, int(rng.integers(1200 - known)))
        keys = keys.at(rng.permutation(1200)) if begin else keys
        same_bytes(run(tokens.at(slice(begin, end)), keys), at(wanted, slice(begin, end)))
    others = [tokens_of(option, seed, length) for seed, length in ((1, 90), (0, LENGTH))]
    keys, queries = ([cache_of(x, size, rng) for x in others] for size in (1100, LENGTH))
    same_bytes(
        at(run(in_batch(*queries[:1], queries[1:]), in_batch(*keys[:1], keys[1:])), 1), wanted
    )


@pytest.mark.parametrize(("name", "option"), few_rows(ROWS))
def test_derivatives(name, option):
    """Sums over rows or leaves in an order that follows the call: its padding, batch and capacity."""
    more, rng, tokens = {"kernel": KERNELS[name]}, np.random.default_rng(1), tokens_of(option)
    out = rng.standard_normal((LENGTH, HEADS, VALUE_WIDTH)).astype(tokens.value.dtype)
    lse = rng.standard_normal((LENGTH, HEADS)).astype(np.float32)
    seeds = tuple(rng.standard_normal(x.shape).astype(x.dtype) for x in tokens[:3])
    grad = functools.partial(gradients, option, **more)
    push = functools.partial(tangent, option, **more)
    wanted = grad(tokens, tokens, (out, lse)), push(tokens, tokens, seeds)
    first, capacity = 77, 1200

    def padded(x):
        junk = junk_like(x, capacity, rng)
        junk[first : first + LENGTH] = x
        return np.stack([junk[::-1], junk])

    batch = [cache_of(x, capacity, rng, first) for x in (tokens_of(option, 1), tokens)]
    batch = in_batch(*batch[:1], batch[1:])
    here = slice(first, first + LENGTH)
    found = (
        grad(batch, batch, tuple(map(padded, (out, lse)))),
        push(batch, batch, tuple(map(padded, seeds))),
    )
    same_bytes(jax.tree.map(lambda x: x[1, here], found), wanted)


@rows
def test_values(name, option):
    """A leaf left out or counted twice; a derivative's term or scale that is missing."""
    kernel, tokens, rng = KERNELS[name], tokens_of(option), np.random.default_rng(2)
    arrays = {x: np.asarray(getattr(tokens, x), np.float64)[None] for x in tokens._fields[:3]}
    ids = tokens.segments[None] if option == "segments" else None
    problem = Problem(
        option, **arrays, query_segment_ids=ids, key_segment_ids=ids, **OPTIONS[option]
    )
    dtype, tolerance = tokens.query.dtype, TOLERANCES[DTYPES[option]]
    d_out, d_lse = cotangents(problem, dtype)
    moves = {n: (rng.standard_normal(x.shape) / 100).astype(dtype) for n, x in arrays.items()}

    def state(query, key, value):
        given = tokens._replace(query=query, key=key, value=value)
        return attend(option, given, given, kernel)

    found, pull = jax.vjp(jax.jit(state), *map(jax.numpy.asarray, tokens[:3]))
    close(tuple(x[None] for x in found), dense(problem), option, tolerance)
    found = dict(zip(arrays, pull(AttentionState(d_out[0], d_lse[0])), strict=True))
    wanted = dense_vjp(problem, d_out, d_lse)
    close({n: x[None] for n, x in found.items()}, wanted, option, 10 * tolerance)
    found = jax.jvp(jax.jit(state), tokens[:3], tuple(x[0] for x in moves.values()))[1]
    close(tuple(x[None] for x in found), dense_jvp(problem, moves), option, 10 * tolerance)


@pytest.mark.parametrize("name", few([*KERNELS], "tpu"))
def test_in_parts(name, monkeypatch):
    """A fold in parts, for calls of few rows, in another order than in one kernel, or that rounds less."""
    kernel, rng, first = KERNELS[name], np.random.default_rng(5), 2 * LEAF + 90
    # 19 leaves, of which the first is the third of the tree
    keys = array_tokens(rng, 18 * LEAF, first)
    rows = keys.at(slice(17 * LEAF - 20, 17 * LEAF + 20))
    seeds = tuple(rng.standard_normal(x.shape).astype(x.dtype) for x in (rows[0], *keys[1:3]))
    weights = attend("causal", rows, keys, kernel)
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
    tokens = tokens_of("full", length=300)
    query, key, value, ids = (jax.numpy.asarray(x)[None] for x in (*tokens[:3], tokens.segments))
    mask = masks.Prefix(jax.numpy.asarray([217], np.int32)) | masks.Segments(ids, ids)
    run = functools.partial(local_attention, query, key, value, mask=mask)
    found, wanted = (run(implementation=x) for x in (KERNELS[name], "reference"))
    close(found, wanted, name, 1e-5)


@pytest.mark.product
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("of_entries", [False, True])
def test_sinks(name, of_entries):
    """A sink that is left out of the state, its gradients or its tangent; its own gradient and tangent; their order."""
    kernel, tokens, rng = KERNELS[name], tokens_of("full", length=300), np.random.default_rng(3)
    arrays = [jax.numpy.asarray(x)[None] for x in tokens[:3]]
    arrays = [jax.numpy.concatenate([x, x / 2]) for x in arrays]
    arrays.append(rng.standard_normal((2, HEADS) if of_entries else HEADS).astype(np.float32))
    directions = [jax.numpy.asarray(rng.standard_normal(x.shape), x.dtype) for x in arrays]

    def run(kernel, *arrays):
        *arrays, sink = arrays
        call = check_call(*arrays, None, None, None, is_causal=True)
        return attend_operands((kernel,), call.settings, call.operands._replace(sink=sink))

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(kernel, *arrays):
        state, back = jax.vjp(functools.partial(run, kernel), *arrays)
        cotangent = jax.tree.map(jax.numpy.sin, state)
        of_sink = [jax.numpy.zeros_like(x) for x in arrays[:3]] + directions[3:]
        moved = [
            jax.jvp(functools.partial(run, kernel), arrays, x)[1]
            for x in (tuple(directions), tuple(of_sink))
        ]
        return state, back(cotangent), moved, cotangent

    with jax.default_device(jax.devices("cpu")[0]):
        wanted = derivatives(Canonical(), *arrays)
    found = derivatives(kernel, *arrays)
    close(found, wanted, name, 1e-5)

    @jax.jit
    def to_sink(cotangent, *arrays):
        return jax.vjp(functools.partial(run, kernel), *arrays)[1](cotangent)[3]

    def padded(x, fill):
        return jax.numpy.pad(x, ((0, 0), (0, 90), *[(0, 0)] * (x.ndim - 2)), constant_values=fill)

    cotangent = AttentionState(*(padded(x, 0.0) for x in found[3]))
    given = (*(padded(x, 1.0) for x in arrays[:3]), arrays[3])
    same_bytes(to_sink(cotangent, *given), found[1][3])


@pytest.mark.parametrize("name", few([*KERNELS], "tpu"))
def test_nodes(name):
    """Nodes of two devices, each with every other two leaves, that are folded in another order than on one device."""
    rng, tokens = np.random.default_rng(4), tokens_of("causal", length=1900)
    cache = cache_of(tokens, 8 * LEAF, rng)
    # without some leaves, so that numbers of those beside each other differ in any bits
    gone = np.repeat(rng.random(64) < 0.5, LEAF // 8) | np.isin(np.arange(8 * LEAF) // LEAF, (2, 5))
    cache = cache._replace(positions=np.where(gone, -1, cache.positions).astype(np.int32))
    one, own = (type(KERNELS[name])(run) for run in (None, 2 * LEAF))
    place = np.arange(8 * LEAF) // (2 * LEAF) % 2
    shards = [cache.at(place == device) for device in range(2)]
    d_out, d_lse = (rng.standard_normal((1, 1900, HEADS, *x)) for x in ((VALUE_WIDTH,), ()))
    cotangent = AttentionState(*(jax.numpy.asarray(x, np.float32) for x in (d_out, d_lse)))

    def call(keys):
        rows, keys = (Tokens._make(jax.numpy.asarray(y)[None] for y in x) for x in (tokens, keys))
        positions = {"query_positions": rows.positions, "key_positions": keys.positions}
        arrays = rows.query, keys.key, keys.value, None, None, None
        given = check_call(*arrays, is_causal=True, **positions)
        return KernelCall(given.operands, given.settings, platform_here())

    # not compiled together: XLA:CPU fuses what the interpreter emits of a tile with what is around it
    def across():
        calls = [call(x) for x in shards]

        def fold(method, *others):
            folds = [getattr(own, method)(x, *others) for x in calls]
            nodes, numbers = zip(*(x.nodes(2) for x in folds), strict=True)
            joined = [jax.numpy.concatenate(x) for x in zip(*nodes, strict=True)]
            return folds[0].of_nodes(joined, jax.numpy.concatenate(numbers, 1))

        state, _ = fold("state_fold")
        to_query = fold("query_fold", state, cotangent)
        directions = cotangents_of(calls[0].operands.query, None, None, None)
        moved = fold("tangent_fold", state, directions)
        return state, to_query, moved

    def alone():
        whole = call(cache)
        state = one.forward(whole)
        directions = cotangents_of(whole.operands.query, None, None, None)
        to_query = one.query_cotangent(whole, state, cotangent)
        return state, to_query, one.tangent(whole, state, directions), own.forward(whole)

    *found, in_place = alone()
    same_bytes(across(), tuple(found))
    same_bytes(in_place, found[0])


@pytest.mark.parametrize("name", KERNELS)
def test_gaps_between_leaves(name):
    """More nodes that wait than those of as many leaves in a row: one that is written in another's place."""
    tokens = tokens_of("full", length=6 * LEAF)
    blocks = np.asarray([0, 16, 24, 28, 30, 31], np.int32)
    positions = (LEAF * blocks[:, None] + np.arange(LEAF, dtype=np.int32)).reshape(-1)
    keys, rows = tokens._replace(positions=positions), tokens.at(slice(40))
    found = attend("full", rows, keys, type(KERNELS[name])(LEAF))
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = attend("full", rows, keys, Canonical(LEAF))
    close(found, wanted, name, 1e-5)


def by_place(x, at):
    """Of the product, both positions, the entry of the batch and the head."""
    apart = (at.query - at.key).astype(x.dtype)
    return x * jax.numpy.cos(0.01 * apart) + (at.batch + 2 * at.head).astype(x.dtype) / 10


def of_many(x, at, *several):
    """Of more numbers than have one digit."""
    for n, y in enumerate(several):
        x = 0.9 * x + y * jax.numpy.sin(x * (n + 1) / 10)
    return x


SCORES = {
    "many numbers": scores.Function(of_many, *np.linspace(0.1, 1.2, 12).astype(np.float32)),
    "soft cap": scores.SoftCap(2.0),
    "of places": scores.Function(by_place),
}


@pytest.mark.parametrize(("name", "score"), few_rows([(x, y) for y in SCORES for x in KERNELS]))
def test_scores(name, score):
    """A score that is left out of the state, a gradient or the tangent, or is told another head, position or entry."""
    kernel, rng = KERNELS[name], np.random.default_rng(3)
    texts = [tokens_of("full", seed, 300) for seed in (0, 1)]
    arrays = [jax.numpy.asarray(np.stack(x)) for x in zip(*(x[:3] for x in texts), strict=True)]
    moves = [jax.numpy.asarray(rng.standard_normal(x.shape), x.dtype) for x in arrays]
    slopes = jax.numpy.asarray(rng.uniform(0.01, 0.1, HEADS), jax.numpy.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(implementation, slopes, moves, *arrays, **options):
        of_heads = scores.Compose(SCORES[score], scores.ALiBi(slopes))
        run = functools.partial(
            local_attention,
            score=of_heads,
            is_causal=True,
            implementation=implementation,
            **options,
        )
        state, back = jax.vjp(run, *arrays)
        return state, back(state), jax.jvp(run, tuple(arrays), tuple(moves))[1]

    found = derivatives(kernel, slopes, moves, *arrays)
    close(found, derivatives("reference", slopes, moves, *arrays), name, 1e-4)
    # the last rows, beside all keys
    query, key, value = arrays
    at = {
        "key_positions": jax.numpy.arange(300)[None],
        "query_positions": jax.numpy.arange(270, 300)[None],
    }
    moves[0], few = moves[0][:, 270:], query[:, 270:]
    rows, _, moved = derivatives(kernel, slopes, moves, few, key, value, **at)
    same_bytes((rows, moved), jax.tree.map(lambda x: x[:, 270:], (found[0], found[2])))


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_declined(name):
    """A score or an array that is left out, or its derivative; heads whose tiles do not fit."""
    kernel, tokens = KERNELS[name], tokens_of("full", length=20)
    query, key, value = (jax.numpy.asarray(x)[None] for x in tokens[:3])
    run = functools.partial(local_attention, query, key, value, implementation=kernel)
    with pytest.raises(NotImplementedError, match="score: wanted one without tables"):
        run(score=scores.RelativeBias(jax.numpy.zeros((HEADS, 9), np.float32)))
    with pytest.raises(NotImplementedError, match="score: wanted one whose arrays have no"):
        jax.grad(lambda x: run(score=scores.ALiBi(x)).lse.sum())(jax.numpy.ones(HEADS, np.float32))
    with pytest.raises(NotImplementedError, match="score: wanted one whose arrays have no"):
        jax.jvp(lambda x: run(score=scores.ALiBi(x)), *[(jax.numpy.ones(HEADS, np.float32),)] * 2)
    with pytest.raises(NotImplementedError, match=r"bias: wanted None, got an array"):
        run(bias=jax.numpy.zeros((1, 1, 20, 20), query.dtype))
    wide = [jax.numpy.tile(x, 30) for x in (query, key, value)]
    with pytest.raises(NotImplementedError, match=r"query: wanted a width of at most 256, got 480"):
        local_attention(*wide, implementation=kernel)
