"""Accepted paths: greedy ones against a walk, and the distribution of sampled ones by enumeration of all draws."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from energy_attn.prefix_tree import PrefixTree, accept_greedy, accept_sampling, verify
from energy_attn.prefix_tree._accept import longest_chosen_path
from tests.support.compare import same
from tests.support.complaints import complains
from tests.support.observables import distribution
from tests.support.selection import few

B, M, C, V = 2, 4, 3, 3
many = settings(max_examples=50)  # all of one compiled program


@jax.jit
def greedy(beam, lengths, after):
    """Accepted after whole and cut trees, with and without a context; `after` `[B, 81]`: what follows each prefix."""
    found = []
    for capacity in (None, 5):
        tree = PrefixTree.from_beam(beam, lengths=lengths, capacity=capacity)
        number = prefix_numbers(tree)
        choice = jnp.take_along_axis(after, number, 1)
        logits = jax.nn.one_hot(choice, V)
        found += [
            (tree, accept_greedy(tree, logits)),
            (tree, accept_greedy(tree, logits, context_logits=jax.nn.one_hot(after[:, 0], V))),
        ]
    return found


def prefix_numbers(tree):
    """Each node's prefix as a number in base 4; 0 is the empty one."""
    below = jnp.where(tree.mask, tree.tokens[:, None] + 1, 0)
    power = jnp.where(tree.mask, 4 ** (tree.depth[:, :, None] - tree.depth[:, None]), 0)
    return (below * power).sum(-1, dtype=jnp.int32)


def numbered(prefix):
    return sum((token + 1) * 4 ** (len(prefix) - 1 - i) for i, token in enumerate(prefix))


def longest(tree, beam, lengths, after, context):
    """The candidate that agrees longest with the choices, by reading each from its beginning."""
    best = 0, 0
    for m, row in enumerate(beam.tolist()):
        agreed = 0
        for c in range(int(lengths[m])):
            if tree.unpacker[m, c] < 0:
                break
            chosen = row[c] == after[numbered(row[:c])]
            if not chosen and (c > 0 or context):
                break
            agreed = c + 1
        best = max(best, (agreed, -m))
    agreed, m = best[0], -best[1]
    path = tree.unpacker[m, :agreed].tolist() + [-1] * (C - agreed)
    nothing = agreed == 0 and not context
    return path, agreed, -1 if nothing else int(after[numbered(beam[m, :agreed].tolist())])


@pytest.mark.smoke
@many
@given(
    hnp.arrays(np.int32, (B, M, C), elements=st.integers(0, V - 1)),
    hnp.arrays(np.int32, (B, M), elements=st.integers(0, C)) | st.just(np.full((B, M), C)),
    hnp.arrays(np.int32, (B, 64), elements=st.integers(0, V - 1)),
)
def test_greedy(beam, lengths, after):
    """A path that is broken above, one that ends too early, another among equals, a token from another node."""
    found = jax.device_get(greedy(beam, lengths.astype(np.int32), after))
    for (tree, accepted), context in zip(found, [False, True] * 2, strict=True):
        assert {x.dtype.name for x in accepted} == {"int32"}
        for b in range(B):
            row = PrefixTree(*(x[b] for x in tree))
            want = longest(row, beam[b], lengths[b], after[b], context)
            path, length, token = (x[b].tolist() for x in accepted)
            assert (path, length, token) == want


def test_ties():
    """Of paths of equal length that of the smallest row; of equal logits the smallest token; NaN as `jnp.argmax`."""
    ties = np.asarray([[[1, 1], [2, 1], [0, 1]]]), np.ones(3)  # after each node, all are as likely
    later = np.asarray([[[1, 2], [2, 1], [0, 1]]])
    cases = [ties, (later, np.asarray([0.0, 1.0, 0.0])), (later, np.asarray([0.0, 1.0, np.nan]))]
    accept = jax.jit(lambda beam, logits: accept_greedy(PrefixTree.from_beam(beam), logits))
    found = [accept(beam, np.broadcast_to(logits, (1, 6, 3))) for beam, logits in cases]
    assert [x.path.tolist() for x in found] == [[[0, -1]], [[2, 3]], [[0, 1]]]
    assert [x.token.tolist() for x in found] == [[0], [1], [2]]


# The distribution of sampling. Words are tuples of tokens; `chances(word)` is the target's distribution of the next.


