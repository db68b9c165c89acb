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
    LlamaConfig,
    ModelDrafter,
    PromptLookup,
    Rope,
    generate,
    score_continuations,
)
from energy_attn.models.generation import _generate
from energy_attn.prefix_tree import PrefixTree, accept_greedy
from tests.support.complaints import refused
from tests.support.llama import build
from tests.support.selection import few

CONFIG = LlamaConfig(13, 16, 24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
SMALL = LlamaConfig(13, 8, 12, num_hidden_layers=1, num_attention_heads=2)
PROMPTS = [[1, 2, 3, 4, 1, 2], [5, 6, 7, 8, 9, 5, 6, 7], [12]]
COUNT = 11


@pytest.fixture(scope="module")
def model():
    return build(CONFIG, scale=0.5)


def whole_of(model):
    """Logits after each token of a text, without a cache; padded to one length, so compiled once."""
    read = jax.jit(lambda tokens: model(tokens).logits)

    def logits(*rows):
        padded = np.zeros((3, 20), np.int32)
        for i, row in enumerate(rows):
            padded[i, : len(row)] = row
        found = np.asarray(read(jnp.asarray(padded)))
        each = [x[: len(row)] for x, row in zip(found, rows, strict=False)]
        return each[0] if len(rows) == 1 else each

    return logits


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


def drafters(model):
    return {
        "none": None,
        "lookup": PromptLookup(ngram=2, candidates=2, length=3),
        "itself": ModelDrafter(model, length=2, nodes=4),
        "another model": ModelDrafter(build(SMALL, seed=5, scale=0.5), length=3, nodes=6),
        "nonsense": Nonsense(),
    }


@pytest.mark.smoke
@pytest.mark.parametrize(
    "name", few(["none", "lookup", "itself", "another model", "nonsense"], "another model")
)
def test_greedy_text_is_that_of_greedy_decoding(name, model, greedy):
    """Token for token, for rows of different lengths; and the counts add up."""
    found = generate(model, PROMPTS, COUNT, drafter=drafters(model)[name])
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


@pytest.mark.full
def test_one_key_gives_one_text(model, whole, greedy):
    """Sampling: the draws do not depend on the drafter, and every token is one that may be drawn."""
    options = {"temperature": 1.3, "top_k": 5, "top_p": 0.95, "key": jax.random.key(3)}
    texts = {
        name: np.asarray(generate(model, PROMPTS, COUNT, drafter=drafter, **options).tokens)
        for name, drafter in drafters(model).items()
        if name in ("none", "itself")
    }
    np.testing.assert_array_equal(texts["itself"], texts["none"])
    for prompt, text in zip(PROMPTS, texts["none"], strict=True):
        logits = whole([*prompt, *text])
        for place, token in enumerate(text, len(prompt)):
            before = logits[place - 1]
            assert (before > before[token]).sum() < 5
    other = generate(model, PROMPTS, COUNT, **{**options, "key": jax.random.key(4)}).tokens
    assert (texts["none"] != other).any(1).all()
    # of a vanishing share of the distribution only the likeliest token remains
    options |= {"top_p": 1e-9, "top_k": 99}
    np.testing.assert_array_equal(generate(model, PROMPTS, COUNT, **options).tokens, greedy)


@pytest.mark.full
def test_samples_have_the_law_of_the_model(model, whole):
    """Pairs of tokens drawn for many rows: their frequencies against exact probabilities."""
    rows, prompt = 4096, PROMPTS[0]

    def law(row):
        logits = whole(row)[-1] / 0.8
        return np.exp(logits - np.logaddexp.reduce(logits))

    first = law(prompt)
    joint = np.array([p * law([*prompt, token]) for token, p in enumerate(first)])
    tokens = jnp.asarray(np.tile(np.array(prompt, np.int32), (rows, 1)))
    lookup = PromptLookup(ngram=1, candidates=2, length=2)
    found = generate(model, tokens, 2, temperature=0.8, key=jax.random.key(9), drafter=lookup)
    counts = np.zeros(joint.shape)
    np.add.at(counts, tuple(np.asarray(found.tokens).T), 1)
    assert np.asarray(found.accepted).sum() > 0
    likely = joint * rows > 5
    wanted = np.append(joint[likely], 1 - joint[likely].sum()) * rows
    seen = np.append(counts[likely], rows - counts[likely].sum())
    chi2 = ((seen - wanted) ** 2 / wanted).sum()
    degrees = len(wanted) - 1
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees), (chi2, degrees)


