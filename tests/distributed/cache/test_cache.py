"""`KVCache`: every token in its slot, on every mesh, at every length; written in place; saved and read back.

The judge is a Python list of tokens per row, and dense attention over them in float64.
"""

import contextlib
import functools
import math
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import KVCache, SequenceParallel, collectives, make_mesh
from tests.support.arrays import array
from tests.support.caches import (
    B,
    H,
    K,
    Model,
    N,
    V,
    append,
    check_balanced,
    check_held,
    empty,
    held,
    started,
    stored,
    tokens,
)
from tests.support.compare import close
from tests.support.masks import RULES
from tests.support.meshes import mesh_of, parallel_of
from tests.support.problems import Problem
from tests.support.reference import dense, dense_vjp
from tests.support.selection import few, few_rows


@pytest.mark.smoke
@pytest.mark.parametrize("kind", few(["8", "2x4 explicit"], "2x4 explicit"))
def test_every_step(kind):
    """A token in the wrong slot or on the wrong device, at any of 3·p·block steps; and a step compiled twice.

    Rows start at different lengths, one empty, and one of them gets a token only at every other step.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, query, key, value, lengths):
        cache = cache.append(key, value, lengths=lengths)
        return cache, cache.attend(query, lengths=lengths)

    model, rng = Model(), np.random.default_rng(0)
    with jax.set_mesh(mesh_of(kind)):
        cache = empty(kind, capacity=57)
        assert cache.capacity == 64
        new, counts = tokens(0, 5), (5, 0, 2)
        cache = cache.append(*new, lengths=jnp.asarray(counts))
        model.append(*new, counts)
        for i in range(48):
            query, new = rng.standard_normal((B, 1, N, H)), tokens(i + 1, 1)
            counts = (1, 1, i % 2)
            cache, state = step(cache, query, *new, jnp.asarray(counts, jnp.int32))
            model.append(*new, counts)
            last = [
                [n - 1 if count else -1] for n, count in zip(model.lengths, counts, strict=True)
            ]
            close(tuple(state), dense(model.problem(query, last)), f"step {i}")
            if i % 12 == 0:
                check_balanced(cache)
        check_held(cache, model)
    assert step._cache_size() == 1


@pytest.mark.parametrize("explicit", few([False, True], False))
def test_rows_on_another_axis(explicit, tmp_path):
    """Rows that are gathered or appended to by other devices than theirs: a decode step is one all-gather.

    On automatic axes nothing but `batch=` says that rows are sharded: XLA gathered eight arrays a step.
    """
    mesh = make_mesh((2, 4), ("data", "device"), explicit=explicit)
    parallel = SequenceParallel("device", merge="gather", batch="data")
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((4, 7, *shape)) for shape in ((4, 6), (2, 6), (2, 3)))

    def step(cache, query, key, value):
        cache = cache.append(key, value)
        return cache, cache.attend(query).out

    @jax.jit
    def start(key, value):
        cache = KVCache.empty(4, 16, 2, 6, 3, dtype=jnp.float64, parallel=parallel, block_size=2)
        return cache.append(key, value)

    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P("data"))
        cache = start(*jax.device_put((key[:, :6], value[:, :6]), rows))
        assert cache.key.addressable_shards[0].data.shape == (2, 4, 2, 6)
        new = jax.device_put([x[:, 6:] for x in (query, key, value)], rows)
        compiled = jax.jit(step).lower(cache, *new).compile()
        assert [(c.kind, c.group_size) for c in collectives(compiled)] == [("all-gather", 4)]
        cache, out = compiled(cache, *new)
        cache.save(tmp_path)
        again = KVCache.load(tmp_path, parallel=parallel, block_size=1)
        assert again.key.addressable_shards[0].data.shape == (2, 4, 2, 6)
        assert stored(again) == stored(cache)
    close(out, dense(Problem("rows", query[:, 6:], key, value))[0])


@pytest.mark.parametrize("name", few(list(RULES), "documents_function"))
def test_rules(name):
    """A mask that compares slots instead of tokens; causality by default beside a mask that shows later tokens."""
    rule = RULES[name].of(B)

    @jax.jit
    def run(cache, query, rule):
        return cache.attend(query, mask=rule), cache.attend(query, mask=rule, is_causal=True)

    model, rng, counts = Model(), np.random.default_rng(0), (9, 2, 12)
    with jax.set_mesh(mesh_of("8")):
        new = tokens(0, 12)
        cache = started(*new, counts, block_size=1)
        model.append(*new, counts)
        query = rng.standard_normal((B, 3, N, H))
        states = run(cache, query, rule)
    positions = [[n - 3 + i for i in range(3)] for n in counts]
    for state, is_causal in zip(states, (False, True), strict=True):
        problem = model.problem(query, positions, rule=name, is_causal=is_causal)
        close(tuple(state), dense(problem), name)


@pytest.mark.parametrize(
    ("T", "dtype", "quantized"),
    few_rows(
        [
            (T, dtype, quantized)
            for dtype, quantized in (("bfloat16", None), ("bfloat16", "int8"), ("float32", None))
            for T in (1, 40)
        ]
    ),
)
def test_append_in_place(T, dtype, quantized):
    """A copy of the cache, or a collective, in what `append` compiles to; in 16 bits XLA:CPU would make one."""
    B, S, K, H = 2, 32 * 1024, 2, 64
    with jax.set_mesh(mesh_of("8")):
        spread = parallel_of("8")
        cache = KVCache.empty(
            B, S, K, H, dtype=dtype, quantize=quantized, parallel=spread, block_size=16
        )
        new = jnp.ones((B, T, K, H), dtype)
        step = jax.jit(lambda cache, new: cache.append(new, new), donate_argnums=0)
        compiled = step.lower(cache, new).compile()
    memory = compiled.memory_analysis()
    shard = B * S * K * H * cache.key.dtype.itemsize // 8
    assert collectives(compiled) == ()
    assert memory.alias_size_in_bytes >= 2 * shard
    assert memory.temp_size_in_bytes < shard / 8
    # 16-bit numbers that are widened to be written: no copy, but as many operations as the cache has numbers
    widened = re.findall(r"f32\[([0-9,]+)\]\S* convert\(", compiled.as_text())
    assert all(math.prod(map(int, x.split(","))) < shard // 8 for x in widened), widened


@pytest.mark.parametrize(
    ("B", "dtype"), few_rows([(2, "float32"), (1, "float32"), (1, "bfloat16"), (2, "bfloat16")])
)
def test_decode_step_in_place(B, dtype):
    """Appending and attending as one program: the cache stays where it is, and only states are sent."""
    with jax.set_mesh(mesh_of("8")):
        cache = KVCache.empty(B, 8192, 2, 64, dtype=dtype, parallel=parallel_of("8"))
        new, query = jnp.ones((B, 1, 2, 64), dtype), jnp.ones((B, 1, 4, 64), dtype)

        def step(cache, query, new):
            cache = cache.append(new, new)
            return cache, cache.attend(query)

        compiled = jax.jit(step, donate_argnums=0).lower(cache, query, new).compile()
    shard = cache.key.nbytes // 8
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * shard
    # what a block of keys takes, and no copy
    assert compiled.memory_analysis().temp_size_in_bytes < shard / 2
    assert sum(c.bytes for c in collectives(compiled)) <= 2 * 4 * (64 + 2) * 4


@pytest.mark.parametrize("T", few([1, 3], 3))
def test_window(T):
    """A ring that lets go of a token that is still in the window, or lets an old one be seen; over three laps."""
    window, model, rng = 12, Model(16), np.random.default_rng(T)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, query, key, value):
        cache = cache.append(key, value)
        return cache, cache.attend(query)

    with jax.set_mesh(mesh_of("2x4")):
        cache = empty("2x4", capacity=16, block_size=1, window=window)
        for i in range(48 // T):
            query, new = rng.standard_normal((B, T, N, H)), tokens(i, T)
            cache, state = step(cache, query, *new)
            model.append(*new, [T] * B)
            mine = np.arange(i * T, i * T + T)[None].repeat(B, 0)
            judge = model.problem(query, mine, is_causal=True, local_window_size=(window, 0))
            close(state.out, dense(judge)[0], f"step {i}")
        check_held(cache, model)


@pytest.mark.parametrize("jitted", [True, False])
def test_no_room(jitted, raises_late):
    """Tokens written over others, or lost in silence. After an eviction there is room again."""
    write, counts = append if jitted else KVCache.append, array([3, 3, 3], jnp.int32)
    with jax.set_mesh(mesh_of("8")):
        cache = started(*tokens(0, 14), capacity=16)
        with pytest.raises(RuntimeError, match="no room for its new tokens"):
            jax.block_until_ready(write(cache, *tokens(1, 3), lengths=counts))
        cache = write(cache.evict(1), *tokens(1, 3), lengths=counts)
        assert cache.lengths.tolist() == [17] * B
        assert [sorted(row) for row in held(cache)] == [list(range(1, 17))] * B


@pytest.mark.parametrize("kind", [None, "int8"])
def test_no_room_where_nothing_raises(kind, monkeypatch):
    """On accelerators, and with Equinox's checks off: a row that answers from what it holds, then or later.

    Rows with some room, with none, and with a count that is none; and others that suffer with them.
    """
    monkeypatch.setattr(
        "energy_attn.distributed.cache._write.eqx.branched_error_if", lambda x, *_: x
    )
    query = jnp.ones((B, 1, N, H))
    with jax.set_mesh(mesh_of("8")):
        # a number of tokens that no other test compiles for
        cache = empty(capacity=16, quantize=kind).append(*tokens(0, 12))
        cache = cache.append(*tokens(1, 12), lengths=jnp.array([4, 2, 0]))
        for counts, broken in (
            ((1, 2, 4), [True, False, False]),
            ((0, 3, 0), [False, True, False]),
            ((0, 0, -1), [False, False, True]),
        ):
            grown = append(cache, *tokens(2, 12), lengths=array(counts, jnp.int32))
            for _ in range(2):
                for x in grown.attend(query):
                    nan = jnp.isnan(x.reshape(B, -1))
                    assert nan.all(1).tolist() == nan.any(1).tolist() == broken
                grown = append(grown, *tokens(3, 12), lengths=array([0] * B, jnp.int32))


def test_exported_program():
    """A callback, with which JAX does not serialise a step; a row without room that answers from what it holds."""
    cache = KVCache.empty(B, 16, K, H, V, dtype=jnp.float32, block_size=16)
    cache = cache.append(*tokens(0, 14, jnp.float32))
    query, new = jnp.ones((B, 1, N, H), jnp.float32), tokens(1, 3, jnp.float32)

    def step(before, counts):
        cache = before.append(*new, lengths=counts)
        # the rows of a batch by themselves, too
        rows = jax.tree.map(lambda x: x[:, None], (before, *new, counts))
        each = jax.vmap(lambda cache, key, value, n: cache.append(key, value, lengths=n).lengths)
        return cache.attend(query), each(*rows)

    counts = jnp.array([2, 3, 1])
    program = jax.export.export(jax.jit(step), platforms=("cpu", "cuda"))(cache, counts)
    assert "callback" not in program.mlir_module()
    (found, energy), lengths = program.call(cache, counts)
    broken = jnp.isnan(found.reshape(B, -1))
    assert broken.all(1).tolist() == broken.any(1).tolist() == [False, True, False]
    assert jnp.isnan(energy[1]).all() and lengths[:, 0].tolist() == [16, 15, 15]
    want = cache.append(*new, lengths=jnp.array([2, 0, 1])).attend(query)
    close((found[::2], energy[::2]), (want.out[::2], want.lse[::2]))
    with pytest.raises(RuntimeError, match="no room for its new tokens"):
        jax.block_until_ready(jax.jit(step)(cache, counts))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_accelerators_do_not_ask_the_host(platform):
    """A callback in a step on an accelerator, which waits for it: three times as long on an H100."""
    cache = KVCache.empty(B, 16, K, H, dtype=jnp.float32)
    new = [jax.ShapeDtypeStruct((B, 1, K, H), jnp.float32)] * 2
    lowered = jax.jit(KVCache.append).trace(cache, *new).lower(lowering_platforms=(platform,))
    assert "callback" not in lowered.as_text()
    assert "callback" in jax.jit(KVCache.append).lower(cache, *new).as_text()


def test_one_device():
    """A cache without a mesh; queries and rows that are not there."""
    model, counts = Model(), [11, 4, 0]
    model.append(*tokens(0, 11), counts)
    query = np.random.default_rng(0).standard_normal((B, 2, N, H))
    cache = started(*tokens(0, 11), counts, parallel=None)
    state = jax.jit(KVCache.attend)(cache, query, lengths=jnp.asarray([2, 1, 0]))
    judge = model.problem(query, [[9, 10], [3, -1], [-1, -1]], is_causal=True)
    close(tuple(state), dense(judge))
    assert np.isneginf(np.asarray(state.lse)[2]).all() and not np.asarray(state.out)[2].any()


def test_rows_and_heads_split():
    """Rows and heads that types split over other mesh axes stay there; nothing is gathered to write."""
    mesh, rows = make_mesh((2, 2, 2), ("data", "sequence", "model"), explicit=True), 4
    spread = SequenceParallel("sequence")
    rng = np.random.default_rng(0)
    key = array(rng.standard_normal((rows, 7, K, H)))
    query = array(rng.standard_normal((rows, 1, N, H)))
    counts = np.array([7, 0, 3, 5])
    with jax.set_mesh(mesh):
        cache = KVCache.empty(rows, 8, K, H, dtype=jnp.float64, parallel=spread, block_size=2)

        def put(x):
            spec = ("data", "sequence", "model")[: x.ndim] if x.ndim > 1 else ("data",)
            return jax.device_put(x, NamedSharding(mesh, P(*spec)))

        cache = jax.tree.map(put, cache)
        given = {"lengths": jnp.asarray(counts, jnp.int32)}
        compiled = append.lower(cache, key, key, **given).compile()
        assert collectives(compiled) == ()
        cache = compiled(cache, key, key, **given)
        assert tuple(cache.key.sharding.spec)[:3] == ("data", "sequence", "model")
        ask = jax.jit(lambda cache, query, at: cache.attend(query, query_positions=at).out)
        out = ask(cache, query, np.full((rows, 1), 9, np.int32))
    exact = dense(Problem("split", query, key, key, key_value_seq_lengths=counts))
    close(out, exact[0])


@pytest.mark.smoke
def test_derivatives():
    """A gradient lost between what is appended and what is read; one of a token that has taken another's slot."""
    model, query = Model(), np.random.default_rng(0).standard_normal((B, 2, N, H))
    first, second = tokens(0, 6), tokens(1, 4)
    model.append(*first, [6] * B)
    model.evict([3] * B)
    model.append(*second, [4] * B)
    judge = model.problem(query, np.array([[8, 9]] * B), is_causal=True)
    rng = np.random.default_rng(1)
    dout, dlse = rng.standard_normal((B, 2, N, V)), rng.standard_normal((B, 2, N))

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradient(first, second):
        cache = empty(capacity=8, block_size=1).append(*first).evict(3).append(*second)
        state = cache.attend(jnp.asarray(query), query_positions=jnp.asarray([[8, 9]] * B))
        return (state.out * dout).sum() + (state.lse * dlse).sum()

    with jax.set_mesh(mesh_of("8")):
        found = jax.device_get(gradient(first, second))
    exact = dense_vjp(judge, dout, dlse)
    for i, name in enumerate(("key", "value")):
        assert not found[0][i][:, :3].any(), f"{name}: tokens that are gone"
        close(np.concatenate([found[0][i][:, 3:], found[1][i]], 1), exact[name], name)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("slots", "options"), [(16, {"block_size": 1, "window": 8}), (32, {"block_size": 4})]
)
def test_sixteen_bits(slots, options):
    """Numbers, or derivatives, that are not those of a float32 cache of the same tokens, ragged and around a ring.

    With a slot on each device, or with blocks of them, of which a write has several tokens.
    """
    first, second = tokens(0, 8, jnp.bfloat16), tokens(1, 6, jnp.bfloat16)
    along = tokens(2, slots, jnp.float32)

    def read(first, second, dtype):
        cache = empty(dtype=dtype, capacity=slots, **options)
        for new, lengths in ((first, None), (second, (6, 0, 3)), (second, (6, 6, 6))):
            lengths = lengths and jnp.asarray(lengths, jnp.int32)
            cache = cache.append(*(x.astype(dtype) for x in new), lengths=lengths)
        return cache.keys().astype(jnp.float32), cache.values().astype(jnp.float32)

    @functools.partial(jax.jit, static_argnums=2)
    def found(first, second, dtype):
        out, pull_back = jax.vjp(lambda *new: read(*new, dtype), first, second)
        _, tangent = jax.jvp(lambda *new: read(*new, dtype), (first, second), (first, second))
        return out, tangent, pull_back(along)

    with jax.set_mesh(mesh_of("8")):
        own, wide = (found(first, second, dtype) for dtype in (jnp.bfloat16, jnp.float32))
    for x, y in zip(jax.tree.leaves(own[:2]), jax.tree.leaves(wide[:2]), strict=True):
        np.testing.assert_array_equal(x, y)
    for x, y in zip(jax.tree.leaves(own[2]), jax.tree.leaves(wide[2]), strict=True):
        np.testing.assert_allclose(x.astype("float32"), y.astype("float32"), rtol=0.02, atol=0.02)


