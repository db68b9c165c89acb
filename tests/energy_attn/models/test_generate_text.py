"""Options of generation and text: the same text drafted, queued or sharded, its probabilities, and where it ends."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.models import (
    AbstractDrafter,
    LlamaConfig,
    PromptLookup,
    Tokenizer,
    generate,
)
from energy_attn.models.generation import _generate, _sampling, _stream
from energy_attn.prefix_tree import PrefixTree
from tests.energy_attn.models.trained_tokenizers import byte_level, sentence_piece, write
from tests.support.llama import PROMPTS, WRITER, build, drafter_of, log_softmax, whole_of
from tests.support.observables import distribution
from tests.support.selection import few

BYTES = LlamaConfig(256, 16, 24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
MANY = LlamaConfig(400, 16, 24, num_hidden_layers=1, num_attention_heads=4)
COUNT = 11
BIAS = {3: 1.5, 5: -np.inf, 0: -0.5}
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 1.7, "logit_bias": BIAS}
DRAWS = {"temperature": 1.6, "top_k": 9, "top_p": 0.97, "min_p": 0.15}
LETTERS = "abcdé \n"


@pytest.fixture(scope="module")
def model():
    return build(WRITER, scale=0.5)


@pytest.fixture(scope="module")
def wanted(model):
    """Text and log-probabilities by definition, token by token, each from the whole text."""
    logits_of = whole_of(model)

    def penalized(logits, prompt, text):
        logits = logits + np.array([BIAS.get(token, 0.0) for token in range(13)])
        for token in {*prompt, *text}:
            logits[token] *= 1.4 if logits[token] < 0 else 1 / 1.4
        logits[list({*text})] -= 1.7
        return logits

    def draw(row, place, logits):
        left = distribution(logits, 1.6, 9, 0.97)
        left = np.where(left >= 0.15 * left.max(), left, 0)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), row), place)
        with np.errstate(divide="ignore"):
            return int((np.log(left) + jax.random.gumbel(key, (13,), jnp.float64)).argmax())

    texts = {"greedy": [], "drawn": []}
    for way, rows in texts.items():
        for row, prompt in enumerate(PROMPTS):
            text, log_p = [], []
            for _ in range(COUNT):
                logits = logits_of([*prompt, *text])[-1]
                changed = penalized(logits, prompt, text)
                place = len(prompt) + len(text) - 1
                token = int(changed.argmax()) if way == "greedy" else draw(row, place, changed)
                log_p.append(log_softmax(logits)[token])
                text.append(token)
            rows.append((text, log_p))
    return {way: [np.array(x) for x in zip(*rows, strict=True)] for way, rows in texts.items()}


class Told(AbstractDrafter):
    """Drafts what is told to it, one path."""

    texts: jax.Array
    depth: int = eqx.field(static=True, default=5)

    def start(self, tokens, lengths, slots, parallel):
        return None

    def draft(self, text, lengths, state):
        place = lengths[:, None] - 1 + jnp.arange(self.depth, dtype=jnp.int32)[None]
        return PrefixTree.from_beam(jnp.take_along_axis(self.texts, place, axis=1)[:, None]), state


def told(prompts, texts):
    rows = [[*prompt, *text, *[0] * 30][:40] for prompt, text in zip(prompts, texts, strict=True)]
    return Told(jnp.asarray(np.array(rows, np.int32)))


@pytest.mark.product
@pytest.mark.parametrize("way", ["greedy", "drawn"])
@pytest.mark.parametrize("name", few(["none", "lookup", "itself", "told"], "lookup", "told"))
def test_all_options_at_once(name, way, model, wanted):
    """A penalty that forgets a draft's ancestors, or counts a prompt or a token twice; another order; other logits."""
    options = PENALTIES | (DRAWS | {"key": jax.random.key(3)} if way == "drawn" else {})
    texts = wanted[way][0].tolist()
    drafter = told(PROMPTS, texts) if name == "told" else drafter_of(name, model)
    options |= {"drafter": drafter, "return_logprobs": True}
    found = generate(model, PROMPTS, COUNT, **options)
    np.testing.assert_array_equal(found.tokens, wanted[way][0])
    assert found.logprobs.dtype == jnp.float32
    np.testing.assert_allclose(found.logprobs, wanted[way][1], rtol=1e-6, atol=1e-6)
    if name == "told":  # all of it is accepted, so that a node's penalties depend on its ancestors
        assert found.passes.tolist() == [2] * 3
    if name == "lookup":
        queue = generate(model, PROMPTS, COUNT, batch_size=1, **options)
        np.testing.assert_array_equal(queue.tokens, found.tokens)
        np.testing.assert_allclose(queue.logprobs, found.logprobs, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("explicit", [False, True], ids=["automatic", "explicit"])
@pytest.mark.parametrize("name", ["none", "lookup"])
def test_over_a_mesh(name, explicit, model, wanted):
    """Tokens seen, or log-probabilities, of one device alone."""
    options = {**PENALTIES, **DRAWS, "key": jax.random.key(3), "return_logprobs": True}
    options |= {"drafter": drafter_of(name, model)}
    with jax.set_mesh(make_mesh((2, 4), explicit=explicit)):
        for rows in None, 2:
            found = generate(
                model, PROMPTS, COUNT, parallel=SequenceParallel(), batch_size=rows, **options
            )
            np.testing.assert_array_equal(found.tokens, wanted["drawn"][0])
            np.testing.assert_allclose(found.logprobs, wanted["drawn"][1], rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_logprobs_behind_an_end(model):
    """A number behind the end of a row, which a sum would add."""
    logits_of = whole_of(model)
    plain = generate(model, PROMPTS, COUNT)
    end = int(plain.tokens[0, 4])
    found = generate(model, PROMPTS, COUNT, eos_token_id=end, return_logprobs=True)
    for prompt, tokens, length, log_p in zip(PROMPTS, *found[:2], found.logprobs, strict=True):
        text = np.asarray(tokens)[:length].tolist()
        rows = log_softmax(logits_of([*prompt, *text])[len(prompt) - 1 : -1])
        want = rows[np.arange(len(text)), text]
        np.testing.assert_allclose(log_p[:length], want, rtol=1e-6, atol=1e-6)
        assert (np.asarray(log_p)[length:] == 0).all()


@pytest.mark.full
def test_distributions_are_those_of_transformers():
    """Another definition of a penalty, of min-p or of the order."""
    import torch
    from transformers.generation import logits_process as peers

    rng = np.random.default_rng(0)
    logits = rng.standard_normal((50, 13)) * 3
    seen = rng.integers(0, 13, (50, 4))
    bias = rng.standard_normal(13)
    options = {"temperature": 0.7, "top_k": 8, "top_p": 0.9, "min_p": 0.05}
    sampling = _sampling.sampling_of(
        13,
        {**options, "key": jax.random.key(0), "repetition_penalty": 1.3, "logit_bias": bias},
        False,
    )
    marked = _sampling.seen_in(sampling, jnp.asarray(seen), jnp.ones((50, 4), bool), 13)
    ours = _sampling._penalized(sampling, jnp.asarray(logits)[:, None], marked, None)[:, 0]
    ours = jax.nn.softmax(
        _sampling.process_logits(
            ours, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        )
    )
    tokens, theirs = torch.tensor(seen), torch.tensor(logits)
    for processor in (
        peers.SequenceBiasLogitsProcessor({(i,): float(x) for i, x in enumerate(bias)}),
        peers.RepetitionPenaltyLogitsProcessor(1.3),
        peers.TemperatureLogitsWarper(0.7),
        peers.TopKLogitsWarper(8),
        peers.TopPLogitsWarper(0.9),
        peers.MinPLogitsWarper(0.05),
    ):
        theirs = processor(tokens, theirs)
    want = torch.softmax(theirs, -1).numpy()
    np.testing.assert_array_equal(np.asarray(ours) > 0, want > 0)
    np.testing.assert_allclose(ours, want, rtol=1e-6, atol=1e-7)  # a temperature in float32


def test_nothing_is_computed_unless_asked_for(model, monkeypatch):
    """Arrays over the vocabulary that every pass carries, and options of no effect that are programs of their own."""
    loops, run = [], _generate.run

    def spy(by, loop):
        loops.append((by.sampling, loop))
        return run(by, loop)

    monkeypatch.setattr(_generate, "run", spy)
    idle = {"repetition_penalty": 1.0, "presence_penalty": 0, "logit_bias": None, "min_p": None}
    for options in {}, idle:
        found = generate(model, PROMPTS, 2, **options)
        assert found.logprobs is None and found.texts is None
        sampling, loop = loops[-1]
        assert jax.tree.leaves((sampling, loop.seen, loop.logprobs)) == []
    generate(model, PROMPTS, 2, repetition_penalty=1.1, return_logprobs=True)
    sampling, loop = loops[-1]
    assert len(jax.tree.leaves((sampling, loop.seen, loop.logprobs))) == 3


@pytest.fixture(scope="module")
def writer():
    """A byte model that writes a few letters, its tokenizer, and the bias that excludes others."""
    bias = np.full(256, -np.inf)
    bias[list("".join(LETTERS).encode())] = 0
    return build(BYTES, scale=0.5), bias


@pytest.fixture(scope="module")
def tokenizer():
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }} {% endfor %}"
    return Tokenizer.load("demo", chat_template=template)


