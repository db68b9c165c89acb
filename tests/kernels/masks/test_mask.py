"""Rules against Python's integers, up to the last position of 32 bits: pairs, intervals, and the laws of joining."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from energy_attn import masks
from energy_attn.kernels.masks._interval import Interval, interval
from energy_attn.kernels.masks._structure import structure_of
from energy_attn.kernels.masks._visibility import may_meet, meeting, must_meet, reachable, visible

LAST = 2**31 - 1
NEAR = [st.integers(x, x + 6) for x in (0, 2**30 - 3, LAST - 6)]
positions = st.one_of(st.just(-1), *NEAR, st.integers(0, LAST))
sides = st.none() | st.one_of(st.integers(0, 4), *NEAR, st.integers(0, 2**40))
lengths = st.integers(0, 9) | st.integers(0, LAST)
tables = st.lists(st.integers(0, 2), max_size=6).map(lambda x: jnp.asarray(x, jnp.int32))


def near(query, key, step):
    return (query - key) % step == 0


single = st.one_of(
    st.builds(masks.All),
    st.builds(masks.Causal),
    st.builds(masks.Window, sides, sides),
    st.builds(masks.Prefix, lengths),
    st.builds(masks.Lengths, lengths, st.none() | lengths),
    st.builds(masks.Segments, tables, st.none() | tables),
    st.builds(functools.partial(masks.Function, near), st.integers(1, 3)),
)
rules = st.recursive(
    single,
    lambda x: st.one_of(
        st.builds(masks.And, x, x), st.builds(masks.Or, x, x), st.builds(masks.Not, x)
    ),
    max_leaves=4,
)
blocks = st.lists(positions, min_size=3, max_size=3)


def sees(rule, query: int, key: int) -> bool:
    """The definition, in integers that do not overflow, of present tokens."""

    def id_of(ids, position):
        return int(ids[position]) if position < len(ids) else None

    match rule:
        case masks.All():
            return True
        case masks.Causal():
            return key <= query
        case masks.Window():
            left, right = (2**50 if x is None else x for x in (rule.left, rule.right))
            return query - left <= key <= query + right
        case masks.Prefix():
            return key < int(rule.length)
        case masks.Lengths():
            return key < int(rule.keys) and (rule.queries is None or query < int(rule.queries))
        case masks.Segments():
            mine = id_of(rule.query_ids, query)
            theirs = id_of(rule.query_ids if rule.key_ids is None else rule.key_ids, key)
            return mine is not None and mine == theirs
        case masks.Function():
            return (query - key) % int(rule.parameters[0]) == 0
        case masks.And():
            return sees(rule.first, query, key) and sees(rule.second, query, key)
        case masks.Or():
            return sees(rule.first, query, key) or sees(rule.second, query, key)
        case masks.Not():
            return not sees(rule.rule, query, key)
    raise AssertionError(f"no definition of {rule}")


def seen(rule, queries, keys) -> np.ndarray:
    return np.asarray([[min(q, k) >= 0 and sees(rule, q, k) for k in keys] for q in queries])


def with_batch(rule):
    """Arrays with an axis of the batch, as kernels take them."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], rule)


@given(rules, blocks, blocks)
def test_positions(rule, queries, keys):
    """A window whose end overflows, and so hides every key; skipped blocks with a visible pair, unmasked blocks with a
    hidden one, by any composition of rules; `~` that shows absent tokens."""
    query, key = (jnp.asarray(x, jnp.int32)[None] for x in (queries, keys))
    exact, rule = seen(rule, queries, keys), with_batch(rule)
    np.testing.assert_array_equal(visible(rule, query[:, :, None], key[:, None])[0], exact)
    of_queries, of_keys = interval(query), interval(key)
    assert may_meet(rule, of_queries, of_keys).all() or not exact.any()
    some = Interval(key.min(-1), key.max(-1))
    all_seen = exact[np.asarray(queries) >= 0].all()
    assert all_seen or not must_meet(rule, of_queries, some).any()
    blocked = query[:, None], key[:, None]
    assert meeting(rule, blocked, None).all() or not exact.any()
    found = np.asarray(reachable(rule, query, key))[0]
    assert not (exact.any(0) & ~found).any()
    if not isinstance(rule, (masks.All, masks.Causal, masks.Window)):
        np.testing.assert_array_equal(found, exact.any(0))


present = st.lists(st.integers(0, 7), min_size=3, max_size=3)


@given(rules, rules, present, present)
def test_de_morgan(first, second, queries, keys):
    """Joined rules whose intervals break the laws that their pairs keep."""
    query, key = jnp.asarray(queries, jnp.int32)[:, None], jnp.asarray(keys, jnp.int32)[None]
    of_queries, of_keys = (Interval(x.min(), x.max()) for x in (query, key))
    for mine, theirs in (
        (~(first & second), ~first | ~second),
        (~(first | second), ~first & ~second),
        (~~first, first),
    ):
        np.testing.assert_array_equal(mine.visible(query, key), theirs.visible(query, key))
        for name in ("any_visible", "all_visible"):
            found = (getattr(x, name)(of_queries, of_keys) for x in (mine, theirs))
            assert operator.eq(*map(bool, found)), (name, mine)


def test_one_structure_for_all_numbers():
    """A prefix of another length that is another program, or another rule that is not."""
    same = {structure_of(masks.Causal() | masks.Prefix(n)) for n in (3, 4, jnp.int32(5))}
    assert len(same) == 1
    others = {structure_of(masks.Causal() & masks.Prefix(3)), structure_of(~masks.Prefix(3))}
    assert not same & others and len(others) == 2
