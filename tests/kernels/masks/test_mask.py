"""Masks against Python's integers, up to the last position of 32 bits: pairs, intervals, and the laws of joining."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energy_attn import masks
from energy_attn.kernels.masks._abstract import Interval, interval
from energy_attn.kernels.masks._structure import structure_of
from energy_attn.kernels.masks._visibility import may_meet, meeting, must_meet, reachable, visible
from tests.support.arrays import array
from tests.support.random_masks import JOINED, SINGLE, blocks, rules, seen, sees, with_batch


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