def test_text_in_text_out(writer, tokenizer):
    """A chat that is a list of prompts, a prompt without its neighbour, text of special tokens or of another row."""
    model, bias = writer
    options = {"tokenizer": tokenizer, "logit_bias": bias, "eos_token_id": ord("c")}
    chat = [{"role": "user", "content": "é"}]
    given = {  # of four bytes, so that few programs are compiled
        "one": ("abé", ["abé"]),
        "two": (["abé", "b"], ["abé", "b"]),
        "a chat": (chat, ["ué "]),
        "both": ([chat, "b"], ["ué ", "b"]),
        "tokens": ([[97, 98, 97, 98]], ["abab"]),
    }
    for prompt, texts in given.values():
        found = generate(model, prompt, 12, **options)
        rows = [list(text.encode()) for text in texts]
        want = generate(model, rows, 12, logit_bias=bias, eos_token_id=ord("c"))
        np.testing.assert_array_equal(found.tokens, want.tokens)
        assert found.texts == tuple(tokenizer.decode(row) for row in want.tokens)


def prefix(text, stops):
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


@pytest.mark.parametrize("way", few(["plain", "drafted", "queue", "mesh"], "drafted", "queue"))
def test_stop_strings_and_streams(way, writer, tokenizer):
    """A row that goes on behind its stop string, or ends with that of another; text that is repeated, lost or cut."""
    model, bias = writer
    prompts = ["abab", "é", "cd cd", "b\n"]
    options = {"tokenizer": tokenizer, "logit_bias": bias, "temperature": 1.0, "chunk_size": 4}
    options |= {"key": jax.random.key(1)}
    free = generate(model, prompts, 24, **options)
    # the last one is never complete: what begins it is held until the row ends
    stops = [free.texts[0][7:10], free.texts[2][4:6], free.texts[3][-2:] + "zz"]
    rows = [list(prompt.encode()) for prompt in prompts]
    drafter = PromptLookup() if way == "queue" else told(rows, free.tokens.tolist())
    options |= {"drafter": drafter} if way != "plain" else {}
    options |= {"batch_size": 2} if way == "queue" else {}
    heard = []
    with jax.set_mesh(make_mesh((2, 4))):
        if way == "mesh":
            options |= {"parallel": SequenceParallel()}
        found = generate(model, prompts, 24, stop=stops, stream=heard.append, **options)
    assert all(len(said) == 4 and isinstance(x, str) for said in heard for x in said)
    for row, text in enumerate(free.texts):
        want = prefix(text, stops)
        assert found.texts[row] == "".join(said[row] for said in heard) == want
        tokens = np.asarray(free.tokens[row])
        counts = [
            n
            for n in range(1, 25)
            if prefix(tokenizer.decode(tokens[:n]), stops) != tokenizer.decode(tokens[:n])
        ]
        length = min(counts, default=24)
        assert found.lengths[row] == length
        np.testing.assert_array_equal(found.tokens[row, :length], tokens[:length])
        assert (np.asarray(found.tokens[row, length:]) == -1).all()
    assert found.lengths[0] <= 11 and found.lengths.max() == 24  # some end, some do not
    # nodes that are not written do not count: each pass but one that is cut adds a token to those accepted
    assert (found.accepted <= found.lengths - found.passes).all()
    # a message for each pass, but where a character or a stop string is awaited
    assert len(heard) > 5 and sum(map(any, heard)) > 5


