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

from energy_attn.prefix_tree import (
    PrefixTree,
    accept_greedy,
    accept_sampling,
    pack,
    token_tree,
    tree_from_parents,
    verify,
)
from energy_attn.prefix_tree._accept import longest_chosen_path
from tests.support.complaints import complains
from tests.support.distributions import distribution

B, M, C, V = 2, 4, 3, 3
many = settings(max_examples=100)  # all of one compiled program


@jax.jit
def greedy(beam, lengths, after):
    """Accepted after whole and cut trees, with and without a context; `after` `[B, 81]`: what follows each prefix."""
    found = []
    for capacity in (None, 5):
        tree = pack(beam, lengths=lengths, capacity=capacity)
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
    tree = pack(jnp.asarray([[[1, 1], [2, 1], [0, 1]]]))
    accepted = accept_greedy(tree, jnp.ones((1, 6, 2)))  # after each node, 0 and 1 are as likely
    assert accepted.path.tolist() == [[0, -1]] and accepted.token.tolist() == [0]
    later = pack(jnp.asarray([[[1, 2], [2, 1], [0, 1]]]))
    accepted = accept_greedy(later, jnp.asarray([[[0.0, 1.0, 0.0]] * 6]))
    assert accepted.path.tolist() == [[2, 3]] and accepted.token.tolist() == [1]
    spoilt = accept_greedy(later, jnp.asarray([[[0.0, 1.0, jnp.nan]] * 6]))
    assert spoilt.path.tolist() == [[0, 1]] and spoilt.token.tolist() == [2]


# The distribution of sampling. Words are tuples of tokens; `chances(word)` is the target's distribution of the next.


def target(seed, zeros=False):
    """The distribution of the token after each word, in float64: unrelated from word to word."""
    known = {}

    def chances(word):
        if word not in known:
            rng = np.random.default_rng([seed, len(word), *[token + 1 for token in word]])
            known[word] = distribution(
                rng.standard_normal(V) * 1.5, 1.0, 2 if zeros else None, None
            )
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


def emitted(tree, chances, context):
    """The exact distribution of what is emitted: every choice at every node, weighed by its probability."""
    words, slots = words_of(tree), tree.tokens.shape[1]
    distributions = [chances(word) for word in words] + ([chances(())] if context else [])
    draws = np.array(list(itertools.product(range(V), repeat=len(distributions))), np.int32)
    weights = np.prod([P[draws[:, i]] for i, P in enumerate(distributions)], axis=0)
    choice = np.zeros((len(draws), slots), np.int32)
    choice[:, : len(words)] = draws[:, : len(words)]
    # without a context, as accept_sampling has it: slot 0 is what was drawn
    first = draws[:, -1] if context else np.full(len(draws), int(tree.tokens[0, 0]), np.int32)
    trees = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(draws), *x.shape[1:])), tree)
    path, length, token = map(
        np.asarray, longest_chosen_path(trees, jnp.asarray(choice), jnp.asarray(first))
    )
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
    "beam": lambda: pack(jnp.asarray(BEAM)),
    "roots": lambda: pack(jnp.asarray(ROOTS)),
    "ragged": lambda: pack(jnp.asarray(RAGGED), lengths=jnp.asarray([[3, 2, 3]])),
    "cut": lambda: pack(jnp.asarray(BEAM), capacity=4),
    "choices": lambda: token_tree(CHOICES, jnp.asarray([0]), jnp.asarray(RANKS)),
    "branched": lambda: tree_from_parents(*map(jnp.asarray, BRANCHED), 4),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("zeros", [False, True], ids=["all", "top2"])
def test_lossless(name, zeros):
    """A wrong distribution: the longest of several paths, a rejected draw made again, equal siblings twice."""
    tree, chances = TREES[name](), target(5, zeros)
    begin = (int(tree.tokens[0, 0]),)
    extent = int(tree.depth.max()) + 3
    for context in (False, True):
        found = emitted(tree, chances, context)
        assert abs(sum(found.values()) - 1) < 1e-12
        start = () if context else begin
        assert difference(found, chances, start, extent) <= 1e-12
        assert max(map(len, found)) == extent - 1  # deep paths are accepted at all


def test_choosing_the_longest_root_is_not_lossless():
    """That the enumeration can tell: roots taken as sampled, and the one with the longest path chosen."""
    tree, chances = TREES["roots"](), target(5)
    words = words_of(tree)
    draws = np.array(list(itertools.product(range(V), repeat=len(words))), np.int32)
    weights = np.prod([chances(word)[draws[:, i]] for i, word in enumerate(words)], axis=0)
    choice = np.zeros((len(draws), tree.tokens.shape[1]), np.int32)
    choice[:, : len(words)] = draws
    trees_ = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(draws), *x.shape[1:])), tree)
    path = np.asarray(longest_chosen_path(trees_, jnp.asarray(choice), None).path)
    first = np.array([words[slot][0] for slot in path[:, 0]])
    assert abs(weights[first == 2].sum() - chances(())[2]) > 0.1


def coins(P, Q, rows):
    """The distribution of one token if each drafted row tosses its own coin and the first accepted one is taken."""
    found, left = np.zeros(len(P)), 1.0
    for token in rows:
        accepted = min(1.0, P[token] / Q[token])
        found[token] += left * accepted
        left *= 1 - accepted
    rest = np.maximum(P - Q, 0)
    return found + left * rest / rest.sum()


