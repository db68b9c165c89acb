"""Caches: prompts in chunks over a mesh, and rows that end, begin and share a prompt. The judge is NumPy's Llama."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn.distributed import KVCache, SequenceParallel, collectives, make_mesh
from energy_attn.models import LlamaConfig, shard
from energy_attn.prefix_tree import PrefixTree
from tests.support.compare import close
from tests.support.complaints import refused
from tests.support.llama import CONFIG, build, numpy_llama
from tests.support.meshes import mesh_of, parallel_of
from tests.support.selection import few, few_rows

WIDE = LlamaConfig(
    13, 16, 24, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8, head_dim=4
)
LENGTHS = (45, 7)
CHUNK = 18  # not a multiple of eight devices; three chunks, the first of them shorter


@pytest.fixture(scope="module")
def model():
    return build(WIDE, scale=0.5)


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(1).integers(0, 13, (2, LENGTHS[0])), jnp.int32)


def read(model, tokens, cache):
    out = model.prefill(tokens, cache, lengths=jnp.asarray(LENGTHS), chunk_size=CHUNK)
    # a step that reads the cache shows that keys are in the right slots
    step = model(jnp.argmax(out.logits, -1).astype(jnp.int32), cache=out.cache)
    return out.logits, step.logits, out.cache.lengths


@pytest.fixture(scope="module")
def alone(model, tokens):
    """From the definition, each row by itself and without a cache: the logits behind the prompts, and a token later."""
    first, second = [], []
    for row, n in enumerate(LENGTHS):
        text = np.asarray(tokens[row, :n])
        for found in (first, second):
            logits = numpy_llama(model, text[None])[0]
            found.append(logits[:, -1:])
            text = np.append(text, logits[0, -1].argmax())
    return np.concatenate(first), np.concatenate(second)


@pytest.mark.parametrize(
    ("method", "explicit"),
    few_rows(
        [
            ("tree", False),
            ("ring", False),
            ("ulysses", False),
            ("hybrid", False),
            ("gather", False),
            ("auto", True),
            (None, False),
        ]
    ),
)
def test_every_method_reads_the_same(method, explicit, model, tokens, alone):
    """Rows of different lengths, chunks that the devices do not divide, keys in blocks of several slots."""
    first, second = alone
    with jax.set_mesh(make_mesh((2, 4), explicit=explicit)):
        parallel = None if method is None else SequenceParallel(method=method)
        cache = model.empty_cache(2, 48, parallel=parallel, block_size=2)
        if method == "ulysses":  # one query has no sequence to exchange heads for
            got = jax.jit(functools.partial(model.prefill, chunk_size=CHUNK))(
                tokens, cache, lengths=jnp.asarray(LENGTHS)
            )
            found = got.logits, second, got.cache.lengths
        else:
            found = jax.jit(read)(model, tokens, cache)
    close(found, (first, second, np.asarray(LENGTHS)), tolerance=1e-9)


VOCABULARY, PIECE = 32768, 64  # of a bigger model, and of its prompts


@functools.cache
def compiled(spread, slots, time):
    """The prefill of a bigger model, on one device or over eight."""
    config = LlamaConfig(
        VOCABULARY, 64, 2048, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    model = build(config, jnp.float32)

    def run(model, tokens, cache):
        return model.prefill(tokens, cache, chunk_size=PIECE)

    mesh = make_mesh((8,), ("device",))
    with jax.set_mesh(mesh):
        parallel = SequenceParallel("device") if spread else None
        cache = model.empty_cache(1, slots, parallel=parallel, block_size=8)
        given = model, jnp.zeros((1, time), jnp.int32)
        if spread:
            given = jax.device_put(given, NamedSharding(mesh, P()))
        return jax.jit(run, donate_argnums=2).lower(*given, cache).compile()


@pytest.mark.full
def test_each_device_reads_its_share():
    """All weights times all tokens on every device would be the slowest part of a prefill."""
    alone, share = (
        compiled(spread, 4096, PIECE).cost_analysis()["flops"] for spread in (False, True)
    )
    assert share < alone / 4


@pytest.mark.full
def test_memory_is_the_cache_and_a_constant():
    """The cache is not gathered or copied, and only the last logits are computed: O(chunk) beside the cache."""
    small, large = (compiled(True, slots, 4 * PIECE) for slots in (16384, 65536))
    temporary = [x.memory_analysis().temp_size_in_bytes for x in (small, large)]
    mine = 2 * 65536 // 8 * 2 * 16 * 4  # keys and values of one device
    assert large.memory_analysis().alias_size_in_bytes >= mine  # written in place
    assert temporary[1] - temporary[0] < mine / 8  # positions: 4 bytes a slot beside 256
    assert temporary[0] < PIECE * VOCABULARY * 4 / 2
    for sent in collectives(large):
        assert sent.bytes <= 2 * PIECE * 4 * 16 * 4, sent  # queries or states of a chunk


@pytest.mark.full
def test_heads_on_an_axis_of_their_own(model, tokens, alone, tmp_path):
    """Weights and cache split over a tensor axis: its devices sum twice a layer, and send no keys."""
    mesh = make_mesh((4, 2), ("sequence", "tensor"))
    parallel = SequenceParallel("sequence", merge="allreduce", heads="tensor")
    with jax.set_mesh(mesh):
        cache = model.empty_cache(2, 48, parallel=parallel, block_size=2)
        found = jax.jit(read, donate_argnums=2).lower(shard(model, mesh), tokens, cache).compile()
        step = jax.jit(lambda model, tokens, cache: model(tokens, cache=cache).logits)
        sent = collectives(step.lower(shard(model, mesh), tokens[:, :1], cache).compile())
        first, second, _ = found(shard(model, mesh), tokens, cache)
        close((first, second), alone, tolerance=1e-9)

        stored = model.empty_cache(2, 48, parallel=parallel).layers[0]
        assert stored.key.addressable_shards[0].data.shape == (2, 12, 4, 4)
        key = jax.random.normal(jax.random.key(3), (2, 5, 8, 4))
        stored = stored.append(key, -key)
        assert stored.key.addressable_shards[0].data.shape == (2, 12, 4, 4)
        stored.save(tmp_path)
        again = KVCache.load(tmp_path, parallel=parallel, block_size=1)
    np.testing.assert_array_equal(again.keys()[:, again.slots.slot(np.arange(5))], key)
    layers, width = WIDE.num_hidden_layers, WIDE.hidden_size
    # maxima, numerators, denominators: half the heads
    merged = 2 * (8 // 2) * (WIDE.head_dim + 2)
    summed = 2 * 2 * width  # behind attention and the MLP
    assert {c.kind for c in sent} == {"all-reduce"}
    assert sum(c.bytes * c.count for c in sent) == 8 * layers * (merged + summed)


def test_what_an_axis_does_not_divide():
    """Heads or rows that devices do not share evenly: an error of XLA that names no argument."""
    wanted = "wanted a number of {} that is a multiple of the 2 devices"
    mesh = make_mesh((4, 2), ("sequence", "other"))
    for kind, first, shape, name in (
        ("heads", "kv_heads", (1, 8, 3, 4), "key"),
        ("rows", "batch", (3, 8, 2, 4), "query"),
    ):
        option = "heads" if kind == "heads" else "batch"
        parallel = SequenceParallel("sequence", **{option: "other"})
        array = jnp.asarray(np.zeros(shape))
        with jax.set_mesh(mesh):
            with pytest.raises(ValueError, match=f"{first}: {wanted.format(kind)}"):
                KVCache.empty(shape[0], 48, *shape[2:], parallel=parallel)
            with pytest.raises(ValueError, match=f"{name}: {wanted.format(kind)}"):
                ea.attention(array, array, array, parallel=parallel)
        with pytest.raises(ValueError, match=f"{option}: wanted other mesh axes"):
            SequenceParallel("sequence", **{option: "sequence"})


@eqx.filter_jit(donate="all-except-first")
def step(model, cache, tokens, lengths):
    out = model(tokens, cache=cache, lengths=lengths)
    return out.cache, out.logits


@pytest.mark.parametrize("kind", few(["8", "2x4 explicit"], "8"))
def test_rows_that_begin_again(kind):
    """A layer whose row is left as it was: a prompt that sees tokens of the one before, or rotary positions of it."""
    model, rng = build(), np.random.default_rng(0)
    texts = [rng.integers(0, CONFIG.vocab_size, 12).astype(np.int32) for _ in range(5)]

    def check(logits, row, text):
        exact = numpy_llama(model, text[None])[0][0]
        close(logits[row, -1], exact[-1], f"row {row}")

    with jax.set_mesh(mesh_of(kind)):
        cache, other = (
            model.empty_cache(rows, 16, parallel=parallel_of(kind), block_size=1) for rows in (3, 1)
        )
        all_rows = jnp.full(3, 6, jnp.int32)
        cache, _ = step(model, cache, jnp.asarray([x[:6] for x in texts[:3]]), all_rows)
        read = model.prefill(jnp.asarray(texts[3][None, :7]), other).cache
        cache = jax.jit(type(cache).replace)(cache, jnp.asarray([1]), read)
        cache = cache.reset(jnp.asarray([False, False, True]))
        assert [x.lengths.tolist() for x in cache.layers] == 2 * [[6, 7, 0]]
        new = [texts[0][6:11], texts[3][7:12], texts[4][:5]]
        cache, logits = step(model, cache, jnp.asarray(new), jnp.full(3, 5, jnp.int32))
    for row, text in enumerate((texts[0][:11], texts[3], texts[4][:5])):
        check(logits, row, text)


@pytest.mark.parametrize("kind", few([None, "8", "2x4 explicit"], None))
def test_continuations_that_share_a_prompt(kind):
    """Steps, and a chunk longer than there are devices, over the prompt of another row, or at wrong positions."""
    model, rng, count = build(), np.random.default_rng(0), 2
    prompts = [rng.integers(0, CONFIG.vocab_size, n).astype(np.int32) for n in (7, 4)]
    more = rng.integers(0, CONFIG.vocab_size, (4, 10)).astype(np.int32)
    texts = [np.append(prompts[row // count], more[row]) for row in range(4)]
    attend = functools.partial(ea.attention, implementation="blockwise")

    @eqx.filter_jit
    def run(model, cache, more):
        first = model(more[:, :1], cache=cache)
        second = model(more[:, 1:2], cache=first.cache, attend=attend, return_energies=True)
        rest = model.prefill(more[:, 2:], second.cache, chunk_size=9)
        return second.logits, second.energies, rest.logits

    with jax.set_mesh(mesh_of(kind or "8")):
        cache = model.empty_cache(2, 8, parallel=kind and parallel_of(kind), block_size=1)
        padded = np.stack([np.append(x, np.zeros(7 - len(x), np.int32)) for x in prompts])
        cache = model.prefill(jnp.asarray(padded), cache, lengths=jnp.asarray([7, 4])).cache
        cache = cache.fork(count, capacity=16)
        assert cache.capacity == 16 and cache.lengths.tolist() == [7, 7, 4, 4]
        second, energies, last = jax.device_get(run(model, cache, jnp.asarray(more)))
    for row, text in enumerate(texts):
        logits, exact = numpy_llama(model, text[None])
        n = len(text) - 9
        close(second[row, 0], logits[0, n], "the second token")
        close(energies[:, row, 0], exact[:, 0, n], "its energies")
        close(last[row, 0], logits[0, -1], "the last token")


def test_what_a_fork_refuses(unchecked):
    """Another function of attention, a recording or a tree that goes by what the rows share, without a word."""
    model = build()
    cache = model.empty_cache(1, 8).fork(2, capacity=8)
    token = jnp.zeros((2, 1), jnp.int32)

    def attend(*arguments, **options):
        return ea.attention(*arguments, **options)

    tree = PrefixTree.from_beam(jnp.zeros((2, 1, 2), jnp.int32))
    fork = "TypeError cache: wanted one that is no fork for"
    for wanted, call in {
        "ValueError attend: wanted attention, or a functools.partial of it": lambda: model(
            token, cache=cache, attend=attend
        ),
        "NotImplementedError no fork where energies are recorded": ea.record(
            lambda: model(token, cache=cache).logits
        ),
        f"{fork} read_tree": lambda: model.read_tree(tree, cache),
        f"{fork} replace": lambda: cache.replace(jnp.asarray([0]), model.empty_cache(1, 8)),
        f"{fork} fork": lambda: cache.fork(2, capacity=8),
        r"ValueError cache.layers\[0\].own.key: wanted shape \(3, slots, 2, 8": lambda: model(
            jnp.zeros((3, 1), jnp.int32), cache=cache
        ),
    }.items():
        with refused(wanted):
            call()


def test_another_model(unchecked):
    """Rows of a cache with fewer layers, of which some would be left as they are."""
    cache = build().empty_cache(2, 8)
    with pytest.raises(TypeError, match="other: wanted a DecoderCache, got KVCache"):
        cache.replace(jnp.asarray([0]), cache.layers[0])
    fewer = type(cache)(cache.layers[:1])
    with pytest.raises(ValueError, match="other: wanted the 2 layers of the cache, got 1"):
        cache.replace(jnp.asarray([0, 1]), fewer)
    with pytest.raises(ValueError, match=r"rows: wanted rows from 0 to 1, got \[2\]"):
        cache.reset(jnp.asarray([2]))