@pytest.mark.full
@pytest.mark.parametrize("rows", [None, 2], ids=["at once", "queue"])
def test_text_behind_part_of_a_character(rows, tmp_path):
    """Letters that are lost, or another text as it comes, behind a prompt that ends inside a character."""
    falling = Tokenizer.load(write(tmp_path, sentence_piece("BPE")))
    model = build(MANY)
    names = [f"<0x{x:02X}>" for x in "🦙é".encode()]
    likely = [falling.token_id(x) for x in (*names, "<s>", "▁the", "a")]
    bias = {x: 9.0 for x in likely if x is not None}
    prompts = [
        falling.encode(x)[:-cut] for x, cut in (("hi 🦙🦙", 2), ("é", 1), ("a 🦙a", 2), ("a", 1))
    ]
    prompts = [x or [falling.token_id("a")] for x in prompts]
    heard = []
    found = generate(
        model,
        prompts,
        30,
        tokenizer=falling,
        stream=heard.append,
        batch_size=rows,
        temperature=1.0,
        key=jax.random.key(0),
        logit_bias=bias,
    )
    for row, (prompt, tokens) in enumerate(zip(prompts, found.tokens.tolist(), strict=True)):
        known, whole = falling.decode(prompt), falling.decode([*prompt, *tokens])
        unlike = [n for n in range(min(len(known), len(whole))) if known[n] != whole[n]]
        want = whole[min(unlike, default=min(len(known), len(whole))) :]
        assert found.texts[row] == "".join(texts[row] for texts in heard) == want


