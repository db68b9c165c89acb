"""Masks against Python's integers, up to the last position of 32 bits: pairs, intervals, the laws of joining, and what
kernels that compare numbers of tokens make of them.

The masks of `support/masks.py`, their gradients and tangents go through these kernels in `test_local_attention.py` and
`test_tangents.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from energy_attn import masks
from energy_attn.kernels import local_attention
from energy_attn.kernels.internal import explain, may_meet, tried
from energy_attn.kernels.masks import Interval
from energy_attn.kernels.masks._structure import pairwise, structure_of
from energy_attn.kernels.masks._visibility import interval, meeting, must_meet, reachable, visible
from tests.kernels.derivatives import check_dense
from tests.support.arrays import array
from tests.support.problems import _make, call_of
from tests.support.random_masks import (
    JOINED,
    SINGLE,
    blocks,
    places,
    rules,
    seen,
    sees,
    with_batch,
)
from tests.support.traits import SMALL

KERNELS = [SMALL["pallas_gpu"], SMALL["pallas_tpu"]]


@given(rules, blocks, blocks)
def test_positions(rule, queries, keys):
    """A window whose end overflows, and so hides every key; skipped blocks with a visible pair, unmasked blocks with a
    hidden one, by any composition of masks; `~` that shows absent tokens."""
    query, key = (array(x, np.int32)[None] for x in (queries, keys))
    exact, rule = seen(rule, queries, keys), with_batch(rule)
    np.testing.assert_array_equal(visible(rule, query[:, :, None], key[:, None])[0], exact)
    of_queries, of_keys = interval(query), interval(key)
    assert may_meet(rule, of_queries, of_keys).all() or not exact.any()
    some = Interval(key.min(-1), key.max(-1))
    all_seen = exact[np.asarray(queries) >= 0].all()
    assert all_seen or not must_meet(rule, of_queries, some).any()


@pytest.mark.parametrize("name", SINGLE | JOINED)
def test_intervals(name):
    """A block with a hidden pair that is told to need no mask, or one that is skipped with a visible pair; simple masks
    tell exactly: no block of theirs is computed in vain."""
    rule = (SINGLE | JOINED)[name]
    pairs = np.asarray([[sees(rule, i, j) for j in range(8)] for i in range(8)])
    low, high = np.triu_indices(8)
    queries = Interval(array(low[:, None], np.int32), array(high[:, None], np.int32))
    keys = Interval(array(low[None], np.int32), array(high[None], np.int32))
    ends = [slice(i, j + 1) for i, j in zip(low, high, strict=True)]
    cut = [[pairs[i, j] for j in ends] for i in ends]
    some, all_ = (np.asarray([[f(x) for x in row] for row in cut]) for f in (np.any, np.all))
    told = (np.broadcast_to(x, some.shape) for x in ask(rule, queries, keys))
    any_visible, all_visible = map(np.asarray, told)
    assert not (some & ~any_visible).any() and not (all_visible & ~all_).any()
    if name in SINGLE:
        np.testing.assert_array_equal(any_visible, some)
        np.testing.assert_array_equal(all_visible, all_)


def ask(rule, queries, keys):
    return rule.any_visible(queries, keys), rule.all_visible(queries, keys)


@pytest.mark.parametrize("name", ["near or same", "not both"])
def test_blocks_with_a_visible_pair(name):
    """A key that a query sees in a block that is not read; or, by a table, a block that is read and shows nothing."""
    check_blocks(JOINED[name], [3, -1, 0, 5], [0, 1, 2, 3, 4, -1, 7, 9, 2**31 - 1])


@pytest.mark.full
@given(rules, blocks, blocks)
def test_blocks_of_many_rules(rule, queries, keys):
    """The same."""
    check_blocks(rule, queries, keys)


def check_blocks(rule, queries, keys):
    query, key = (array(x, np.int32)[None] for x in (queries, keys))
    exact, rule = seen(rule, queries, keys), with_batch(rule)

    @jax.jit
    def found(rule, query, key):
        return meeting(rule, (query[:, None], key[:, None]), None), reachable(rule, query, key)

    meets, reached = map(np.asarray, found(rule, query, key))
    assert meets.all() or not exact.any()
    assert not (exact.any(0) & ~reached[0]).any()
    if not isinstance(rule, (masks.All, masks.Causal, masks.Window)):
        np.testing.assert_array_equal(reached[0], exact.any(0))


present = st.lists(st.integers(0, 7), min_size=3, max_size=3)


@given(rules, rules, present, present)
@settings(max_examples=6)
def test_de_morgan(first, second, queries, keys):
    """Joined masks whose intervals break the laws that their pairs keep."""
    query, key = array(queries, np.int32)[:, None], array(keys, np.int32)[None]
    of_queries, of_keys = (Interval(x.min(), x.max()) for x in (query, key))
    for mine, theirs in (
        (~(first & second), ~first | ~second),
        (~(first | second), ~first & ~second),
        (~~first, first),
    ):
        np.testing.assert_array_equal(mine.visible(query, key), theirs.visible(query, key))
        for one, other in zip(*(ask(x, of_queries, of_keys) for x in (mine, theirs)), strict=True):
            assert bool(one) == bool(other), mine


def test_one_structure_for_all_numbers():
    """A prefix of another length that is another program, or another mask that is not."""
    same = {structure_of(masks.Causal() | masks.Prefix(n)) for n in (3, 4, jnp.int32(5))}
    assert len(same) == 1
    others = {structure_of(masks.Causal() & masks.Prefix(3)), structure_of(~masks.Prefix(3))}
    assert not same & others and len(others) == 2


def test_joined_masks_keep_their_names_and_take_fields():
    """A method of `~mask` under the name of the opposite one; a subclass whose own field is asked as a mask is."""

    class Named(masks.And):
        label: str = "near"

    for name in ("visible", "any_visible", "all_visible"):
        assert getattr(masks.Not, name).__name__ == name
    near = Named(masks.Causal(), masks.Window(1, None))
    np.testing.assert_array_equal(
        near.visible(jnp.array([[2]]), jnp.arange(4)[None]), [[False, True, True, False]]
    )


@pytest.mark.smoke
@given(rules, blocks, blocks)
@settings(max_examples=6)
def test_numbers_of_tokens(rule, queries, keys):
    """What is known of a query taken for what is known of a key, or a table that is read at a wrong place."""
    arrays = tuple(jax.tree.leaves(with_batch(rule)))
    pairs = pairwise(structure_of(with_batch(rule)), arrays)
    assert pairs.problem is None
    query, key = (array(np.asarray(x)[None], np.int32) for x in (queries, keys))
    features = pairs.features(arrays, query, key)
    assert (len(features.queries), len(features.keys)) == (pairs.of_queries, pairs.of_keys)
    for turned in (False, True):  # keys in front
        i, j = (1, 2) if turned else (2, 1)
        found = pairs.visible(
            jnp.expand_dims(query, i),
            jnp.expand_dims(key, j),
            [jnp.expand_dims(x, i) for x in features.queries],
            [jnp.expand_dims(x, j) for x in features.keys],
        )
        found = np.broadcast_to(found, (1, 3, 3))[0]
        np.testing.assert_array_equal(found.T if turned else found, seen(rule, queries, keys))


def test_only_comparisons_are_of_pairs():
    """A table of segments, or a length, that is read for each pair."""
    rule = masks.Causal() | (masks.Segments(np.zeros(8, np.int32)) & masks.Prefix(3))
    pairs = pairwise(*_split(rule))
    assert (pairs.of_queries, pairs.of_keys) == (2, 3)  # id, inside; id, inside, below the length
    window = pairwise(*_split(masks.Causal() & masks.Window(3, 2)))
    assert (window.of_queries, window.of_keys) == (0, 0)
    remainder = pairwise(*_split(masks.Function(lambda query, key: (query - key) % 5 == 0)))
    assert (remainder.of_queries, remainder.of_keys) == (0, 0)  # 5 is a constant of the kernel


def test_a_choice_of_booleans():
    """The other of two booleans, of which compilers of kernels select none."""
    rule = masks.Function(lambda q, k: jnp.where(q > k, (q - k) % 2 == 0, k < 5))
    pairs, tokens = pairwise(*_split(rule)), array(np.arange(8)[None], np.int32)
    assert pairs.problem is None
    of_queries, of_keys = pairs.features((), tokens, tokens)
    found = pairs.visible(
        tokens[:, :, None],
        tokens[:, None],
        [x[:, :, None] for x in of_queries],
        [x[:, None] for x in of_keys],
    )
    q, k = np.ogrid[:8, :8]
    np.testing.assert_array_equal(found[0], np.where(q > k, (q - k) % 2 == 0, k < 5))


def _split(rule):
    rule = with_batch(rule)
    return structure_of(rule), tuple(jax.tree.leaves(rule))


def of_both(query, key, table):
    return table[query % 4, key % 4]


def of_rows(query, key, table):
    return (table[query % 2] == key[..., None]).any(-1)


def of_twenty(query, key):
    return functools.reduce(jnp.logical_or, [query % i == key for i in range(2, 22)])


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (masks.Function(of_both, np.ones((4, 4), bool)), "the operation concatenate of both"),
        (masks.Function(lambda q, k: jnp.sin(q - k) > 0), "got float32"),
        (masks.Function(of_rows, np.ones((2, 3), np.int32)), "the operation reduce_or of both"),
        (masks.Function(of_twenty), "at most 16 numbers, got 20"),
    ],
)
def test_declined(rule, reason):
    """A mask whose program a kernel's compiler refuses, or that it computes wrongly, in place of one that declines."""
    x = array(np.ones((1, 8, 1, 16)), np.float32)
    call = call_of(x, x, x, mask=rule)
    for kernel in KERNELS:
        with pytest.raises(NotImplementedError, match=rf"^mask: wanted .*{reason}.*blockwise"):
            kernel.check(call)
    for platform in ("cuda", "tpu"):
        chosen = explain(tried(), call.settings, call.operands, platform)
        assert chosen.name == "reference"  # XLA's operations


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda x: x.name)
def test_a_composition(kernel):
    """A tile that is skipped or not masked, forward, backward or along a direction; absent tokens that are seen."""
    places = [*range(8), -1, *range(8, 16), 2**31 - 1]
    check_composition(kernel, JOINED["near or same"], places, places)


@pytest.mark.full
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda x: x.name)
@given(rule=rules, queries=places, keys=places)
@settings(max_examples=25, phases=[Phase.generate])
def test_many_compositions(kernel, rule, queries, keys):
    """The same."""
    check_composition(kernel, rule, queries, keys)


def check_composition(kernel, rule, queries, keys):
    problem = _make("composition", B=1, T=18, S=18, N=2, K=1, H=4)
    positions = (array(np.asarray(x)[None], np.int32) for x in (queries, keys))
    options = dict(zip(("query_positions", "key_positions"), positions, strict=True))
    options |= {"mask": rule, "implementation": kernel}
    mask = seen(rule, queries, keys)[None, None]
    masked = functools.partial(dataclasses.replace, mask=mask)
    check_dense(lambda x: local_attention(**x, **options), problem, np.float32, 4e-6, judge=masked)
