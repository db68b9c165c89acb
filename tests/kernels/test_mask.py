"""Visible pairs of positions against Python's integers, up to the last position of 32 bits."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from energy_attn.kernels.call._mask import Interval, Rule, interval, may_meet, must_meet, visible

LAST = 2**31 - 1
NEAR = [st.integers(x, x + 6) for x in (0, 2**30 - 3, LAST - 6)]
positions = st.one_of(st.just(-1), *NEAR, st.integers(0, LAST))
sides = st.one_of(st.integers(0, 4), *NEAR, st.integers(0, 2**40))
rules = st.builds(Rule, st.booleans(), st.none() | st.tuples(sides, sides))
blocks = st.lists(positions, min_size=3, max_size=3)


def sees(rule: Rule, query: int, key: int) -> bool:
    """The definition, in integers that do not overflow."""
    left, right = rule.window or (LAST, LAST)
    causal = not rule.is_causal or key <= query
    return min(query, key) >= 0 and causal and query - left <= key <= query + right


@given(rules, blocks, blocks)
def test_positions(rule, queries, keys):
    """A window whose end overflows, and so hides every key; skipped blocks with a visible pair, unmasked blocks with a
    hidden one."""
    query, key = (jnp.asarray(x, jnp.int32) for x in (queries, keys))
    seen = np.asarray([[sees(rule, q, k) for k in keys] for q in queries])
    np.testing.assert_array_equal(visible(rule, query[:, None], key[None]), seen)
    of_queries, of_keys = interval(query), interval(key)
    assert may_meet(rule, of_queries, of_keys) or not seen.any()
    some = Interval(key.min(), key.max())
    assert seen[np.asarray(query) >= 0].all() or not must_meet(rule, of_queries, some)