@pytest.mark.full
def test_a_chat_begins_once(padding, tmp_path):
    """The token that begins a text, by the template and by the tokenizer once more."""
    template = "{{ bos_token }}{{ messages[0].content }}"
    chatting = Tokenizer.load(write(tmp_path, byte_level()), chat_template=template)
    model = build(MANY)
    found = generate(model, [{"role": "user", "content": "né"}], 5, tokenizer=chatting)
    again = generate(model, "né", 5, tokenizer=padding)
    np.testing.assert_array_equal(found.tokens, again.tokens)


@pytest.mark.full
def test_a_special_token_as_a_stop_string(padding):
    """`stop="<|im_end|>"`, of which the text shows nothing, without effect."""
    model = build(MANY)
    end = padding.token_id("<|im_end|>")
    bias = {end: 2.0, **dict.fromkeys(range(330, 400), -np.inf)}
    options = {
        "tokenizer": padding,
        "temperature": 1.0,
        "key": jax.random.key(0),
        "logit_bias": bias,
    }
    free = generate(model, "The energy", 40, **options)
    found = generate(model, "The energy", 40, stop=["<|im_end|>", "never written"], **options)
    length = free.tokens[0].tolist().index(end) + 1
    assert 1 < length < 40 and found.lengths.tolist() == [length]
    assert found.texts[0] == padding.decode(free.tokens[0, :length])


@pytest.mark.parametrize("kind", ["tokens", "text"])
def test_an_error_of_a_stream(kind, writer, tokenizer, monkeypatch):
    """A loop that goes on though nobody listens, an error that is lost, or another program for the next stream."""
    model, bias = writer
    options = {"tokenizer": tokenizer, "logit_bias": bias} if kind == "text" else {}
    write = functools.partial(generate, model, [list(b"ab")], 30, **options)
    calls, told, wrote = [], [], _stream._Listener.wrote

    def counted(self, *args):
        told.append(args)
        return wrote(self, *args)

    def stream(texts):
        calls.append(texts)
        if len(calls) == 3:
            raise KeyError("enough")

    monkeypatch.setattr(_stream._Listener, "wrote", counted)
    with pytest.raises(KeyError, match="enough"):
        write(stream=stream)
    assert len(calls) == len(told) == 3
    programs = _generate.run._cache_size()
    write(stream=calls.append)
    assert _generate.run._cache_size() == programs and len(calls) > 3


@pytest.fixture(scope="module")
def padding(tmp_path_factory):
    """A tokenizer whose pad token, 2, is not the one that begins a text."""
    return Tokenizer.load(write(tmp_path_factory.mktemp("padding"), byte_level()))


def test_padding_is_refused(padding, tmp_path):
    """Pad tokens that are read as text; an array with lengths, or a text that begins with its pad token, refused."""
    model = build(MANY)
    right, left = np.array([[0, 7, 8], [0, 9, 2]]), np.array([[2, 7, 8], [0, 9, 5]])
    message = "wanted prompts in front and lengths=, or a list of prompts .* padded on the "
    for rows, side in ((right, "right"), (left, "left")):
        with pytest.raises(ValueError, match=f"^tokens: {message}{side} with token 2, '<pad>'"):
            generate(model, jnp.asarray(rows), 2, tokenizer=padding)
    found = generate(model, jnp.asarray(right), 2, tokenizer=padding, lengths=jnp.array([3, 2]))
    again = generate(model, [[0, 7, 8], [0, 9]], 2, tokenizer=padding)
    np.testing.assert_array_equal(found.tokens, again.tokens)
    same = {"bos_token": "<pad>", "pad_token": "<pad>"}
    write(tmp_path, byte_level(), **same)
    generate(model, jnp.asarray(left), 2, tokenizer=Tokenizer.load(tmp_path))