def target(seed, zeros=False):
    """The distribution of the token after each word, in float64: unrelated from word to word."""
    known = {}

    def chances(word):
        if word not in known:
            rng = np.random.default_rng([seed, len(word), *[token + 1 for token in word]])
            logits, top_k = rng.standard_normal(V) * 1.5, 2 if zeros else None
            known[word] = distribution(logits, 1.0, top_k, None)
        return known[word]

    return chances


def probability(chances, word, begun=0):
    return np.prod([chances(word[:i])[word[i]] for i in range(begun, len(word))])


def words_of(tree):
    """The word that ends at each node in use of a tree of one row."""
    found = []
    for n in range(int(tree.size[0])):
        above = int(tree.parent[0, n])
        found.append((*(found[above] if above >= 0 else ()), int(tree.tokens[0, n])))
    return found


# of the trees below, all choices at up to eight nodes: one program
ROWS, SLOTS, LEVELS = V**8, 9, 5


def chosen(tree, choice, first):
    """The paths of many choices in one tree, whose arrays are made as large as those of any other."""

    def padded(x, shape, fill=0):
        larger = np.full(shape, fill, x.dtype)
        larger[tuple(map(slice, x.shape))] = x
        return larger

    def repeated(x, shape, fill):
        return np.broadcast_to(padded(np.asarray(x[0]), shape, fill), (ROWS, *shape))

    shapes = (SLOTS,), (SLOTS, SLOTS), (SLOTS,), (SLOTS,), (SLOTS, LEVELS), ()
    fills = 0, False, 0, -1, -1, 0
    trees = PrefixTree(*map(repeated, tree, shapes, fills))
    choice, first = padded(choice, (ROWS, SLOTS)), padded(first, (ROWS,))
    return jax.device_get(longest_chosen_path(trees, choice, first))


def emitted(tree, chances, context):
    """The exact distribution of what is emitted: every choice at every node, weighed by its probability."""
    words = words_of(tree)
    distributions = [chances(word) for word in words] + ([chances(())] if context else [])
    draws = np.array(list(itertools.product(range(V), repeat=len(distributions))), np.int32)
    weights = np.prod([P[draws[:, i]] for i, P in enumerate(distributions)], axis=0)
    choice = np.zeros((len(draws), SLOTS), np.int32)
    choice[:, : len(words)] = draws[:, : len(words)]
    # without a context, as accept_sampling has it: slot 0 is what was drawn
    first = draws[:, -1] if context else np.full(len(draws), int(tree.tokens[0, 0]), np.int32)
    path, length, token = chosen(tree, choice, first)
    found = {}
    for i, weight in enumerate(weights):
        word = (*(words[path[i, length[i] - 1]] if length[i] else ()), int(token[i]))
        found[word] = found.get(word, 0.0) + weight
    return found


def difference(found, chances, begin, extent):
    """The largest error of the distribution of words of `extent` tokens; the target continues what was emitted."""
    worst = 0.0
    for rest in itertools.product(range(V), repeat=extent - len(begin)):
        word = (*begin, *rest)
        mine = sum(
            weight * probability(chances, word, len(start))
            for start, weight in found.items()
            if word[: len(start)] == start
        )
        worst = max(worst, abs(mine - probability(chances, word, len(begin))))
    return worst


BEAM = [[[0, 1, 2], [0, 2, 2], [0, 1, 1]]]  # the third row's prefix is not the second's
ROOTS = [[[0, 1], [2, 1], [0, 2]]]
RAGGED = [[[1, 0, 0], [1, 0, 2], [1, 1, 1]]]
CHOICES = [(0,), (1,), (2,), (0, 0), (1, 0), (1, 1)]
RANKS = [[[1, 1, 2], [0, 2, 2]]]  # siblings that hold equal tokens, with children under either
BRANCHED = [[0, 2, 2, 1, 0, 1, 2]], [[-1, 0, 0, 1, 2, 2, 3]]  # equal siblings again