def test_quantize():
    """An error above max|x| / 254 per head and token; zeros, NaNs that come back as numbers; scales on every device."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 3, 16)) * 10.0 ** rng.integers(-9, 9, (64, 3, 1))
    x[0, 0], x[1, 1, 3] = 0, np.nan

    @jax.jit
    def through(x):
        options = {"dtype": jnp.float32, "quantize": "int8", "block_size": 1}
        return KVCache.empty(1, 64, 3, 16, **options).append(x[None], x[None]).keys()[0]

    read = np.asarray(through(array(x, jnp.float32)), np.float64)
    bound = np.abs(np.nan_to_num(x)).max(-1, keepdims=True) / 254 * (1 + 1e-5)
    assert np.isnan(read[1, 1]).all() and not read[0, 0].any()
    read[1, 1] = x[1, 1] = 0
    assert (np.abs(read - x) <= bound).all()
    assert np.abs(read - x).max() > 0

    with jax.set_mesh(mesh_of("8")):
        key, value = tokens(3, 5, jnp.float32)
        cache = started(key, value, dtype=jnp.float32, quantize="int8")
        assert cache.key.dtype == jnp.int8 and cache.key_scale.shape == (B, 48, K)
        scales = empty(quantize="int8").key_scale.addressable_shards  # each device has its own
        assert [x.data.shape for x in scales] == 8 * [(B, 6, K)]
        for b, row in enumerate(held(cache)):
            for n, pair in row.items():
                for x, exact in zip(pair, (np.asarray(y)[b, n] for y in (key, value)), strict=True):
                    assert (np.abs(x - exact).max(-1) <= np.abs(exact).max(-1) / 253.9).all()
        with pytest.raises(TypeError, match="rounding has no derivative"):
            jax.grad(
                lambda key: (
                    cache.append(key, value).attend(jnp.ones((B, 1, N, H), jnp.float32)).lse.sum()
                )
            )(key)


BOTH = {"quantize": "int8", "window": 9}


@pytest.mark.smoke
@pytest.mark.parametrize(
    "options",
    few([{}, {"window": 9}, {"dtype": jnp.bfloat16}, {"quantize": "int8"}, BOTH], BOTH),
    ids=str,
)
def test_saved_and_loaded(options, tmp_path):
    """A bit or a token lost on the way to another mesh, number of devices, block or capacity."""
    dtype, counts = options.get("dtype", jnp.float64), jnp.asarray([13, 5, 0], jnp.int32)
    with jax.set_mesh(mesh_of("8")):
        cache = started(*tokens(0, 13, dtype), [13, 5, 0], capacity=32, **options)
        for i in range(4 if "window" in options else 1):
            cache = append(cache, *tokens(i + 1, 13, dtype), lengths=counts)
        cache = cache.evict(jnp.asarray([3, 0, 0]))
        cache.save(tmp_path / "cache")
        before = stored(cache)
    ways = [
        ("2x4", {"parallel": SequenceParallel("node"), "capacity": 40, "block_size": 1}),
        (None, {}),
        ("2x4 explicit", {"parallel": parallel_of("2x4"), "block_size": 3}),
    ]
    for kind, way in ways:
        with jax.set_mesh(mesh_of(kind)) if kind else contextlib.nullcontext():
            again = KVCache.load(tmp_path / "cache", **way)
            assert again.dtype == dtype and again.key.dtype == cache.key.dtype
            assert stored(again) == before
            if again.parallel is not None:
                check_balanced(again)
    with jax.set_mesh(mesh_of(kind)):
        more = again.append(*tokens(9, 2, dtype))
        assert more.lengths.tolist() == [n + 2 for n in cache.lengths.tolist()]
    with jax.set_mesh(mesh_of("8")):
        if "window" in options:
            smaller = {"capacity": 16, "block_size": 1, "parallel": cache.parallel}
            small = stored(KVCache.load(tmp_path / "cache", **smaller))
            assert sorted(small[0]) == sorted(before[0])[-16:]
            assert all(small[0][n] == before[0][n] for n in small[0])
        else:
            with pytest.raises(ValueError, match="capacity: wanted at least the 23 tokens"):
                KVCache.load(tmp_path / "cache", capacity=22)


def test_not_saved(tmp_path):
    """A cache read from a folder without one; one written from inside `jax.jit`."""
    with pytest.raises(ValueError, match="path: wanted a folder with all files .* 0 of 1"):
        KVCache.load(tmp_path / "nowhere")
    with pytest.raises(TypeError, match="key: wanted an array that has been computed"):
        jax.jit(lambda cache: cache.save(tmp_path / "traced"))(empty(parallel=None))


def test_another_mesh():
    """Slots read as if they were laid out for another number of devices."""
    with jax.set_mesh(mesh_of("8")):
        cache = empty(parallel=SequenceParallel("device"))
    with jax.set_mesh(mesh_of("2x4")):
        with pytest.raises(ValueError, match="the 8 devices along the sequence .* got one with 4"):
            cache.append(*tokens(0, 1))
    with pytest.raises(ValueError, match="parallel: wanted a mesh in force"):
        cache.positions  # noqa: B018


def test_counts_known_late(raises_late):
    """Numbers of tokens that are traced, and out of range: no token may be taken that was not given."""
    with jax.set_mesh(mesh_of("8")):
        cache = started(*tokens(0, 14), [5, 0, 2], capacity=16)
        with pytest.raises(RuntimeError, match="lengths: wanted from 0 to as many new tokens"):
            wrong = append(cache, *tokens(0, 3), lengths=array([1, 4, 0], jnp.int32))
            jax.block_until_ready(wrong)
        cache = append(cache, *tokens(0, 3), lengths=array([1, 3, 0], jnp.int32))
    assert cache.lengths.tolist() == [6, 3, 2]


def test_counts_of_64_bits(raises_late):
    """2^32 + 1 tokens, which in 32 bits are one: of given arrays, and of traced ones."""
    counts, most = jnp.asarray([1, 2**32 + 1, 0]), jnp.asarray([1, 3, 0])
    cache, new = empty(parallel=None), tokens(0, 3)
    with pytest.raises(ValueError, match="lengths: wanted 0 to 3, got .*4294967297"):
        cache.append(*new, lengths=counts)
    with pytest.raises(RuntimeError, match="lengths: wanted from 0 to as many new tokens"):
        jax.block_until_ready(append(cache, *new, lengths=counts))
    cache = append(cache, *new, lengths=most)
    for gone in (cache.evict(before=2**40), cache.evict(counts * 2**32)):
        assert gone.starts.tolist() == most.tolist()