@pytest.mark.full
def test_rows_stop_by_themselves(model, greedy):
    """A stop token is the last of its row; other rows go on. Nothing is read behind the end."""
    drafts = ModelDrafter(model, length=2, nodes=4)  # accepted paths hold stops, and go on
    for stop in [[int(greedy[0, 4]), int(greedy[1, 2])], *([token] for token in range(13))]:
        among = np.isin(greedy, stop)
        ends = np.where(among.any(1), among.argmax(1) + 1, COUNT)
        want = np.where(np.arange(COUNT) < ends[:, None], greedy, -1)
        # an array of one length, so that all are one program
        found = generate(model, PROMPTS, COUNT, eos_token_id=np.resize(stop, 2), drafter=drafts)
        np.testing.assert_array_equal(found.tokens, want)
        assert found.lengths.tolist() == ends.tolist()
        assert (np.asarray(found.passes) <= ends - 1).all()
    first = generate(model, PROMPTS, COUNT, eos_token_id=int(greedy[0, 0]))
    assert first.lengths[0] == 1 and first.passes[0] == 0


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
    for name, value in ("top_k", 3), ("top_p", 0.5):
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


@pytest.mark.full
@pytest.mark.parametrize("empty", [False, True])
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
    for row, length in [
        (0, 0),
        (1, 9),
        (0, 7),
    ]:  # too short, too long, a token outside the vocabulary
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
    drafter = drafters(model)[name]
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
    heads, width = CONFIG.num_attention_heads, CONFIG.head_dim
    size = 3 * nodes * heads * (width + 2) * 8  # maxima, numerators and denominators in float64
    assert sum(c.bytes for c in sent) == CONFIG.num_hidden_layers * size
    text = compiled["loop"].as_text()
    assert not re.search("callback|outfeed|infeed|send|recv", text.lower())


@pytest.mark.full
def test_inside_jit_on_explicit_axes(model, greedy):
    """A cache made while a program is traced, whose type the steps must keep."""
    mesh = make_mesh((2, 4), explicit=True)
    drafter = drafters(model)["another model"]
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
    model = build(replace(CONFIG, num_hidden_layers=2), scale=0.5)
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
            logits = whole([*prompt, *tokens[:count]])[len(prompt) - 1 :]
            logs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
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
        logits = whole([1, 2, 3, int(tokens[0])])[2:]
        logs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        want = [logs[place, int(token)] for place, token in enumerate(tokens) if token < 13]
        np.testing.assert_allclose(got[: len(want)], want, rtol=1e-9, atol=1e-9)


class Treeless(Wrong):
    def draft(self, text, lengths, state):
        return text, state


def read_one(model):
    return model.read_tree(pack(ones(1, 1, 1)), model.empty_cache(1, 4))


def ones(*shape):
    return np.ones(shape, np.int32)


TOKENS, C, score = ones(1, 3), ones(1, 1, 2), score_continuations


def sampled(model, **options):
    return generate(model, TOKENS, 3, key=jax.random.key(0), **options)


