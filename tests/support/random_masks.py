"""Random masks and a few chosen ones, and their definition in Python's integers."""

import functools

import jax
import numpy as np
from hypothesis import strategies as st

from energy_attn import masks
from tests.support.arrays import array

LAST = 2**31 - 1
NEAR = [st.integers(x, x + 6) for x in (0, 2**30 - 3, LAST - 6)]
sides = st.none() | st.one_of(st.integers(0, 4), *NEAR, st.integers(0, 2**40))
lengths = st.integers(0, 9) | st.integers(0, LAST)
tables = st.lists(st.integers(0, 2), max_size=6).map(lambda x: array(x, np.int32))


def near(query, key, step):
    return (query - key) % step == 0


positions = st.one_of(st.just(-1), *NEAR, st.integers(0, LAST))
places = st.permutations([-1, *range(17), 2**31 - 1]).map(lambda x: x[:18])

single = st.one_of(
    st.builds(masks.All),
    st.builds(masks.Causal),
    st.builds(masks.Window, sides, sides),
    st.builds(masks.Prefix, lengths),
    st.builds(masks.Lengths, lengths, queries=st.none() | lengths),
    st.builds(masks.Segments, tables, st.none() | tables),
    st.builds(masks.Spans, tables),
    st.builds(functools.partial(masks.Function, near), st.integers(1, 3)),
)

rules = st.recursive(
    single,
    lambda x: st.one_of(
        st.builds(masks.And, x, x), st.builds(masks.Or, x, x), st.builds(masks.Not, x)
    ),
    max_leaves=4,
)


# Each class, and each way to join: what is asked of many masks of the full suite is asked of these in each run.
TABLE = np.repeat(np.arange(3, dtype=np.int32), (4, 2, 4))
SINGLE = {
    "all": masks.All(),
    "causal": masks.Causal(),
    "window": masks.Window(2, 1),
    "window after": masks.Window(None, 3),
    "window before": masks.Window(0, LAST),
    "prefix": masks.Prefix(3),
    "lengths of keys": masks.Lengths(4),
    "lengths": masks.Lengths(5, queries=2),
    "spans": masks.Spans(TABLE),
}
JOINED = {
    "outside or prefix": ~masks.Window(1, None) | masks.Prefix(2),
    "near or same": (
        (masks.Causal() & masks.Window(6, None)) | (masks.Segments(TABLE) & ~masks.Prefix(2))
    ),
    "images": (masks.Causal() | masks.Spans(TABLE)) & masks.Window(2, None),
    "not both": ~(masks.Lengths(7, queries=5) & masks.Function(near, 2)),
}

blocks = st.lists(positions, min_size=3, max_size=3)


def sees(rule, query: int, key: int) -> bool:
    """Whether a present query sees a present key, in integers that do not overflow."""

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
        case masks.Spans():
            return query < len(rule.first) and rule.first[query] <= key <= rule.last[query]
        case masks.Function():
            return (query - key) % int(rule.parameters[0]) == 0
        case masks.And():
            return sees(rule.first, query, key) and sees(rule.second, query, key)
        case masks.Or():
            return sees(rule.first, query, key) or sees(rule.second, query, key)
        case masks.Not():
            return not sees(rule.mask, query, key)
    raise AssertionError(f"no definition of {rule}")


def seen(rule, queries, keys) -> np.ndarray:
    return np.asarray([[min(q, k) >= 0 and sees(rule, q, k) for k in keys] for q in queries])


def with_batch(rule):
    """A mask whose arrays have a batch axis, as kernels take them."""
    return jax.tree.map(lambda x: array(np.asarray(x)[None]), rule)
