"""A queue of prompts: each has the text that it has alone, in any order, by two programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.models import AbstractDrafter, generate
from energy_attn.models.generation import _loop
from energy_attn.prefix_tree import PrefixTree
from tests.support.complaints import refused
from tests.support.llama import WRITER, build, drafter_of
from tests.support.selection import few

LENGTHS = 6, 3, 20, 1, 9, 2, 15
COUNT, CHUNK, ROWS = 11, 4, 3


@pytest.fixture(scope="module")
def model():
    return build(WRITER, scale=0.5)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 13, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def greedy(model, prompts):
    """Greedy decoding of each prompt, token by token, from the whole text and without a cache."""
    read = jax.jit(lambda tokens: model(tokens).logits)
    rows = np.arange(len(prompts))
    text = np.zeros((len(prompts), max(LENGTHS) + COUNT), np.int32)
    for row, prompt in enumerate(prompts):
        text[row, : len(prompt)] = prompt
    ends = np.array(LENGTHS)
    for _ in range(COUNT):
        text[rows, ends] = np.asarray(read(text))[rows, ends - 1].argmax(-1)
        ends += 1
    return np.stack([row[end - COUNT : end] for row, end in zip(text, ends, strict=True)])


def ended(greedy, stops):
    """The same tokens up to a stop, and their number."""
    among = np.isin(greedy, stops)
    lengths = np.where(among.any(1), among.argmax(1) + 1, COUNT)
    return np.where(np.arange(COUNT) < lengths[:, None], greedy, -1), lengths


@pytest.fixture(scope="module")
def stops(greedy):
    """Tokens that end some prompts at different lengths, two of them with their first token."""
    stops = [int(greedy[5, 0]), int(greedy[6, 0])]
    assert [int(x) for x in ended(greedy, stops)[1]] == [COUNT, 3, COUNT, 2, COUNT, 1, 1]
    return stops


def programs():
    return [f._cache_size() for f in (_loop._begin, _loop.run, _loop._put, _loop._complete)]


@pytest.mark.parametrize(
    "name", few(["none", "lookup", "another model", "itself"], "another model")
)
def test_any_order_has_the_texts_of_one_by_one(name, model, prompts, greedy, stops):
    """A row that keeps something of the prompt before; other results where others are refilled; a compilation."""
    drafter = drafter_of(name, model)
    options = {"eos_token_id": stops, "drafter": drafter, "chunk_size": CHUNK}
    # padded to one length, so that all are one program
    padded = np.zeros((len(prompts), max(LENGTHS)), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    alone = [
        generate(model, row[None], COUNT, lengths=jnp.asarray([n]), **options)
        for row, n in zip(jnp.asarray(padded), LENGTHS, strict=True)
    ]
    before = None
    for order in (np.arange(7), np.arange(7)[::-1], np.random.default_rng(1).permutation(7)):
        queue = [prompts[number] for number in order]
        found = generate(model, queue, COUNT, batch_size=ROWS, **options)
        for got, want in zip(
            found[:5], zip(*(alone[n][:5] for n in order), strict=True), strict=True
        ):
            np.testing.assert_array_equal(got, np.concatenate(want))
        tokens, lengths = ended(greedy[order], stops)
        np.testing.assert_array_equal(found.tokens, tokens)
        assert found.lengths.tolist() == lengths.tolist()
        before = before or programs()
    assert programs() == before  # nothing is compiled for another order
    # nor for other prompts, and another number of them
    generate(model, [[5, 4, 3], [2], padded[2].tolist(), [1]], COUNT, batch_size=ROWS, **options)
    assert programs() == before


@pytest.mark.full
@pytest.mark.parametrize("explicit", [False, True], ids=["automatic", "explicit"])
@pytest.mark.parametrize("name", ["none", "another model"])
def test_over_a_mesh(name, explicit, model, prompts, greedy, stops):
    """A row that is put into a cache over eight devices, or whose sharding makes the programs compile again."""
    options = {"eos_token_id": stops, "drafter": drafter_of(name, model), "chunk_size": CHUNK}
    start = programs()
    with jax.set_mesh(make_mesh((2, 4), explicit=explicit)):
        for axes, heads in ((("node", "device"), ()), ("device", "node")):
            parallel = SequenceParallel(axes, heads=heads)
            found = generate(model, prompts, COUNT, batch_size=ROWS, parallel=parallel, **options)
            tokens, _ = ended(greedy, stops)
            np.testing.assert_array_equal(found.tokens, tokens)
    assert programs() == [number + 2 for number in start]


@pytest.mark.parametrize("rows", few([1, 2, 6], 2))
def test_draws_are_those_of_the_prompt(rows, model, prompts, stops):
    """A draw that depends on the row of the cache, or on when a prompt's turn came."""
    options = {"temperature": 1.3, "top_k": 9, "key": jax.random.key(3), "eos_token_id": stops}
    together = generate(model, prompts, COUNT, **options)
    found = generate(model, prompts, COUNT, batch_size=rows, chunk_size=CHUNK, **options)
    for got, want in zip(found[:5], together[:5], strict=True):
        np.testing.assert_array_equal(got, want)
    same = [prompts[0]] * 4
    texts = generate(model, same, COUNT, batch_size=2, chunk_size=CHUNK, **options)
    assert len(set(map(tuple, texts.tokens.tolist()))) == 4


