"""Masks as predicates on positions, and intervals of positions that tell which blocks to skip."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_MOST_BLOCKS = 1024  # blocks of queries that are compared with every key
# The last position, and the largest distance of two. Windows are compared with differences of
# positions, which cannot overflow; the sum of a position and a window might.
_FAR = int(jnp.iinfo(jnp.int32).max)


class Rule(NamedTuple):
    """Which key positions a query position may see; static, hashable.

    Attributes:
        is_causal: keys after the query are hidden.
        window: `(left, right)`: only keys in `[query - left, query + right]` are seen.
    """

    is_causal: bool = False
    window: tuple[int, int] | None = None

    @property
    def constrains(self) -> bool:
        """Whether the rule hides any position."""
        return self.is_causal or self.window is not None

    @property
    def sides(self) -> tuple[int, int]:
        """How far a query sees before and after its own position, at most `_FAR`."""
        left, right = (min(side, _FAR) for side in self.window or (_FAR, _FAR))
        return left, 0 if self.is_causal else right


def visible(rule: Rule, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
    """Which queries see which keys, by position; the arguments broadcast.

    A query or key with a negative position is absent.
    """
    seen = (query >= 0) & (key >= 0)
    if rule.is_causal:
        seen &= key <= query
    if rule.window is not None:
        left, right = (min(side, _FAR) for side in rule.window)
        seen &= (key - query >= -left) & (key - query <= right)
    return seen


class Interval(NamedTuple):
    """The smallest and largest position in each block; blocks without any have `low > high`."""

    low: Int[Array, "..."]
    high: Int[Array, "..."]


def interval(positions: Int[Array, "*blocks block"]) -> Interval:
    """The interval of the positions along the last axis, negative ones excluded."""
    present = positions >= 0
    low = jnp.where(present, positions, _FAR).min(-1, initial=_FAR)
    high = jnp.where(present, positions, -1).max(-1, initial=-1)
    return Interval(low, high)


def may_meet(rule: Rule, query: Interval, key: Interval) -> Bool[Array, "..."]:
    """Whether any query of one block might see any key of another; the intervals broadcast.

    Never false where a pair is visible; may be true where none is.
    """
    meet = (query.low <= query.high) & (key.low <= key.high)
    if rule.is_causal:
        meet &= key.low <= query.high
    if rule.window is not None:
        left, right = (min(side, _FAR) for side in rule.window)
        meet &= (key.high - query.low >= -left) & (key.low - query.high <= right)
    return meet


def must_meet(rule: Rule, query: Interval, key: Interval) -> Bool[Array, "..."]:
    """Whether every present query of one block sees every key of another; the intervals broadcast.

    `key.low` is over all keys of the block, and so negative if any is absent. Never true where a
    pair is hidden; may be false where none is.
    """
    meet = key.low >= 0
    if rule.is_causal:
        meet &= key.high <= query.low
    if rule.window is not None:
        left, right = (min(side, _FAR) for side in rule.window)
        meet &= (key.low - query.high >= -left) & (key.high - query.low <= right)
    return meet


def may_share(query: Interval, key: Interval) -> Bool[Array, "..."]:
    """Whether two blocks of segment ids, given as intervals, might share an id."""
    return (query.low <= key.high) & (key.low <= query.high)


def reachable(rule: Rule, query: Int[Array, "#B T"], key: Int[Array, "#B S"]) -> Bool[Array, "_ S"]:
    """Which keys any query may see.

    Never false where a query does. May be true where none does only under a window, in gaps between
    the positions of successive queries.
    """
    batch, query_len = query.shape
    blocks, block = 1, query_len
    if rule.window is not None and isinstance(query_len, int):  # not a symbol
        blocks = min(query_len, _MOST_BLOCKS)
        block = -(-query_len // blocks)
        query = jnp.pad(query, ((0, 0), (0, blocks * block - query_len)), constant_values=-1)
    low, high = interval(query.reshape(batch, blocks, block))
    own = Interval(key[:, :, None], key[:, :, None])
    queries = Interval(low[:, None, :], high[:, None, :])
    return (key >= 0) & may_meet(rule, queries, own).any(-1)


# positions or segments of queries and of keys, in blocks
Pair = tuple[Int[Array, "#B query_blocks rows"], Int[Array, "#B key_blocks keys"]]


def meeting(
    rule: Rule, positions: Pair | None, segments: Pair | None
) -> Bool[Array, "_ query_blocks key_blocks"] | None:
    """Which blocks of queries might see any key of which blocks of keys; None for all."""
    meet = None
    if positions is not None:
        meet = may_meet(rule, *_facing(*map(interval, positions)))
    if segments is not None:
        share = may_share(*_facing(*(Interval(x.min(-1), x.max(-1)) for x in segments)))
        meet = share if meet is None else meet & share
    return meet


def _facing(queries: Interval, keys: Interval) -> tuple[Interval, Interval]:
    return Interval(*(x[:, :, None] for x in queries)), Interval(*(x[:, None, :] for x in keys))