def test_coins_for_each_row_are_not_lossless():
    """The counter-example: two drafted rows with their own coins never give the third token; ours gives P."""
    P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.3, 0.1])
    rows = np.argsort(-Q)[:2]  # a beam of two: the drafter's likeliest
    np.testing.assert_allclose(coins(P, Q, rows), [5 / 6, 1 / 6, 0], atol=1e-15)
    np.testing.assert_allclose(coins(P, Q, rows), [0.834, 0.166, 0], atol=1e-3)
    tree = pack(jnp.asarray(rows)[None, :, None])
    ours = emitted(tree, lambda word: P, context=True)
    law_of_first = [sum(w for word, w in ours.items() if word[0] == n) for n in range(3)]
    np.testing.assert_allclose(law_of_first, P, atol=1e-15)


@partial(jax.jit, static_argnames=("top_k", "context"))
def sampled(tree, logits, key, temperature, top_k, top_p, context):
    context_logits = logits[:, -1] if context else None
    return accept_sampling(
        tree, logits, key, temperature, top_k, top_p, context_logits=context_logits
    )


@pytest.mark.parametrize("context", [False, True])
def test_draws(context):
    """Draws that nodes or rows share, a distribution without the cuts, or a context's key used for the nodes again."""
    number, tree = 30000, pack(jnp.asarray([[[1, 0, 0], [1, 0, 2], [2, 1, 1]]]))
    rng = np.random.default_rng(418)
    logits = rng.standard_normal((tree.tokens.shape[1], V))
    names = {word: n for n, word in enumerate(words_of(tree))}
    options = 1.7, 2, 0.7

    def chances(word):
        return distribution(logits[names.get(word, -1)], *options)

    want = emitted(tree, chances, context)
    trees_ = jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *x.shape[1:])), tree)
    given = jnp.broadcast_to(jnp.asarray(logits), (number, *logits.shape))
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
    tree = pack(jnp.asarray(ROOTS))
    rng = np.random.default_rng(8)
    logits, context_logits = (jnp.asarray(rng.standard_normal(s)) for s in ((1, 6, V), (1, V)))
    key = jax.random.key(9)
    for context in (None, context_logits):
        best = accept_greedy(tree, logits, context_logits=context)
        cold = verify(tree, logits, key, temperature=1e-30, context_logits=context_logits)
        for x, y in zip(verify(tree, logits, context_logits=context), best, strict=True):
            assert (x == y).all()
    for x, y in zip(cold, best, strict=True):  # a tiny temperature is greedy
        assert (x == y).all()
    options = 0.9, 2, 0.7
    drawn = accept_sampling(tree, logits, key, *options, context_logits=context_logits)
    again = verify(
        tree,
        logits,
        key,
        context_logits=context_logits,
        **dict(zip(("temperature", "top_k", "top_p"), options, strict=True)),
    )
    for x, y in zip(drawn, again, strict=True):
        assert (x == y).all()


def test_several_roots():
    """A root that is chosen for its longer path: right if roots count as sampled, but not a sample itself."""
    tree = pack(jnp.asarray([[[1, 0], [2, 1]]]))
    logits = jax.nn.one_hot(jnp.asarray([[2, 0, 1, 0]]), V, dtype=jnp.float64)
    assert accept_greedy(tree, logits).path.tolist() == [[2, 3]]
    accepted = accept_sampling(tree, logits, jax.random.key(0), top_k=1)
    assert accepted.path.tolist() == [[0, -1]] and accepted.token.tolist() == [2]


def test_empty_trees():
    """A row without candidates: the model's token after the context, or none; not the token of slot 0."""
    tree = pack(jnp.asarray([[[1, 2]], [[1, 2]]]), lengths=jnp.asarray([[0], [2]]), pad_token=1)
    logits, context = jnp.zeros((2, 2, V)).at[..., 2].set(50), jnp.asarray([[0, 9, 0.0]] * 2)
    for accept in (accept_greedy, partial(accept_sampling, key=jax.random.key(0))):
        known = accept(tree, logits, context_logits=context * 9)
        assert known.path.tolist() == [[-1, -1], [0, 1]]
        assert known.length.tolist() == [0, 2] and known.token.tolist() == [1, 2]
        unknown = accept(tree, logits)
        assert unknown.length.tolist() == [0, 2] and unknown.token.tolist() == [-1, 2]


LOGITS = jnp.zeros((1, 6, V), jnp.float32)


def wrong_calls():
    """Refused arguments: the keywords, then the error, the argument, what it got and what was wanted."""
    text = "str 'tree'"
    for change, error, name, got, wanted in (
        ({"tree": "tree"}, TypeError, "tree", text, "PrefixTree"),
        ({"logits": None}, TypeError, "logits", "None", "array"),
        ({"logits": LOGITS.astype(int)}, TypeError, "logits", "int32[1,6,3]", "float32"),
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
    tree = pack(jnp.asarray(ROOTS))
    for function, change, *told in wrong_calls():
        arguments = {"tree": tree, "logits": LOGITS, **change}
        if function is not accept_greedy:
            arguments = {"key": jax.random.key(0), **arguments}
        complains(partial(function, **arguments), *told)
        if isinstance(arguments["logits"], jax.Array):  # the same where arrays are traced

            def traced(logits, function=function, arguments=arguments):
                return function(**{**arguments, "logits": logits})

            complains(partial(jax.eval_shape, traced, arguments["logits"]), *told)