@pytest.mark.parametrize("name", few(["none", "lookup"], "lookup"))
def test_stream_and_progress(name, model, prompts, greedy, stops):
    """Tokens told of the wrong prompt, twice or not at all; chunks of padding; rows that wait for others."""
    heard, shown = [], []
    found = generate(
        *(model, prompts, COUNT),
        batch_size=ROWS,
        eos_token_id=stops,
        drafter=drafter_of(name, model),
        stream=heard.append,
        progress=lambda done, note: shown.append((done, note)),
        chunk_size=CHUNK,
    )
    assert {len(tokens) for tokens in heard} == {len(prompts)}
    assert all(((tokens >= 0).sum(0) <= ROWS).all() for tokens in heard)
    # the fourth prompt takes the place of the second, and does not wait for the first and the third
    turns = [{row for row, tokens in enumerate(x) if (tokens >= 0).any()} for x in heard]
    assert {0, 2, 3} in turns and not any({1, 3} <= turn for turn in turns)
    tokens, lengths = ended(greedy, stops)
    for row, said in enumerate(np.concatenate(heard, 1)):
        assert said[said >= 0].tolist() == tokens[row, : lengths[row]].tolist()
    np.testing.assert_array_equal(found.tokens, tokens)
    chunks = [min(CHUNK, n - i) for n in LENGTHS for i in range(0, n, CHUNK)]
    assert max(LENGTHS) % CHUNK == 0  # so that no chunk is shorter
    read = np.cumsum(chunks).tolist()
    assert shown == [(n / sum(LENGTHS), f"{n} of {sum(LENGTHS)} tokens") for n in read]


def test_an_error_of_the_stream_ends_the_queue(model, prompts, monkeypatch):
    """Prompts that are read though nobody listens any more, or an error that is lost."""
    calls, begun, begin = [], [], _loop._begin

    def stream(tokens):
        calls.append(tokens)
        if len(calls) == ROWS + 2:
            raise KeyError("enough")

    def counted(*args):
        begun.append(args)
        return begin(*args)

    monkeypatch.setattr(_loop, "_begin", counted)
    options = {"batch_size": ROWS, "eos_token_id": (), "chunk_size": CHUNK}
    with pytest.raises(KeyError, match="enough"):
        generate(model, prompts, COUNT, stream=stream, **options)
    assert len(calls) == ROWS + 2 and len(begun) == ROWS


def test_no_queue_for_few_prompts(model, prompts, monkeypatch):
    """As many rows as prompts: the loop of all prompts, and no other program."""
    monkeypatch.setattr(_loop, "_begin", None)
    want = generate(model, prompts, 2).tokens
    for rows in len(prompts), 100:
        np.testing.assert_array_equal(generate(model, prompts, 2, batch_size=rows).tokens, want)


def test_a_row_is_put_in_place(model):
    """A copy of the whole cache for each prompt."""
    rows, slots = 8, 4096

    def loop(rows):
        cache = model.empty_cache(rows, slots)
        numbers = jnp.zeros(rows, jnp.int32)
        text = jnp.zeros((rows, slots), jnp.int32)
        counts = jnp.zeros((3, rows), jnp.int32)
        return _loop.Loop(text, numbers, numbers, numbers, cache, None, counts, numbers)

    given = jax.eval_shape(functools.partial(loop, rows)), jax.eval_shape(lambda: loop(1))
    compiled = _loop._put.lower(*given, jnp.int32(0)).compile().memory_analysis()
    held = rows * slots * 2 * WRITER.num_key_value_heads * WRITER.head_dim * 8
    assert compiled.alias_size_in_bytes >= held
    assert compiled.temp_size_in_bytes < held / rows / 8


class Counts(AbstractDrafter):
    """Carries a number for all rows."""

    depth: int = 2

    def start(self, tokens, lengths, slots, parallel):
        return jnp.zeros((), jnp.int32)

    def draft(self, text, lengths, state):
        last = jnp.take_along_axis(text, lengths[:, None] - 1, axis=1)
        return PrefixTree.from_beam(jnp.stack([last, last], axis=2)), state + 1


def traced(model):
    return jax.jit(lambda tokens: generate(model, tokens, 2, batch_size=1).tokens)(
        np.ones((2, 3), np.int32)
    )


def split(model):
    with jax.set_mesh(make_mesh((4, 2), ("sequence", "data"))):
        parallel = SequenceParallel("sequence", batch="data")
        return generate(model, [[1]] * 4, 2, batch_size=2, parallel=parallel)


def queue(**options):
    return lambda model: generate(model, [[1, 2], [3]], 2, **options)


BAD = {
    "TypeError batch_size: wanted an integer, got str 'all'": queue(batch_size="all"),
    "ValueError batch_size: wanted at least 1, got 0": queue(batch_size=0),
    "ValueError batch_size: wanted None or .* inside jax.jit, .* got 1": traced,
    "ValueError batch_size: .* where parallel.batch splits the rows over .*data.*, got 2": split,
    r"ValueError drafter: .* first axis is the batch.* got one of shape \(\)": queue(
        batch_size=1, drafter=Counts()
    ),
}


@pytest.mark.parametrize(("wanted", "call"), BAD.items(), ids=BAD)
def test_bad_input(wanted, call, model, unchecked):
    """A mistake that no error names, or that only one of the later programs finds."""
    with refused(wanted):
        call(model)