TREES = {
    "beam": lambda: PrefixTree.from_beam(jnp.asarray(BEAM)),
    "roots": lambda: PrefixTree.from_beam(jnp.asarray(ROOTS)),
    "ragged": lambda: PrefixTree.from_beam(jnp.asarray(RAGGED), lengths=jnp.asarray([[3, 2, 3]])),
    "cut": lambda: PrefixTree.from_beam(jnp.asarray(BEAM), capacity=4),
    "choices": lambda: PrefixTree.from_choices(CHOICES, jnp.asarray([0]), jnp.asarray(RANKS)),
    "branched": lambda: PrefixTree.from_parents(*map(jnp.asarray, BRANCHED), 4),
}


@pytest.mark.product
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("zeros", [False, True], ids=["all", "top2"])
def test_lossless(name, zeros):
    """A wrong distribution: the longest of several paths, a rejected draw made again, equal siblings twice."""
    tree, chances = jax.device_get(TREES[name]()), target(5, zeros)
    begin = (int(tree.tokens[0, 0]),)
    extent = int(tree.depth.max()) + 3
    for context in (False, True):
        found = emitted(tree, chances, context)
        assert abs(sum(found.values()) - 1) < 1e-12
        start = () if context else begin
        assert difference(found, chances, start, extent) <= 1e-12
        assert max(map(len, found)) == extent - 1  # deep paths are accepted at all


@partial(jax.jit, static_argnames=("top_k", "context"))
def sampled(tree, logits, key, temperature, top_k, top_p, context):
    context_logits = logits[:, -1] if context else None
    options = {"context_logits": context_logits}
    return accept_sampling(tree, logits, key, temperature, top_k, top_p, **options)


@pytest.mark.parametrize("context", few([False, True], True))
def test_draws(context):
    """Draws that nodes or rows share, a distribution without the cuts, or a context's key used for the nodes again."""
    number, beam = 30000, jnp.asarray([[[1, 0, 0], [1, 0, 2], [2, 1, 1]]])
    tree = jax.device_get(PrefixTree.from_beam(beam))
    rng = np.random.default_rng(418)
    logits = rng.standard_normal((tree.tokens.shape[1], V))
    names = {word: n for n, word in enumerate(words_of(tree))}
    options = 1.7, 2, 0.7

    def chances(word):
        return distribution(logits[names.get(word, -1)], *options)

    want = emitted(tree, chances, context)
    trees_ = jax.tree.map(lambda x: np.broadcast_to(x, (number, *x.shape[1:])), tree)
    given = np.broadcast_to(logits, (number, *logits.shape))
    accepted = jax.device_get(sampled(trees_, given, jax.random.key(7), *options, context))
    words, ends = words_of(tree), list(want)
    found = np.array(
        [
            ends.index((*(words[path[n - 1]] if n else ()), int(token)))
            for path, n, token in zip(*accepted, strict=True)
        ]
    )
    P = np.array([want[end] for end in ends])
    assert (P > 0).sum() > 3
    counts = np.zeros((len(P), len(P)))
    np.add.at(counts, (found[::2], found[1::2]), 1)
    expected = np.outer(P, P) * number / 2
    assert (counts[expected == 0] == 0).all()
    often = expected >= 5
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert abs(statistic - often.sum()) < 5 * np.sqrt(2 * often.sum())


def test_verify():
    """Temperature 0 that divides, a key that is not used, a context that is dropped on the way."""
    tree = PrefixTree.from_beam(jnp.asarray(ROOTS))
    rng = np.random.default_rng(8)
    logits, context_logits = (jnp.asarray(rng.standard_normal(s)) for s in ((1, 6, V), (1, V)))
    key, options = jax.random.key(9), {"temperature": 0.9, "top_k": 2, "top_p": 0.7}

    @jax.jit
    def run(tree, logits, context_logits):
        context = {"context_logits": context_logits}
        return (
            [accept_greedy(tree, logits), accept_greedy(tree, logits, **context)],
            [verify(tree, logits), verify(tree, logits, **context)],
            verify(tree, logits, key, temperature=1e-30, **context),
            accept_sampling(tree, logits, key, **options, **context),
            verify(tree, logits, key, **options, **context),
        )

    best, found, cold, drawn, again = run(tree, logits, context_logits)
    same(found, best)
    same(cold, best[1])  # a tiny temperature is greedy
    same(again, drawn)


