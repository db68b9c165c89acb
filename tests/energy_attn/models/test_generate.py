"""Generation: the text is that of the model, with any drafter and on any mesh."""

import re
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.distributed import SequenceParallel, collectives, make_mesh
from energy_attn.models import (
    AbstractDrafter,
    ModelDrafter,
    PromptLookup,
    Rope,
    Tokenizer,
    generate,
    score_continuations,
)
from energy_attn.models.generation import _generate
from energy_attn.prefix_tree import PrefixTree, accept_greedy
from tests.support.complaints import refused
from tests.support.llama import (
    PROMPTS,
    SMALL,
    WRITER,
    build,
    drafter_of,
    log_softmax,
    whole_of,
)
from tests.support.selection import few

COUNT = 11


@pytest.fixture(scope="module")
def model():
    return build(WRITER, scale=0.5)


@pytest.fixture(scope="module")
def whole(model):
    return whole_of(model)


@pytest.fixture(scope="module")
def greedy(whole):
    """Greedy decoding, token by token, each from the whole text."""
    texts = [list(prompt) for prompt in PROMPTS]
    for _ in range(COUNT):
        for text, logits in zip(texts, whole(*texts), strict=True):
            text.append(int(logits[-1].argmax()))
    return np.array([text[-COUNT:] for text in texts])


class Nonsense(AbstractDrafter):
    """Drafts tokens unrelated to the text: two branches, one of them wrong at once."""

    depth: int = 3

    def start(self, tokens, lengths, slots, parallel):
        return jnp.zeros((), jnp.int32)

    def draft(self, text, lengths, state):
        last = jnp.take_along_axis(text, lengths[:, None] - 1, axis=1)
        drawn = (
            last[:, :, None] * 5 + state + jnp.arange(4, dtype=jnp.int32).reshape(1, 2, 2)
        ) % 13
        root = jnp.broadcast_to(last[:, :, None], (len(text), 2, 1))
        return PrefixTree.from_beam(jnp.concatenate([root, drawn], 2), capacity=4), state + 1


