"""Fold programs: the partial result of two tiles, and how partials are merged and finished.

A fold keeps a tile of one side and iterates over the tiles of the other:

| program | kept side | iterated side | results |
|---|---|---|---|
| `softmax`, `along` | queries | keys and values | out and lse; their tangents |
| `to_queries` | queries | keys and values | dQ |
| `to_keys` | keys and values | queries | dK and dV |

A schedule runs them: XLA's loop on a CPU, and kernels of Pallas on TPUs and GPUs. Tiles are `[..., rows, width]`;
numbers of each row or key are `[..., 1, rows]`, and within a partial `[..., rows, 1]`. Scores are
`[..., kept, iterated]`. A program is the same for calls of all lengths: none of these functions takes a length.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from ..call._state import holds_keys, safe_shift, unfused

Blocks = dict[str, Any]
Partial = tuple[Array, ...]
Pullback = Callable[[Array], Array]


class FoldResult(NamedTuple):
    """A result: `[kept, width]`, or one number per row if `width` is None."""

    width: int | None
    dtype: DTypeLike


class FoldProgram(NamedTuple):
    """A fold over iterated tiles: `finish` of their merged `term`s, from `identity` on."""

    name: str  # of the kernel
    # (kept tile, iterated tile, pairs, partial so far in the same leaf or None) to the partial
    term: Callable[..., Partial]
    # merges two partials; merging `identity` changes no bit
    merge: Callable[[Partial, Partial], Partial]
    # (kept tile, folded partial) to the results
    finish: Callable[[Blocks, Partial], tuple[Array, ...]]
    identity: tuple[float, ...]  # the numbers that fill the partial of nothing
    widths: tuple[int | None, ...]  # widths of the arrays of a partial; None: one number per row
    results: tuple[FoldResult, ...]  # their types
    to_partials: bool = False  # results are partials, arbitrary for absent rows
    of_partials: bool = False  # the iterated side holds such partials, to be merged

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(1 if x is None else x for x in self.widths)


@dataclasses.dataclass(frozen=True)
class Arithmetic(abc.ABC):
    """How a platform multiplies, sums and rounds tiles. The default leaves rounding to the compiler."""

    dtype: DTypeLike = jnp.float32  # of sums and of numbers of rows
    keeps_rest: bool = False  # whether a state has the rounding error of `lse`, too

    @abc.abstractmethod
    def dot(self, a: Array, b: Array, over: tuple[int, int]) -> Array:
        """Product of two tiles that contracts the last axes, `(1, 1)`, or as matrices, `(1, 0)`."""

    def alone(self, x: Array) -> Array:
        """`x` behind a barrier to fusion."""
        return x

    def rounded(self, x: Array) -> Array:
        """`alone` for `x` that ends in a product: each number is rounded before a sum."""
        return x

    def each(self, f: Callable[[Array], Array], x: Array) -> Array:
        """`f(x)` for one number per row."""
        return f(x)

    def total(self, x: Array) -> Array:
        """Sum of each row, kept as an axis of size 1."""
        return x.sum(-1, keepdims=True)

    def maximum(self, x: Array) -> Array:
        """Maximum of each row, kept as an axis of size 1."""
        return x.max(-1, keepdims=True)


class AbstractTileScores(abc.ABC):
    """The scores of tiles: what a score of `energy_attn.scores`, a mask and a bias make of scaled products."""

    scale: float

    @abc.abstractmethod
    def masked(self, raw: Array, rows: Blocks, pairs: Any) -> Array:
        """The scores of scaled products, minus infinity where a pair is not visible."""

    @abc.abstractmethod
    def with_pullback(self, raw: Array, rows: Blocks, pairs: Any) -> tuple[Array, Pullback]:
        """Scores, and their pullback: cotangents of scores to cotangents of scaled products."""

    @abc.abstractmethod
    def along(
        self, raw: Array, change: Array | None, rows: Blocks, pairs: Any
    ) -> tuple[Array, Array | None]:
        """Scores, and their tangent given the tangent `change` of the scaled products; None where nothing moves."""


def softmax(a: Arithmetic, scores: AbstractTileScores, width: int, dtype: DTypeLike) -> FoldProgram:
    r"""The state of rows over keys, by the maximum $m$, total $\ell$ and weighed values $o$ of a partial.

    $m = \max s$, $\ell = \sum e^{s - m}$, $o = \sum e^{s - m} v$; out is $o / \ell$ and lse $m + \log \ell$. A sink is
    one more key, of value zero.
    """

    def term(rows: Blocks, keys: Blocks, pairs: Any, before: Partial | None = None) -> Partial:
        # s = g(scale q·k) + b; m = max(m_before, max s), w = e^{s - m}
        # l = e^{m_before - m} l_before + Σ w,  o = e^{m_before - m} o_before + Σ w v
        raw = a.rounded(a.dot(rows["query"], keys["key"], (1, 1)) * scores.scale)
        tile_scores = scores.masked(raw, rows, pairs)
        maximum = a.maximum(tile_scores)
        if before is not None:
            maximum = jnp.maximum(maximum, before[0])
        weights = a.alone(jnp.exp(tile_scores - safe_shift(maximum)))
        value = keys["value"]
        sums = a.total(weights), a.dot(weights.astype(value.dtype), value, (1, 0))
        if before is not None:
            decay = _decay(a, before[0], maximum)
            sums = before[1] * decay + sums[0], before[2] * decay + sums[1]
        return maximum, *sums

    def merge(left: Partial, right: Partial) -> Partial:
        # m = max(m_x, m_y), l = e^{m_x - m} l_x + e^{m_y - m} l_y, o as l (Tree Attention, arXiv 2408.04093,
        # section 5); exactly one of the partials where the other is the identity
        maximum = jnp.maximum(left[0], right[0])
        x, y = _decay(a, left[0], maximum), _decay(a, right[0], maximum)
        # each rounded, so that a node has the same bits in all kernels
        pairs = zip(left[1:], right[1:], strict=True)
        return maximum, *(unfused(p * x) + unfused(q * y) for p, q in pairs)

    def finish(rows: Blocks, partial: Partial) -> tuple[Array, ...]:
        # out = o / l, F = m + log l; a sink b is the partial (m, l, o) = (b, 1, 0)
        if "sink" in rows:
            sink = rows["sink"].mT
            partial = merge(partial, (sink, jnp.ones_like(sink), jnp.zeros_like(partial[2])))
        maximum, total, weighed = partial
        empty = total == 0
        total = jnp.where(empty, 1.0, total)
        # the score of a finite product may overflow
        total = jnp.where(maximum == jnp.inf, jnp.nan, total)
        out = jnp.where(empty, 0.0, weighed / total)
        energy = unfused(a.each(jnp.log, total))
        lse = jnp.where(empty, -jnp.inf, maximum + energy)
        if not a.keeps_rest:
            return without_signs(out), lse.mT
        rest = jnp.where(empty, 0.0, (maximum - lse) + energy)
        return without_signs(out), lse.mT, rest.mT

    numbers = (FoldResult(None, a.dtype),) * (1 + a.keeps_rest)
    results = FoldResult(width, dtype), *numbers
    identity, widths = (-jnp.inf, 0.0, 0.0), (None, None, width)
    return FoldProgram("softmax", term, merge, finish, identity, widths, results)


def _decay(a: Arithmetic, old: Array, new: Array) -> Array:
    # Factor of sums when the maximum changes from `old` to `new`; exactly 1 where both are equal.
    at_most = jnp.where(holds_keys(old), a.each(jnp.exp, old - safe_shift(new)), 0.0)
    return jnp.where(old == new, 1.0, at_most)


class ScoreChanges(NamedTuple):
    r"""The cotangents of the scores of two tiles: $\dot s = P (\dot{out} \cdot v - \delta)$, $P = e^{s - F}$."""

    query: Array  # zeros in fully masked rows
    d_out: Array  # zeros in fully masked rows
    raw: Array  # the scaled products
    weights: Array
    change: Array
    pullback: Pullback  # from `change` to cotangents of the scaled products


def score_changes(
    a: Arithmetic,
    scores: AbstractTileScores,
    rows: Blocks,
    keys: Blocks,
    pairs: Any,
    rows_kept: bool = True,
    pulled: bool = True,
) -> ScoreChanges:
    """The cotangents `[kept, iterated]` of the scores of a tile of rows and a tile of keys.

    `pulled`: whether `pullback` maps them to cotangents of the scaled products.
    """
    query, d_out, lse, delta = _backward(a, rows)

    def products(x: Array, y: Array) -> Array:
        return a.dot(x, y, (1, 1)) if rows_kept else a.dot(y, x, (1, 1))

    # P = e^{s - F},  ds = P (dout·v - δ): FlashAttention-2 (arXiv 2307.08691), algorithm 2
    raw = a.rounded(products(query, keys["key"]) * scores.scale)
    if pulled:
        tile_scores, pullback = scores.with_pullback(raw, rows, pairs)
    else:
        tile_scores, pullback = scores.masked(raw, rows, pairs), lambda change: change
    weights = a.alone(jnp.exp(tile_scores - (lse if rows_kept else lse.mT)))
    to_values = products(d_out, keys["value"])
    change = a.alone(weights * (to_values - (delta if rows_kept else delta.mT)))
    return ScoreChanges(query, d_out, raw, weights, change, pullback)


def to_queries(a: Arithmetic, scores: AbstractTileScores, width: int) -> FoldProgram:
    r"""The gradient of queries, $\sum_k \dot s_k k$ over their keys."""

    def term(rows: Blocks, keys: Blocks, pairs: Any, before: Partial | None = None) -> Partial:
        # dq = scale Σ_a g'(x_a) ds_a k_a; `finish` multiplies by the scale
        changes = score_changes(a, scores, rows, keys, pairs)
        change = changes.pullback(changes.change).astype(keys["key"].dtype)
        return _added(before, (a.dot(change, keys["key"], (1, 0)),))

    def finish(rows: Blocks, partial: Partial) -> tuple[Array, ...]:
        del rows
        return (without_signs(partial[0] * scores.scale),)

    results = (FoldResult(width, a.dtype),)
    return FoldProgram("to_queries", term, add, finish, (0.0,), (width,), results)


def to_keys(a: Arithmetic, scores: AbstractTileScores, widths: Sequence[int]) -> FoldProgram:
    r"""The gradients of keys and values, $\sum_q \dot s_q q$ and $\sum_q P_q \dot{out}_q$ over queries."""

    def term(keys: Blocks, rows: Blocks, pairs: Any, before: Partial | None = None) -> Partial:
        # dk = scale Σ_i g'(x_i) ds_i q_i,  dv = Σ_i P_i dout_i
        changes = score_changes(a, scores, rows, keys, pairs, rows_kept=False)
        change = changes.pullback(changes.change)
        to_value = a.dot(changes.weights.astype(changes.d_out.dtype), changes.d_out, (1, 0))
        to_key = a.dot(change.astype(changes.query.dtype), changes.query, (1, 0))
        return _added(before, (to_key, to_value))

    def finish(keys: Blocks, partial: Partial) -> tuple[Array, ...]:
        del keys
        return without_signs(partial[0] * scores.scale), without_signs(partial[1])

    results = tuple(FoldResult(width, a.dtype) for width in widths)
    return FoldProgram("to_keys", term, add, finish, (0.0, 0.0), tuple(widths), results)


def along(a: Arithmetic, scores: AbstractTileScores, width: int, dtype: DTypeLike) -> FoldProgram:
    r"""The tangent of the state in directions `d_query`, `d_key` and `d_value`, each optional.

    With weights $P$ and changes $\dot s$ of scores, $\dot F = \sum P \dot s / \sum P$ and
    $\dot{out} = \sum P (\dot s v + \dot v) / \sum P - \dot F out$.
    """

    def term(rows: Blocks, keys: Blocks, pairs: Any, before: Partial | None = None) -> Partial:
        lse = rows["lse"].mT
        some = holds_keys(lse)
        query, value = _kept(rows["query"], some), keys["value"]
        raw = a.rounded(a.dot(query, keys["key"], (1, 1)) * scores.scale)
        # ds = g'(x) scale (dq·k + q·dk) + ∂g/∂θ dθ + db
        moves = []
        if "d_query" in rows:
            moves.append(a.alone(a.dot(rows["d_query"], keys["key"], (1, 1))))
        if "d_key" in keys:
            moves.append(a.alone(a.dot(query, keys["d_key"], (1, 1))))
        change = a.rounded(sum(moves[1:], moves[0]) * scores.scale) if moves else None
        tile_scores, change = scores.along(raw, change, rows, pairs)
        weights = a.rounded(jnp.exp(tile_scores - jnp.where(some, lse, jnp.inf)))
        # partials of Σ P (ds v + dv), Σ P ds and Σ P
        outs = []
        energy = jnp.zeros_like(lse)
        if change is not None:
            change = a.rounded(weights * change)
            energy = a.total(change)
            outs.append(a.dot(change.astype(value.dtype), value, (1, 0)))
        if "d_value" in keys:
            outs.append(a.dot(weights.astype(value.dtype), keys["d_value"], (1, 0)))
        zeros = lax.full_like(lse, 0, a.dtype, (*lse.shape[:-1], width))
        out = sum(outs[1:], outs[0]) if outs else zeros
        return _added(before, (out, energy, a.total(weights)))

    def finish(rows: Blocks, partial: Partial) -> tuple[Array, ...]:
        lse = rows["lse"].mT
        some, (_, energy, total) = holds_keys(lse), partial
        # dF = Σ P ds / Σ P,  dout = Σ P (ds v + dv) / Σ P - dF out; a sink adds P_b = e^{b - F} and P_b db
        if "sink" in rows:
            weight = a.each(jnp.exp, rows["sink"].mT - jnp.where(some, lse, jnp.inf))
            total += weight
            if "d_sink" in rows:
                energy += unfused(weight * rows["d_sink"].mT)
        total = jnp.where(total == 0, 1.0, total)
        energy = energy / total
        # each rounded, also where XLA:CPU fuses what the kernel is interpreted as
        out = unfused(partial[0] / total) - unfused(energy * rows["out"].astype(a.dtype))
        out, energy = (without_signs(jnp.where(some, x, 0.0)) for x in (out, energy))
        return out, energy.mT

    results = FoldResult(width, dtype), FoldResult(None, a.dtype)
    widths = width, None, None
    return FoldProgram("tangent", term, add, finish, (0.0, 0.0, 0.0), widths, results)


def sink_terms(a: Arithmetic, rows: Blocks) -> Array:
    r"""Terms $-e^{b - F} \delta$ of rows in the gradient of a sink $b$, which a kernel sums: `[..., 1, rows]`."""
    *_, lse, delta = _backward(a, rows)
    return unfused(a.each(jnp.exp, rows["sink"] - lse.mT) * -delta.mT)


def add(left: PyTree[Array], right: PyTree[Array]) -> Any:
    return jax.tree.map(jnp.add, left, right)


def _added(before: Partial | None, partial: Partial) -> Partial:
    return partial if before is None else add(before, partial)


def without_signs(x: Array) -> Array:
    """`x` without negative zeros: adding further zeros, or sending over a mesh by XLA, may turn -0 into 0."""
    return jnp.where(x == 0, 0.0, x)


def _backward(a: Arithmetic, rows: Blocks) -> tuple[Array, Array, Array, Array]:
    r"""Query, cotangent, lse and $\delta = \dot{out} \cdot out - \dot{lse}$ of rows; nothing of rows without keys."""
    lse = rows["lse"].mT
    some = holds_keys(lse)
    query, d_out = (_kept(rows[name], some) for name in ("query", "d_out"))
    delta = a.total(a.rounded(d_out.astype(a.dtype) * rows["out"].astype(a.dtype)))
    if "d_lse" in rows:
        delta -= a.rounded(rows["d_lse"].mT)
    return query, d_out, jnp.where(some, lse, jnp.inf), jnp.where(some, delta, 0.0)


def _kept(x: Array, some: Array) -> Array:
    return jnp.where(some, x, jnp.zeros((), x.dtype))
