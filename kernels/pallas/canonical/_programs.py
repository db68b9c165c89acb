"""What a kernel computes of a tile and a tile of the other side, and how such items are joined.

Tiles are `[rows, width]`; numbers of each row or key are `[1, rows]`, and within an item `[rows, 1]`. Scores are
`[own, other]`. A program is the same text for calls of all lengths: none of these functions is given one.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from ...call._state import holds_keys, safe_shift, unfused
from ..tile_program._dot import dot
from ._scores import Pairs, Scores

Blocks = dict[str, Any]
Item = tuple[Array, ...]


class Result(NamedTuple):
    """A result: `[own, width]`, or a number of each if that is None."""

    width: int | None
    dtype: DTypeLike


class Program(NamedTuple):
    """A fold of one item for each tile of the other side.

    Attributes:
        name: of the kernel.
        term: the item of two tiles and of their pairs, added to one before it in the same leaf, if any.
        join: that of two items; joining `identity` changes no bit.
        finish: the results, of the own tile and of the folded item.
        identity: the numbers that fill the item of nothing.
        widths: of the arrays of an item.
        results: their types.
        to_items: results are items, of which those of absent rows are anything.
        of_items: tiles of the other side are such results.
    """

    name: str
    term: Callable[..., Item]
    join: Callable[[Item, Item], Item]
    finish: Callable[[Blocks, Item], tuple[Array, ...]]
    identity: tuple[float, ...]
    widths: tuple[int, ...]
    results: tuple[Result, ...]
    to_items: bool = False
    of_items: bool = False


def softmax(scores: Scores, width: int, dtype: DTypeLike) -> Program:
    """The state `(out, lse)` of rows: softmaxes over keys, as maximum, total and weighed values, and their sink."""

    def term(rows: Blocks, keys: Blocks, pairs: Pairs, before: Item | None = None) -> Item:
        raw = dot(rows["query"], keys["key"], (1, 1)) * scores.scale
        found = scores.masked(raw, rows, pairs)
        maximum = found.max(-1, keepdims=True)
        if before is not None:
            maximum = jnp.maximum(maximum, before[0])
        weights = jnp.exp(found - safe_shift(maximum))
        value = keys["value"]
        sums = weights.sum(-1, keepdims=True), dot(weights.astype(value.dtype), value, (1, 0))
        if before is not None:
            decay = _decay(before[0], maximum)
            sums = before[1] * decay + sums[0], before[2] * decay + sums[1]
        return maximum, *sums

    def finish(rows: Blocks, item: Item) -> tuple[Array, ...]:
        if "sink" in rows:
            sink = rows["sink"].T
            item = join_softmax(item, (sink, jnp.ones_like(sink), jnp.zeros_like(item[2])))
        maximum, total, weighed = item
        empty = total == 0
        total = jnp.where(empty, 1.0, total)
        # the score of a finite product may overflow
        total = jnp.where(maximum == jnp.inf, jnp.nan, total)
        out = jnp.where(empty, 0.0, weighed / total)
        lse = jnp.where(empty, -jnp.inf, maximum + unfused(jnp.log(total)))
        return without_signs(out), lse.T

    results = Result(width, dtype), Result(None, jnp.float32)
    return Program(
        "softmax", term, join_softmax, finish, (-jnp.inf, 0.0, 0.0), (1, 1, width), results
    )


def join_softmax(a: Item, b: Item) -> Item:
    """The softmax over both; exactly one of them where the other is over nothing."""
    maximum = jnp.maximum(a[0], b[0])
    x, y = _decay(a[0], maximum), _decay(b[0], maximum)
    # each rounded, so that a node has the same bits in all kernels
    return maximum, *(unfused(p * x) + unfused(q * y) for p, q in zip(a[1:], b[1:], strict=True))


def _decay(old: Array, new: Array) -> Array:
    """By what sums over a maximum are multiplied for a new one, exactly 1 where it is the same."""
    at_most = jnp.where(holds_keys(old), jnp.exp(old - safe_shift(new)), 0.0)
    return jnp.where(old == new, 1.0, at_most)


def _as_it_is(own: Blocks, item: Item) -> tuple[Array, ...]:
    """An item as it is, of which numbers are turned."""
    del own
    return tuple(x.T if x.shape[1] == 1 else x for x in item)


def _as_item(own: Blocks, other: Blocks, pairs: None) -> Item:
    """The item that a tile of the other side holds, by `_as_it_is`."""
    del own, pairs
    return tuple(x.T if x.shape[0] == 1 else x for x in other.values())


def of_part(program: Program) -> Program:
    """A program whose results are the items of parts of a fold, as they are."""
    results = tuple(Result(None if n == 1 else n, jnp.float32) for n in program.widths)
    name = f"{program.name}_leaves"
    return program._replace(name=name, finish=_as_it_is, results=results, to_items=True)


def of_parts(program: Program) -> Program:
    """The same program, of what `of_part` returns in place of tiles of the other side."""
    return program._replace(name=f"{program.name}_parts", term=_as_item, of_items=True)


def to_queries(scores: Scores, width: int) -> Program:
    """The gradient of queries: sums over their keys."""

    def term(rows: Blocks, keys: Blocks, pairs: Pairs, before: Item | None = None) -> Item:
        query, d_out, lse, delta = _backward(rows)
        raw = dot(query, keys["key"], (1, 1)) * scores.scale
        found, pullback = scores.with_pullback(raw, rows, pairs)
        weights = jnp.exp(found - lse)
        change = pullback(weights * (dot(d_out, keys["value"], (1, 1)) - delta))
        return _added(before, (dot(change.astype(keys["key"].dtype), keys["key"], (1, 0)),))

    def finish(rows: Blocks, item: Item) -> tuple[Array, ...]:
        del rows
        return (without_signs(item[0] * scores.scale),)

    return Program(
        "to_queries", term, _add, finish, (0.0,), (width,), (Result(width, jnp.float32),)
    )


def to_keys(scores: Scores, widths: Sequence[int]) -> Program:
    """The gradients of keys and values: sums over queries."""

    def term(keys: Blocks, rows: Blocks, pairs: Pairs, before: Item | None = None) -> Item:
        query, d_out, lse, delta = _backward(rows)
        raw = dot(keys["key"], query, (1, 1)) * scores.scale
        found, pullback = scores.with_pullback(raw, rows, pairs)
        weights = jnp.exp(found - lse.T)
        change = pullback(weights * (dot(keys["value"], d_out, (1, 1)) - delta.T))
        to_value = dot(weights.astype(d_out.dtype), d_out, (1, 0))
        return _added(before, (dot(change.astype(query.dtype), query, (1, 0)), to_value))

    def finish(keys: Blocks, item: Item) -> tuple[Array, ...]:
        del keys
        return without_signs(item[0] * scores.scale), without_signs(item[1])

    results = tuple(Result(width, jnp.float32) for width in widths)
    return Program("to_keys", term, _add, finish, (0.0, 0.0), tuple(widths), results)


def along(scores: Scores, width: int, dtype: DTypeLike) -> Program:
    """The tangent of the state, in directions `d_query`, `d_key` and `d_value`, of which some may not be there."""

    def term(rows: Blocks, keys: Blocks, pairs: Pairs, before: Item | None = None) -> Item:
        lse = rows["lse"].T
        some = holds_keys(lse)
        query, value = _kept(rows["query"], some), keys["value"]
        raw = dot(query, keys["key"], (1, 1)) * scores.scale
        weights = jnp.exp(scores.masked(raw, rows, pairs) - jnp.where(some, lse, jnp.inf))
        moves = []
        if "d_query" in rows:
            moves.append(dot(rows["d_query"], keys["key"], (1, 1)))
        if "d_key" in keys:
            moves.append(dot(query, keys["d_key"], (1, 1)))
        found = []
        energy = jnp.zeros_like(lse)
        if moves:
            change = sum(moves[1:], moves[0]) * scores.scale
            change = weights * scores.along(raw, change, rows, pairs)
            energy = change.sum(-1, keepdims=True)
            found.append(dot(change.astype(value.dtype), value, (1, 0)))
        if "d_value" in keys:
            found.append(dot(weights.astype(value.dtype), keys["d_value"], (1, 0)))
        out = sum(found[1:], found[0]) if found else jnp.zeros((len(lse), width), jnp.float32)
        return _added(before, (out, energy, weights.sum(-1, keepdims=True)))

    def finish(rows: Blocks, item: Item) -> tuple[Array, ...]:
        lse = rows["lse"].T
        some, (_, energy, total) = holds_keys(lse), item
        if "sink" in rows:
            weight = jnp.exp(rows["sink"].T - jnp.where(some, lse, jnp.inf))
            total += weight
            if "d_sink" in rows:
                energy += unfused(weight * rows["d_sink"].T)
        total = jnp.where(total == 0, 1.0, total)
        energy = energy / total
        # each rounded, also where XLA:CPU fuses what the kernel is interpreted as
        out = unfused(item[0] / total) - unfused(energy * rows["out"].astype(jnp.float32))
        out, energy = (without_signs(jnp.where(some, x, 0.0)) for x in (out, energy))
        return out, energy.T

    results = Result(width, dtype), Result(None, jnp.float32)
    return Program("tangent", term, _add, finish, (0.0, 0.0, 0.0), (width, 1, 1), results)


def is_below(low: Array, high: Array) -> Array:
    """Whether the highest bit of a number is below that of another."""
    return (low < high) & (low < (low ^ high))


def without_signs(x: Array) -> Array:
    """`x` with all zeros positive, as a sum with more zeros in it may be."""
    return jnp.where(x == 0, 0.0, x)


def _add(a: Item, b: Item) -> Item:
    return tuple(map(operator.add, a, b))


def _added(before: Item | None, item: Item) -> Item:
    return item if before is None else _add(before, item)


def _backward(rows: Blocks) -> tuple[Array, Array, Array, Array]:
    """Query, cotangent, energy and delta of rows, the last two `[rows, 1]`; nothing of rows without keys."""
    lse = rows["lse"].T
    some = holds_keys(lse)
    query, d_out = (_kept(rows[name], some) for name in ("query", "d_out"))
    products = d_out.astype(jnp.float32) * rows["out"].astype(jnp.float32)
    delta = products.sum(-1, keepdims=True)
    if "d_lse" in rows:
        delta -= rows["d_lse"].T
    return query, d_out, jnp.where(some, lse, jnp.inf), jnp.where(some, delta, 0.0)


def _kept(x: Array, some: Array) -> Array:
    return jnp.where(some, x, jnp.zeros((), x.dtype))
