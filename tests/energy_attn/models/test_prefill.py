"""Prompts read in chunks that are sharded over a mesh, into a cache that is sharded over it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn.distributed import KVCache, SequenceParallel, collectives, make_mesh
from energy_attn.models import LlamaConfig, PromptLookup, generate, shard
from energy_attn.models.generation import _generate
from tests.support.compare import close
from tests.support.llama import build, numpy_llama
from tests.support.selection import few_rows

CONFIG = LlamaConfig(
    13, 16, 24, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8, head_dim=4
)
LENGTHS = (45, 7)
CHUNK = 18  # not a multiple of eight devices; three chunks, the first of them shorter


@pytest.fixture(scope="module")
def model():
    return build(CONFIG, scale=0.5)


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
            logits = numpy_llama(model, text[None], np.arange(len(text))[None])[0]
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
def test_stream_is_the_text(model, tokens):
    """All tokens in order, with a drafter or over a mesh, and a bar for the prompts."""
    prompts = [list(map(int, tokens[0])), [1, 2, 3]]
    want = generate(model, prompts, 9)
    ends = {"eos_token_id": int(want.tokens[1, 4]), "chunk_size": 20}
    heard, shown = [], []
    listens = {"stream": heard.append, "progress": lambda done, note: shown.append((done, note))}
    drafted = generate(model, prompts, 9, drafter=PromptLookup(), **ends, **listens)
    with jax.set_mesh(make_mesh((2, 4))):
        spread = generate(model, prompts, 9, parallel=SequenceParallel(), **ends, **listens)
    joined = np.concatenate(heard, 1)
    for row, both in enumerate(joined):
        said = both[both >= 0]
        text = [x.tokens[row, : x.lengths[row]] for x in (drafted, spread)]
        np.testing.assert_array_equal(said, np.concatenate(text))
    assert int(drafted.lengths[1]) <= 5
    assert shown == [(n / 45, f"{n} of 45 tokens") for n in (5, 25, 45)] * 2


@pytest.mark.full
def test_an_error_of_the_stream_ends_the_loop(model):
    """The error is the caller's own, raised once, and ends the loop."""
    calls = []

    def stream(tokens):
        calls.append(tokens)
        if len(calls) == 3:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        generate(model, [[1, 2, 3]], 1000, stream=stream)
    assert len(calls) == 3
    again = generate(model, [[1, 2, 3]], 9, stream=calls.append)
    assert len(calls) == 3 + int(again.lengths[0])


def test_one_program_for_all_streams(model):
    """Another stream must not compile the loop again."""
    generate(model, [[1, 2, 3]], 9, stream=lambda tokens: None)
    before = _generate.run._cache_size()
    generate(model, [[1, 2, 3]], 9, stream=lambda tokens: None)
    assert _generate.run._cache_size() == before


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"stream": 3}, TypeError, "stream: wanted None or a function of tokens, got int 3"),
        ({"progress": "yes"}, TypeError, "progress: wanted True, False, None or a function"),
    ],
)
def test_bad_listeners(given, kind, message, model, unchecked):
    with pytest.raises(kind, match=re.escape(message)):
        generate(model, [[1, 2]], 1, **given)


def test_no_stream_inside_jit(model):
    """A cached program would call a stream that no longer listens."""
    with pytest.raises(ValueError, match="stream: wanted none inside of jax.jit"):
        jax.jit(lambda model: generate(model, [[1, 2]], 1, stream=print).tokens)(model)


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
    layers, width = CONFIG.num_hidden_layers, CONFIG.hidden_size
    # maxima, numerators, denominators: half the heads
    merged = 2 * (8 // 2) * (CONFIG.head_dim + 2)
    summed = 2 * 2 * width  # behind attention and the MLP
    assert {c.kind for c in sent} == {"all-reduce"}
    assert sum(c.bytes * c.count for c in sent) == 8 * layers * (merged + summed)


def test_heads_that_an_axis_does_not_divide():
    parallel = SequenceParallel("sequence", heads="tensor")
    wanted = "wanted a number of heads that is a multiple of the 2 devices"
    three = jnp.asarray(np.zeros((1, 8, 3, 4)))
    with jax.set_mesh(make_mesh((4, 2), ("sequence", "tensor"))):
        with pytest.raises(ValueError, match=f"kv_heads: {wanted}"):
            KVCache.empty(1, 48, 3, 4, parallel=parallel)
        with pytest.raises(ValueError, match=f"key: {wanted}"):
            ea.attention(three, three, three, parallel=parallel)
    for name in ("heads", "batch"):
        with pytest.raises(ValueError, match=f"{name}: wanted other mesh axes"):
            SequenceParallel("sequence", **{name: "sequence"})


def test_rows_that_an_axis_does_not_divide():
    parallel = SequenceParallel("sequence", batch="data")
    wanted = "wanted a number of rows that is a multiple of the 2 devices"
    three = jnp.asarray(np.zeros((3, 8, 2, 4)))
    with jax.set_mesh(make_mesh((4, 2), ("sequence", "data"))):
        with pytest.raises(ValueError, match=f"batch: {wanted}"):
            KVCache.empty(3, 48, 2, 4, parallel=parallel)
        with pytest.raises(ValueError, match=f"query: {wanted}.*, got 3"):
            ea.attention(three, three, three, parallel=parallel)
