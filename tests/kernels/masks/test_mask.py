"""Rules against Python's integers, up to the last position of 32 bits: pairs, intervals, and the laws of joining."""

import operator

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from energy_attn import masks
from energy_attn.kernels.masks._interval import Interval, interval
from energy_attn.kernels.masks._structure import structure_of
from energy_attn.kernels.masks._visibility import may_meet, meeting, must_meet, reachable, visible
from tests.support.random_rules import blocks, rules, seen, with_batch


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
