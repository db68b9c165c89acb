"""`KVCache.fork`: rows that share a prompt, beside a cache in which each holds it.

The judge is a dictionary of tokens for each row, and dense attention over them in float64.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn import scores
from energy_attn.distributed import (
    ForkedCache,
    KVCache,
    SequenceParallel,
    collectives,
    make_mesh,
    methods,
)
from tests.support.arrays import array
from tests.support.caches import B, H, K, Model, N, V, empty, started, tokens
from tests.support.compare import close
from tests.support.meshes import mesh_of, parallel_of
from tests.support.reference import dense, dense_vjp
from tests.support.scores import with_key
from tests.support.selection import few, few_rows

COUNT = 2  # of rows that share a prompt
PROMPTS = 11, 4, 0  # tokens of each


new_tokens = functools.partial(tokens, rows=COUNT * B)


def model_of(prompt):
    """The tokens of the rows that share these prompts; a window is the judge's, so that nothing is let go."""
    model = Model(rows=COUNT * B)
    for row in range(COUNT * B):
        model.rows[row] = dict(prompt.rows[row // COUNT])
        model.lengths[row] = prompt.lengths[row // COUNT]
    return model


@pytest.mark.parametrize(
    ("kind", "window", "capacity"),
    few_rows(
        [
            *(("2x4 explicit", 9, 16), ("8", None, 8), (None, None, 16)),
            *(("8", 9, 8), ("2x4", 9, 16), ("8 explicit", None, 16)),
        ]
    ),
)
def test_steps(kind, window, capacity):
    """A prompt seen by another's rows, at other positions or beyond the window; a step compiled twice.

    Rows get tokens at different times; their own slots are a ring where the window leaves room for one.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, query, key, value, lengths):
        cache = cache.append(key, value, lengths=lengths)
        return cache, cache.attend(query, lengths=lengths)

    rng, prompt = np.random.default_rng(0), Model()
    parallel = kind and parallel_of(kind)
    with jax.set_mesh(mesh_of(kind or "8")):
        given = tokens(0, 11)
        whole = empty(capacity=24, parallel=parallel, window=window)
        whole = whole.append(*given, lengths=jnp.asarray(PROMPTS))
        prompt.append(*given, PROMPTS)
        cache, model = whole.fork(COUNT, capacity=capacity, block_size=1), model_of(prompt)
        assert cache.capacity == capacity and cache.count == COUNT
        assert cache.own.window == (window if capacity > 9 else None)
        options = {"is_causal": True}
        if window is not None:
            options["local_window_size"] = (window, 0)
        for i in range(12 if window and capacity > 9 else 4):
            query, new = rng.standard_normal((COUNT * B, 2, N, H)), new_tokens(i + 1, 2)
            counts = [2, 1, 0, 2, 2, i % 2]
            cache, state = step(cache, query, *new, jnp.asarray(counts, jnp.int32))
            model.append(*new, counts)
            last = [
                [n - count, n - 1] if count == 2 else [n - 1 if count else -1, -1]
                for n, count in zip(model.lengths, counts, strict=True)
            ]
            close(tuple(state), dense(model.problem(query, last, **options)), f"step {i}")
        assert cache.lengths.tolist() == model.lengths
    assert step._cache_size() == 1


SINK = np.array([0.4, -0.9, 2.0, 0.0])


@pytest.mark.parametrize("kind", few([None, "8", "2x4 explicit"], None))
def test_derivatives(kind):
    """A sink that counts twice; gradients of queries, of own tokens, and of a prompt that has several rows.

    The source moves the scores of both parts, and a prompt has the sum of its rows' gradients.
    """
    rng = np.random.default_rng(0)
    query, source = (rng.standard_normal((COUNT * B, 2, N, w)) for w in (H, V))
    dout, dlse = rng.standard_normal((COUNT * B, 2, N, V)), rng.standard_normal((COUNT * B, 2, N))
    given, new = tokens(0, 6), new_tokens(1, 2)
    prompt = Model()
    prompt.append(*given, [6] * B)
    model = model_of(prompt)
    model.append(*new, [2] * (COUNT * B))
    places = [[6, 7]] * (COUNT * B)
    parallel = kind and parallel_of(kind)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2, 3), has_aux=True)
    def run(query, new, given, sink):
        cache = empty(capacity=16, parallel=parallel).append(*given)
        cache = cache.fork(COUNT, capacity=8).append(*new)
        state = cache.attend(query, sink=sink)
        tilted = cache.attend(query, source=jnp.asarray(source))
        return (state.out * dout).sum() + (state.lse * dlse).sum(), (state, tilted)

    with jax.set_mesh(mesh_of(kind or "8")):
        (_, states), found = jax.device_get(run(array(query), new, given, array(SINK)))
    problem = with_key(model.problem(query, places, is_causal=True), SINK)
    tilted = model.problem(query, places, is_causal=True, source=source)
    close([tuple(x) for x in states], [dense(x) for x in (problem, tilted)], "states")
    exact = dense_vjp(problem, dout, dlse)
    close(found[0], exact["query"], "query")
    for i, name in enumerate(("key", "value")):
        by_row = exact[name][:, :8, :, : (H, V)[i]]
        close(found[1][i], by_row[:, 6:8], name)
        shared = by_row[:, :6].reshape(B, COUNT, *by_row[:, :6].shape[1:]).sum(1)
        close(found[2][i], shared, f"{name} of the prompt")


@pytest.mark.parametrize("explicit", few([False, True], False))
@pytest.mark.parametrize("quantized", few([None, "int8"], "int8"))
def test_rows_and_heads_over_other_axes(explicit, quantized):
    """Beside a plain cache of all rows: another row's prompt, or a prompt that is sent to other devices to be read."""
    mesh = make_mesh((2, 2, 2), ("data", "device", "head"), explicit=explicit)
    parallel = SequenceParallel("device", batch="data", heads="head", merge="gather")
    options = {"dtype": jnp.float32, "quantize": quantized, "parallel": parallel, "block_size": 2}
    rows, count = 4, 3
    given = [jnp.float32(x) for x in tokens(0, 7, rows=rows)]
    new = [jnp.float32(x) for x in tokens(1, 2, rows=rows * count)]
    query = jnp.asarray(np.random.default_rng(2).standard_normal((12, 2, N, H)), jnp.float32)
    lengths = jnp.asarray([7, 3, 5, 0])

    def forked(given, new, query):
        cache = KVCache.empty(rows, 16, K, H, V, **options).append(*given, lengths=lengths)
        cache = cache.fork(count, capacity=8).append(*new)
        return cache, cache.attend(query)

    def plain(given, new, query):
        cache = KVCache.empty(rows * count, 24, K, H, V, **options)
        cache = cache.append(*(x.repeat(count, 0) for x in given), lengths=lengths.repeat(count))
        return cache.append(*new).attend(query)

    with jax.set_mesh(mesh):
        cache, state = jax.jit(forked)(given, new, query)
        exact = jax.jit(plain)(given, new, query)
        compiled = jax.jit(ForkedCache.attend).lower(cache, query).compile()
        assert cache.own.key.addressable_shards[0].data.shape == (6, 4, K // 2, H)
    assert {(c.kind, c.group_size) for c in collectives(compiled)} <= {("all-gather", 2)}
    assert len(collectives(compiled)) <= 2
    for mine, theirs in zip(state, exact, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("kind", few(["8", None], None))
def test_a_prompt_of_many(kind):
    """64 copies of a prompt of 4,096 tokens, stored or made while attending."""
    count, length, width = 64, 4096, 64
    options = {"dtype": jnp.float32, "parallel": kind and parallel_of(kind)}

    def step(cache, query, new):
        cache = cache.append(new, new)
        return cache, cache.attend(query)

    with jax.set_mesh(mesh_of(kind or "8")):
        prompt = KVCache.empty(1, length, 2, width, **options)
        cache = prompt.fork(count, capacity=128)
        new, query = (jnp.ones((count, 1, heads, width), jnp.float32) for heads in (2, 4))
        compiled = jax.jit(step, donate_argnums=0).lower(cache, query, new).compile()
    held = sum(x.nbytes for x in jax.tree.leaves(cache))
    keys = length * 2 * width * 4
    # prompt and own slots, keys and values
    assert held < 2 * (keys + count * 128 * 2 * width * 4) + 10_000
    assert held < 2 * count * keys / 20
    shapes = re.findall(r"\b[a-z]+[0-9]+\[([0-9,]+)\]", compiled.as_text())
    largest = max(math.prod(map(int, x.split(","))) for x in shapes)
    assert largest < count * length * 2 * width / (1 if kind is None else 8) / 4
    devices = 1 if kind is None else 8
    assert compiled.memory_analysis().alias_size_in_bytes >= (held - 10_000) / devices


def test_as_many_queries_as_keys():
    """Keys that are sent, for queries that are taken for parts of a sequence as there are as many of them."""
    options = {"dtype": jnp.float64, "block_size": 2}
    with jax.set_mesh(mesh_of("8")):
        # a method with options of its own, which stays
        parallel = SequenceParallel("device", methods.Tree("gather"))
        cache = KVCache.empty(1, 16, K, H, V, parallel=parallel, **options)
        cache = cache.append(*tokens(0, 11, rows=1)).fork(16, capacity=16)
        query = jnp.ones((16, 1, N, H))
        compiled = jax.jit(ForkedCache.attend).lower(cache, query).compile()
        state = compiled(cache, query)
    assert [c.kind for c in collectives(compiled)] == 2 * ["all-gather"]
    model = Model(rows=1)
    model.append(*tokens(0, 11, rows=1), [11])
    wanted = dense(model.problem(np.ones((1, 1, N, H)), [[10]]))
    close(tuple(state), [np.repeat(x, 16, 0) for x in wanted])


@pytest.mark.parametrize("kind", few(["2x4", None], "2x4"))
def test_rows_begin_again(kind):
    """A token of a continuation that ended, seen by the next; an eviction that takes the prompt with it."""
    prompt, parallel = Model(), kind and parallel_of(kind)
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh_of(kind or "8")):
        given, first, second = tokens(0, 11), new_tokens(1, 5), new_tokens(2, 3)
        prompt.append(*given, PROMPTS)
        model = model_of(prompt)
        cache = started(*given, PROMPTS, capacity=16, parallel=parallel)
        cache = cache.fork(COUNT, capacity=8).append(*first)
        model.append(*first, [5] * 6)
        cache = cache.reset(jnp.asarray([1, 4])).evict(jnp.asarray([2, 1, 0, 5, 3, 9]))
        for row in (1, 4):
            length = PROMPTS[row // COUNT]
            model.rows[row] = {n: x for n, x in model.rows[row].items() if n < length}
            model.lengths[row] = length
        for row, gone in ((0, 2), (3, 5), (5, 5)):
            for n in range(gone):
                del model.rows[row][PROMPTS[row // COUNT] + n]
        cache = cache.append(*second)
        model.append(*second, [3] * 6)
        query = rng.standard_normal((6, 3, N, H))
        state = jax.jit(ForkedCache.attend)(cache, array(query))
    last = [[n - 3, n - 2, n - 1] for n in model.lengths]
    close(tuple(state), dense(model.problem(query, last, is_causal=True)))


def test_reset_of_rows_over_an_explicit_axis():
    """Rows whose numbers are chosen outside of `shard_map`, between arrays of other types."""
    mesh = make_mesh((2, 4), ("row", "device"), explicit=True)
    parallel = SequenceParallel("device", batch="row")
    with jax.set_mesh(mesh):
        given, new = (
            [jax.device_put(x, jax.NamedSharding(mesh, jax.P("row"))) for x in arrays]
            for arrays in (
                [jnp.ones((2, 5, K, w), jnp.float64) for w in (H, V)],
                [jnp.ones((4, 2, K, w), jnp.float64) for w in (H, V)],
            )
        )
        cache = empty(rows=2, capacity=8, parallel=parallel).append(*given).fork(2, capacity=4)
        assert cache.append(*new).reset(jnp.asarray([1])).lengths.tolist() == [7, 5, 7, 7]


@pytest.mark.full
def test_saved_and_loaded(tmp_path):
    """Own tokens that lose their positions on the way to another mesh."""
    query = array(np.random.default_rng(0).standard_normal((6, 1, N, H)))
    with jax.set_mesh(mesh_of("8")):
        cache = started(*tokens(0, 11), PROMPTS, capacity=16).fork(COUNT, capacity=8)
        cache = cache.append(*new_tokens(1, 3))
        before = jax.jit(ForkedCache.attend)(cache, query)
        for name in ("prompt", "own"):
            getattr(cache, name).save(tmp_path / name)
    again = ForkedCache(*(KVCache.load(tmp_path / name) for name in ("prompt", "own")))
    assert again.lengths.tolist() == cache.lengths.tolist()
    close(tuple(jax.jit(ForkedCache.attend)(again, query)), tuple(map(np.asarray, before)))


@pytest.mark.full
def test_a_score_of_places():
    """A score that reads positions and heads: of own tokens counted from zero."""
    query = array(np.random.default_rng(0).standard_normal((6, 1, N, H)))
    score = scores.ALiBi(jnp.asarray([0.5, 0.1, 0.2, 0.3]))
    with jax.set_mesh(mesh_of("8")):
        cache = started(*tokens(0, 11), PROMPTS).fork(COUNT, capacity=8)
        new = new_tokens(1, 2)
        found = jax.jit(ForkedCache.attend)(cache.append(*new), query, score=score)
        plain = empty(rows=6).append(
            *(x.repeat(COUNT, 0) for x in tokens(0, 11)), lengths=jnp.asarray(PROMPTS).repeat(COUNT)
        )
        exact = jax.jit(KVCache.attend)(plain.append(*new), query, score=score)
    close(tuple(found), tuple(map(np.asarray, exact)))