BAD = {
    "TypeError model: wanted an AbstractDecoder": lambda m: generate(None, TOKENS, 3),
    "ValueError max_new_tokens: wanted at least 1, got 0": lambda m: generate(m, TOKENS, 0),
    "TypeError tokens: wanted an integer array": lambda m: generate(m, TOKENS / 1, 3),
    "ValueError tokens: .* got list .* as number 1": lambda m: generate(m, [[1], []], 3),
    "TypeError tokens: .*or a tokenizer= beside text, got list": lambda m: generate(m, ["abc"], 3),
    "ValueError tokens: wanted at least one prompt": lambda m: generate(m, [], 3),
    "ValueError lengths: .*None beside a list": lambda m: generate(m, [[1]], 3, lengths=ones(1)),
    "ValueError lengths: .*at least 1": lambda m: generate(m, TOKENS, 3, lengths=0 * ones(1)),
    "ValueError key: .* at temperature 1.0": lambda m: generate(m, TOKENS, 3, temperature=1.0),
    "ValueError temperature": lambda m: sampled(m, temperature=-1.0),
    "ValueError top_p": lambda m: sampled(m, temperature=1.0, top_p=0.0),
    "TypeError drafter: wanted None or an Abs": lambda m: generate(m, TOKENS, 3, drafter=m),
    "TypeError eos_token_id: wanted a token": lambda m: generate(m, TOKENS, 3, eos_token_id="end"),
    "ValueError eos_token_id: wanted .* of 32 bits": lambda m: generate(
        m, TOKENS, 3, eos_token_id=[2, 2**40]
    ),
    "ValueError eos_token_id: wanted numbers of 32 bits": lambda m: generate(
        m, TOKENS, 3, eos_token_id=np.array([2, 2**40])
    ),
    "ValueError max_new_tokens: wanted": lambda m: generate(m, TOKENS, 2**31 - 1),
    "ValueError max_new_tokens: .*, got .*1099511627776": lambda m: generate(m, TOKENS, 2**40),
    "ValueError tokens: .*, got 13": lambda m: generate(m, [[1, 13, 2]], 3),
    "ValueError tokens: .*, got .*4294967298": lambda m: generate(m, [[1, 2**32 + 2]], 3),
    "ValueError continuations: wanted tokens from 0 to 12": lambda m: score(m, TOKENS, -C),
    "ValueError prompt_lengths: .* 0 to 3": lambda m: score(
        m, TOKENS, C, prompt_lengths=4 * C[0, 0, :1]
    ),
    "TypeError key: wanted a jax.random.key": lambda m: generate(m, TOKENS, 3, key="abc"),
    "ValueError top_k: wanted at least 1": lambda m: generate(m, TOKENS, 3, top_k=-3),
    "TypeError drafter: wanted a PrefixTree": lambda m: jax.eval_shape(
        lambda: generate(m, TOKENS, 3, drafter=Treeless()).tokens
    ),
    r"TypeError tokens: .*\[B, T\] inside": lambda m: jax.jit(lambda x: generate(m, [x], 3))(
        C[0, 0]
    ),
    "ValueError read: wanted the 1 layers of the cache, got 2": lambda m: m.empty_cache(
        1, 4
    ).commit(None, (read := read_one(m))._replace(keys=2 * read.keys, values=2 * read.values)),
    "ValueError parallel": lambda m: generate(m, TOKENS, 3, parallel=SequenceParallel()),
    "ValueError ngram: wanted at least 1": lambda m: PromptLookup(ngram=0),
    "TypeError model: .*AbstractDecoder.* got LlamaConfig": lambda m: ModelDrafter(m.config),
    "ValueError nodes: wanted at least 5, got 4": lambda m: ModelDrafter(m, length=4, nodes=4),
    r"ValueError continuations: .*\(1, M, C\)": lambda m: score(m, TOKENS, ones(2, 3, 4)),
    "TypeError continuations: wanted an integer array": lambda m: score(m, TOKENS, C / 1),
    "ValueError lengths: .*from 0 to 2": lambda m: score(m, TOKENS, C, lengths=5 * ones(1, 1)),
    "ValueError cache.layers": lambda m: m.read_tree(
        PrefixTree.from_beam(ones(2, 1, 1)), m.empty_cache(1, 4)
    ),
    "TypeError read: wanted a TreeOutput": lambda m: m.empty_cache(1, 4).commit(None, None),
}


@pytest.mark.parametrize(("wanted", "call"), BAD.items(), ids=BAD)
def test_bad_input(wanted, call, model, unchecked):
    """A mistake that no error names."""
    with refused(wanted):
        call(model)


def test_rows_over_explicit_axes(model):
    """Types of the loop's own arrays that JAX refuses far from the argument."""
    with jax.set_mesh(make_mesh((2, 4), ("data", "device"), explicit=True)):
        parallel = SequenceParallel("device", batch="data")
        with refused(r"ValueError parallel: wanted batch= over automatic axes .* \('data',\)"):
            generate(model, [[1, 2], [3]], 3, parallel=parallel)