def test_several_roots():
    """A root that is chosen for its longer path: right if roots count as sampled, but not a sample itself."""

    @jax.jit
    def run(beam, logits):
        tree, key = PrefixTree.from_beam(beam), jax.random.key(0)
        return accept_greedy(tree, logits), accept_sampling(tree, logits, key, top_k=1)

    likeliest, sampled = run(np.asarray([[[1, 0], [2, 1]]]), np.eye(V)[[[2, 0, 1, 0]]])
    assert likeliest.path.tolist() == [[2, 3]]
    assert sampled.path.tolist() == [[0, -1]] and sampled.token.tolist() == [2]


def test_empty_trees():
    """A row without candidates: the model's token after the context, or none; not the token of slot 0."""
    tree = PrefixTree.from_beam(
        jnp.asarray([[[1, 2]], [[1, 2]]]), lengths=jnp.asarray([[0], [2]]), pad_token=1
    )
    logits, context = np.zeros((2, 2, V)), np.asarray([[0, 81, 0.0]] * 2)
    logits[..., 2] = 50

    @jax.jit
    def run(tree, logits, context):
        ways = accept_greedy, partial(accept_sampling, key=jax.random.key(0))
        return [(f(tree, logits, context_logits=context), f(tree, logits)) for f in ways]

    for known, unknown in run(tree, logits, context):
        assert known.path.tolist() == [[-1, -1], [0, 1]]
        assert known.length.tolist() == [0, 2] and known.token.tolist() == [1, 2]
        assert unknown.length.tolist() == [0, 2] and unknown.token.tolist() == [-1, 2]


LOGITS = np.zeros((1, 6, V), np.float32)


def wrong_calls():
    """Refused arguments: the keywords, then the error, the argument, what it got and what was wanted."""
    text = "str 'tree'"
    for change, error, name, got, wanted in (
        ({"tree": "tree"}, TypeError, "tree", text, "PrefixTree"),
        ({"logits": None}, TypeError, "logits", "None", "array"),
        ({"logits": LOGITS.astype(np.int32)}, TypeError, "logits", "int32[1,6,3]", "float32"),
        ({"logits": LOGITS[:, :5]}, ValueError, "logits", "float32[1,5,3]", "(1, 6, V)"),
        ({"logits": LOGITS[0]}, ValueError, "logits", "float32[6,3]", "(1, 6, V)"),
        ({"logits": LOGITS[:, :, :0]}, ValueError, "logits", "float32[1,6,0]", "at least 1"),
        ({"context_logits": LOGITS[:, 0, :2]}, ValueError, "context_logits", "[1,2]", "(1, 3)"),
        ({"context_logits": LOGITS}, ValueError, "context_logits", "[1,6,3]", "(1, 3)"),
        ({"context_logits": [[0.0]]}, TypeError, "context_logits", "list", "array"),
    ):
        for function in (accept_greedy, verify, accept_sampling):
            yield function, change, error, name, got, wanted
    for function in (verify, accept_sampling):
        for change, error, name, got, wanted in (
            ({"temperature": -1.0}, ValueError, "temperature", "-1.0", "above 0"),
            ({"top_k": 0, "temperature": 1.0}, ValueError, "top_k", "0", "at least 1"),
            ({"top_p": 1.5, "temperature": 1.0}, ValueError, "top_p", "1.5", "at most 1"),
            ({"key": 3, "temperature": 1.0}, TypeError, "key", "int 3", "jax.random.key"),
            ({"key": None, "temperature": 1.0}, TypeError, "key", "None", "jax.random.key"),
        ):
            yield function, change, error, name, got, wanted
    yield accept_sampling, {"temperature": 0}, ValueError, "temperature", "0", "above 0"


@pytest.mark.usefixtures("unchecked", "user_settings")
def test_bad_input():
    """Logits of another shape, invalid trees, settings out of range: errors by the argument's name."""
    tree = PrefixTree.from_beam(jnp.asarray(ROOTS))
    for function, change, *told in wrong_calls():
        arguments = {"tree": tree, "logits": LOGITS, **change}
        arrays = {n: jnp.asarray(x) for n, x in arguments.items() if isinstance(x, np.ndarray)}
        arguments |= arrays
        if function is not accept_greedy:
            arguments = {"key": jax.random.key(0), **arguments}
        complains(partial(function, **arguments), *told)
        if isinstance(arguments["logits"], jax.Array):  # the same where arrays are traced

            def traced(logits, function=function, arguments=arguments):
                return function(**{**arguments, "logits": logits})

            complains(partial(jax.eval_shape, traced, arguments["logits"]), *told)