@pytest.mark.smoke
@pytest.mark.parametrize(
    "name", few(["none", "lookup", "itself", "another model", "nonsense"], "lookup")
)
def test_greedy_text_is_that_of_greedy_decoding(name, model, greedy):
    """Token for token, for rows of different lengths; and the counts add up."""
    drafter = Nonsense() if name == "nonsense" else drafter_of(name, model)
    found = generate(model, PROMPTS, COUNT, drafter=drafter)
    np.testing.assert_array_equal(found.tokens, greedy)
    assert found.lengths.tolist() == [COUNT] * 3
    passes, drafted, accepted = (np.asarray(x) for x in found[2:5])
    # each pass adds one token to those accepted; the last pass of a text may be cut
    assert ((COUNT - 1 - accepted <= passes) & (passes <= COUNT - accepted)).all()
    assert (accepted <= drafted).all()
    rate = accepted.sum() / max(drafted.sum(), 1)
    np.testing.assert_allclose(found.acceptance_rate, rate, rtol=1e-6)
    np.testing.assert_allclose(found.tokens_per_pass, (COUNT - 1) * 3 / passes.sum(), rtol=1e-6)
    if name == "nonsense":  # four slots, always full, the root one of them
        assert (drafted == 3 * passes).all()
    if name == "none":
        assert passes.tolist() == [COUNT - 1] * 3 and not drafted.any()
    if name == "itself":  # its likeliest child of the root is always right
        assert (passes <= -(-(COUNT - 1) // 2)).all()


def test_a_vanishing_share(model, greedy):
    """Tokens beside the likeliest that `top_p` leaves, or a `top_k` beyond the vocabulary."""
    options = {"temperature": 1.3, "top_k": 99, "top_p": 1e-9, "key": jax.random.key(3)}
    np.testing.assert_array_equal(generate(model, PROMPTS, COUNT, **options).tokens, greedy)


def test_warnings():
    """Options without effect, or positions beyond the model's context, without a warning."""

    def traced(count, model=SMALL, **options):
        model = build(replace(model, max_position_embeddings=6))
        jax.eval_shape(
            lambda model: generate(model, [[1, 2, 3], [4]], count, **options).tokens, model
        )

    traced(3)  # up to the last position, no warning
    with pytest.warns(UserWarning, match="within the 6 positions .* got up to 7"):
        traced(4)
    with pytest.warns(UserWarning, match="within the 9 positions .* got up to 10"):
        traced(7, replace(SMALL, rope_scaling=Rope.linear(1.5)))
    for name, value in ("top_k", 3), ("top_p", 0.5), ("min_p", 0.1):
        with pytest.warns(UserWarning, match=f"{name}: wanted a temperature above 0"):
            traced(2, **{name: value})
    traced(2, top_k=3, top_p=0.5, temperature=1.0, key=jax.random.key(0))


class Wrong(AbstractDrafter):
    """Drafts a tree that does not fit the text: another root, tokens outside the vocabulary, or no nodes."""

    depth: int = 2
    empty: bool = eqx.field(static=True, default=False)

    def start(self, tokens, lengths, slots, parallel):
        return None

    def draft(self, text, lengths, state):
        last = jnp.take_along_axis(text, lengths[:, None] - 1, axis=1)
        beam = jnp.stack([last + 1, jnp.full_like(last, 99)], axis=2)
        lengths = jnp.zeros((len(text), 1), jnp.int32) if self.empty else None
        return PrefixTree.from_beam(beam, lengths=lengths), state


@pytest.mark.parametrize("empty", few([False, True], False))
def test_wrong_drafts_change_nothing(empty, model, greedy):
    """A loop whose passes accept nothing; a NaN of one draft that every node sees."""
    found = generate(model, PROMPTS, COUNT, drafter=Wrong(empty=empty))
    np.testing.assert_array_equal(found.tokens, greedy)
    assert found.passes.tolist() == [COUNT - 1] * 3


def test_wrong_prompts_give_no_text(model, greedy):
    """In a compiled program, where values cannot be refused, bad rows get no tokens and others their own."""
    padded = np.full((3, 8), 99, np.int32)
    for row, prompt in enumerate(PROMPTS):
        padded[row, : len(prompt)] = prompt
    good = jnp.asarray([len(prompt) for prompt in PROMPTS])
    run = jax.jit(lambda tokens, lengths: generate(model, tokens, COUNT, lengths=lengths))
    # too short, too long, a token outside the vocabulary
    for row, length in [(0, 0), (1, 9), (0, 7)]:
        found = run(jnp.asarray(padded), good.at[row].set(length))
        want = greedy.copy()
        want[row] = -1
        np.testing.assert_array_equal(found.tokens, want)
        passes = np.asarray(found.passes)
        assert found.lengths[row] == 0 and passes[row] == 0
        assert (np.delete(passes, row) == COUNT - 1).all() and not np.asarray(found.drafted).any()


@pytest.mark.full
@pytest.mark.parametrize("name", ["none", "lookup", "another model"])
def test_over_a_mesh(name, model, greedy):
    """The same text, and a loop with the communication of plain decoding: no keys, nothing to the host."""
    drafter = drafter_of(name, model)
    parallel = SequenceParallel(merge="allreduce")
    compiled = {}
    run = _generate.run

    def spy(*args):
        compiled["loop"] = run.lower(*args).compile()
        compiled["state"] = args[-1].state
        return compiled["loop"](*args)

    with jax.set_mesh(make_mesh((2, 4))), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_generate, "run", spy)
        found = generate(model, PROMPTS, COUNT, drafter=drafter, parallel=parallel, chunk_size=3)
    np.testing.assert_array_equal(found.tokens, greedy)
    sent = collectives(compiled["loop"])
    assert {c.kind for c in sent} == {"all-reduce"}
    if name == "another model":
        assert compiled["state"].parallel == parallel  # its cache is sharded as well
        return
    nodes = 1 if drafter is None else drafter.capacity
    heads, width = WRITER.num_attention_heads, WRITER.head_dim
    size = 3 * nodes * heads * (width + 2) * 8  # maxima, numerators and denominators in float64
    assert sum(c.bytes for c in sent) == WRITER.num_hidden_layers * size
    text = compiled["loop"].as_text()
    assert not re.search("callback|outfeed|infeed|send|recv", text.lower())


@pytest.mark.full
def test_inside_jit_on_explicit_axes(model, greedy):
    """A cache made while a program is traced, whose type the steps must keep."""
    mesh = make_mesh((2, 4), explicit=True)
    drafter = drafter_of("another model", model)
    with jax.set_mesh(mesh):
        run = jax.jit(
            lambda tokens, lengths: generate(
                model, tokens, 4, lengths=lengths, drafter=drafter, parallel=SequenceParallel()
            )
        )
        found = run(jnp.asarray([[*PROMPTS[0], 0], [*PROMPTS[2], *[0] * 6]]), jnp.asarray([6, 1]))
    np.testing.assert_array_equal(found.tokens, greedy[[0, 2], :4])


@pytest.mark.full
def test_reading_and_writing_a_tree():
    """`read_tree` gives each node the logits of its own text; `commit` writes the accepted path, in each layer."""
    model = build(replace(WRITER, num_hidden_layers=2), scale=0.5)
    whole = whole_of(model)
    beam = np.array(
        [[[2, 3, 4], [2, 3, 5], [2, 6, 3]], [[7, 8, 9], [7, 1, 9], [7, 8, 9]]], np.int32
    )
    prompts = [[1, 2, 3, 4, 1], [5, 6, 7]]
    tokens = jnp.asarray(np.array([prompts[0], [*prompts[1], 0, 0]], np.int32))
    lengths = jnp.asarray([5, 3])
    tree = PrefixTree.from_beam(jnp.asarray(beam), capacity=7)

    @eqx.filter_jit
    def verify(model, tokens, tree):
        cache = model.prefill(tokens, model.empty_cache(2, 16), lengths=lengths).cache
        read = model.read_tree(tree, cache)
        accepted = accept_greedy(tree, read.logits)
        after = cache.commit(accepted, read)
        follow = model(accepted.token[:, None], cache=after)
        return read, accepted, after, follow.logits

    read, accepted, after, logits = verify(model, tokens, tree)
    for row in range(2):
        for candidate, slots in zip(beam[row], np.asarray(tree.unpacker[row]), strict=True):
            want = whole([*prompts[row], *candidate])[len(prompts[row]) :]
            np.testing.assert_allclose(read.logits[row, slots], want, rtol=1e-9, atol=1e-9)
        path = [int(tree.tokens[row, slot]) for slot in accepted.path[row] if slot >= 0]
        text = [*prompts[row], *path, int(accepted.token[row])]
        np.testing.assert_allclose(logits[row, 0], whole(text)[-1], rtol=1e-9, atol=1e-9)
    assert after.lengths.tolist() == (np.array([5, 3]) + np.asarray(accepted.length)).tolist()


def test_prompt_lookup_finds_what_came_before():
    """Against a search in plain Python: the longest ending first, then the latest occurrence."""
    ngram, candidates, length = 3, 3, 4
    lookup = PromptLookup(ngram, candidates, length)
    rng = np.random.default_rng(0)
    text = rng.integers(0, 3, (16, 14)).astype(np.int32)
    lengths = rng.integers(1, 15, 16).astype(np.int32)
    tree, _ = jax.jit(lookup.draft)(jnp.asarray(text), jnp.asarray(lengths), None)

    def prefixes(tree, row):
        return {
            tuple(np.asarray(tree.tokens[row])[np.asarray(tree.mask[row, slot])].tolist())
            for slot in range(int(tree.size[row]))
        }

    for row, (tokens, count) in enumerate(zip(text, lengths, strict=True)):
        known = tokens[:count].tolist()
        places = []
        for place in range(1, count):
            same = 0
            while same < min(ngram, place) and known[place - 1 - same] == known[count - 1 - same]:
                same += 1
            if same:
                places.append((same, place))
        want = {(known[-1],)}
        for _, place in sorted(places, reverse=True)[:candidates]:
            follows = known[place : place + length]
            want |= {(known[-1], *follows[: n + 1]) for n in range(len(follows))}
        assert prefixes(tree, row) == want


@pytest.mark.full
@pytest.mark.parametrize("parallel", [None, SequenceParallel()], ids=["one device", "2×4"])
def test_scores_are_those_of_one_by_one(parallel, model, whole):
    """Shared prefixes, ragged and empty continuations, a prompt of one token, a sharded context."""
    conts = np.random.default_rng(1).integers(0, 3, (3, 5, 4)).astype(np.int32)
    lengths = np.array([[4, 3, 2, 1, 0], [4, 4, 4, 4, 2], [1, 1, 1, 4, 4]], np.int32)
    with jax.set_mesh(make_mesh((2, 4))):
        found = score_continuations(
            model, PROMPTS, jnp.asarray(conts), lengths=jnp.asarray(lengths), parallel=parallel
        )
    for row, prompt in enumerate(PROMPTS):
        for tokens, count, got in zip(conts[row], lengths[row], found[row], strict=True):
            logs = log_softmax(whole([*prompt, *tokens[:count]])[len(prompt) - 1 :])
            want = [logs[place, token] for place, token in enumerate(tokens[:count])]
            np.testing.assert_allclose(got[:count], want, rtol=1e-9, atol=1e-9)
            assert (got[count:] == 0).all()


@pytest.mark.full
def test_scores_of_arrays_with_lengths(model, whole):
    """Lengths of prompts ignored; a token outside the vocabulary that spoils other continuations."""
    prompts = jnp.asarray([[1, 2, 3, 99], [5, 6, 7, 8]], jnp.int32)
    conts = jnp.asarray([[[5, 1], [6, 13], [6, 2]]] * 2, jnp.int32)
    run = jax.jit(
        lambda lengths: score_continuations(model, prompts, conts, prompt_lengths=lengths)
    )
    found = np.asarray(run(jnp.asarray([3, 0])))
    assert np.isnan(found[1]).all() and np.isnan(found[0]).tolist() == [[0, 0], [0, 1], [0, 0]]
    for tokens, got in zip(conts[0], found[0], strict=True):
        logs = log_softmax(whole([1, 2, 3, int(tokens[0])])[2:])
        want = [logs[place, int(token)] for place, token in enumerate(tokens) if token < 13]
        np.testing.assert_allclose(got[: len(want)], want, rtol=1e-9, atol=1e-9)


@pytest.mark.full
def test_stream_is_the_text(model, greedy):
    """All tokens in order, drafted or over a mesh, and the tokens of the prompts that have been read."""
    heard, shown = [], []
    options = {"eos_token_id": int(greedy[1, 4]), "chunk_size": 3, "stream": heard.append}
    options |= {"progress": lambda done, note: shown.append((done, note))}
    drafted = generate(model, PROMPTS, COUNT, drafter=PromptLookup(), **options)
    with jax.set_mesh(make_mesh((2, 4))):
        spread = generate(model, PROMPTS, COUNT, parallel=SequenceParallel(), **options)
    for row, both in enumerate(np.concatenate(heard, 1)):
        text = [x.tokens[row, : x.lengths[row]] for x in (drafted, spread)]
        np.testing.assert_array_equal(both[both >= 0], np.concatenate(text))
    assert int(drafted.lengths[1]) <= 5
    assert shown == [(n / 8, f"{n} of 8 tokens") for n in (2, 5, 8)] * 2


class Treeless(Wrong):
    def draft(self, text, lengths, state):
        return text, state


def ones(*shape):
    return np.ones(shape, np.int32)


TOKENS, C, DEMO = ones(1, 3), ones(1, 1, 2), Tokenizer.load("demo")
DRAW = {"temperature": 1.0, "key": np.zeros(2, np.uint32)}


def text(tokens):
    return {"tokens": tokens, "tokenizer": DEMO}


BAD_OPTIONS = {
    "TypeError model: wanted an AbstractDecoder": {"model": None},
    "ValueError max_new_tokens: wanted at least 1, got 0": {"max_new_tokens": 0},
    "ValueError max_new_tokens: wanted": {"max_new_tokens": 2**31 - 1},
    "ValueError max_new_tokens: .*, got .*1099511627776": {"max_new_tokens": 2**40},
    "TypeError tokens: wanted an integer array": {"tokens": TOKENS / 1},
    "ValueError tokens: .* got list .* as number 1": {"tokens": [[1], []]},
    "TypeError tokens: .*or a tokenizer= beside text, got list": {"tokens": ["abc"]},
    "TypeError tokens: .* tokenizer= beside text, got list": {"tokens": "ab"},
    "ValueError tokens: wanted at least one prompt": {"tokens": []},
    "ValueError tokens: .*, got 13": {"tokens": [[1, 13, 2]]},
    "ValueError tokens: .*, got .*4294967298": {"tokens": [[1, 2**32 + 2]]},
    "ValueError tokens: wanted text, .* got str '' as number 1": text(["a", ""]),
    "TypeError tokens: wanted strings and chats .* got list": text(["a", [1]]),
    r"TypeError messages\[1\]: wanted a mapping": text([{"role": "user", "content": "a"}, "b"]),
    "ValueError lengths: .*None beside a list": {"tokens": [[1]], "lengths": ones(1)},
    "ValueError lengths: .*at least 1": {"lengths": 0 * ones(1)},
    "TypeError tokenizer: wanted None or a Tokenizer, got str": {"tokenizer": "gpt2"},
    "ValueError tokenizer: wanted one with stop=.*, got None": {"stop": "a"},
    "TypeError stop: wanted a string or a sequence": {"stop": [13], "tokenizer": DEMO},
    "ValueError stop: wanted strings that are not empty": {"stop": ["a", ""], "tokenizer": DEMO},
    "TypeError stream: wanted None or a function of tokens, got int 3": {"stream": 3},
    "TypeError progress: wanted True, False, None or a function": {"progress": "yes"},
    "TypeError return_logprobs: wanted True or False": {"return_logprobs": "yes"},
    "TypeError drafter: wanted None or an Abs": {"drafter": print},
    "TypeError eos_token_id: wanted a token": {"eos_token_id": "end"},
    "ValueError eos_token_id: wanted .* of 32 bits": {"eos_token_id": [2, 2**40]},
    "ValueError eos_token_id: wanted numbers of 32 bits": {"eos_token_id": np.array([2, 2**40])},
    "ValueError parallel": {"parallel": SequenceParallel()},
    "ValueError key: .* at temperature 1.0": {"temperature": 1.0},
    "TypeError key: wanted a jax.random.key": {"key": "abc"},
    "ValueError temperature": {**DRAW, "temperature": -1.0},
    "ValueError top_k: wanted at least 1": {"top_k": -3},
    "ValueError top_p": {**DRAW, "top_p": 0.0},
    "TypeError minp: wanted a known option .did you mean min_p": {"minp": 0.5},
    "ValueError min_p: wanted a number above 0 and at most 1": {**DRAW, "min_p": 1.5},
    "ValueError repetition_penalty: wanted a number above 0": {"repetition_penalty": 0.0},
    "ValueError presence_penalty: wanted a finite number": {"presence_penalty": np.inf},
    r"ValueError presence_penalty: wanted shape \(\)": {"presence_penalty": np.ones(2)},
    "ValueError logit_bias: wanted tokens from 0 to 12, got 13": {"logit_bias": {13: 1}},
    r"ValueError logit_bias: wanted shape \(13\)": {"logit_bias": np.ones(3)},
    "ValueError logit_bias: .* below infinity, got nan": {"logit_bias": np.full(13, np.nan)},
    r"ValueError logit_bias\[2\]: wanted a finite number": {"logit_bias": {2: np.inf}},
    "TypeError logit_bias: a token: wanted an integer": {"logit_bias": {"a": 1}},
}


@pytest.mark.parametrize(("wanted", "options"), BAD_OPTIONS.items(), ids=BAD_OPTIONS)
def test_bad_options(wanted, options, model, unchecked):
    """A mistake that no error names."""
    with refused(wanted):
        generate(**{"model": model, "tokens": TOKENS, "max_new_tokens": 3, **options})


def score(model, **options):
    return score_continuations(**{"model": model, "tokens": TOKENS, "continuations": C, **options})


def in_jit(model, **options):
    return jax.jit(lambda x: generate(model, x, 3, **options).tokens)(TOKENS)


def doubled(model):
    cache = model.empty_cache(1, 4)
    read = model.read_tree(PrefixTree.from_beam(ones(1, 1, 1)), cache)
    return cache.commit(None, read._replace(keys=2 * read.keys, values=2 * read.values))


BAD_CALLS = {
    "ValueError tokenizer: wanted none inside of jax.jit, got Tokenizer": lambda m: in_jit(
        m, tokenizer=DEMO
    ),
    "ValueError stream: wanted none inside of jax.jit": lambda m: in_jit(m, stream=print),
    r"TypeError tokens: .*\[B, T\] inside": lambda m: jax.jit(lambda x: generate(m, [x], 3))(
        C[0, 0]
    ),
    "TypeError drafter: wanted a PrefixTree": lambda m: jax.eval_shape(
        lambda: generate(m, TOKENS, 3, drafter=Treeless()).tokens
    ),
    "ValueError continuations: wanted tokens from 0 to 12": lambda m: score(m, continuations=-C),
    r"ValueError continuations: .*\(1, M, C\)": lambda m: score(m, continuations=ones(2, 3, 4)),
    "TypeError continuations: wanted an integer array": lambda m: score(m, continuations=C / 1),
    "ValueError lengths: .*from 0 to 2": lambda m: score(m, lengths=5 * ones(1, 1)),
    "ValueError prompt_lengths: .* 0 to 3": lambda m: score(m, prompt_lengths=4 * ones(1)),
    "ValueError ngram: wanted at least 1": lambda m: PromptLookup(ngram=0),
    "TypeError model: .*AbstractDecoder.* got LlamaConfig": lambda m: ModelDrafter(m.config),
    "ValueError nodes: wanted at least 5, got 4": lambda m: ModelDrafter(m, length=4, nodes=4),
    "ValueError cache.layers": lambda m: m.read_tree(
        PrefixTree.from_beam(ones(2, 1, 1)), m.empty_cache(1, 4)
    ),
    "TypeError read: wanted a TreeOutput": lambda m: m.empty_cache(1, 4).commit(None, None),
    "ValueError read: wanted the 1 layers of the cache, got 2": doubled,
}


@pytest.mark.parametrize(("wanted", "call"), BAD_CALLS.items(), ids=BAD_CALLS)
def test_bad_calls(wanted, call, model, unchecked):
    """A mistake that no error names."""
    with refused(wanted):
        call(model)


def test_rows_over_explicit_axes(model):
    """Types of the loop's own arrays that JAX refuses far from the argument."""
    with jax.set_mesh(make_mesh((2, 4), ("data", "device"), explicit=True)):
        parallel = SequenceParallel("device", batch="data")
        with refused(r"ValueError parallel: wanted batch= over automatic axes .* \('data',\)"):
            generate(model, [[1, 2], [3]], 3, parallel=parallel)
