"""The tiles of a canonical call on a CPU: their arithmetic, their scores, and the rows in them.

No product meets a sum in them before it is rounded: XLA:CPU fuses such pairs in some surroundings, not in others.
Operands count as products, as XLA fuses what computes them, and so do exponentials, which end in one.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from .._slice import slice_at
from ..call._operands import Operands
from ..call._state import of_each, precision, unfused
from ..fold._call import AbstractSchedule, rounded
from ..fold._programs import AbstractTileScores, Arithmetic, Blocks, Pullback
from ..scores._abstract import ScoreIndices
from ..scores._structure import BoundScore
from ._loops import hidden, row_maximum, row_sum
from ._tile_program import computed

DEPTH = 256  # products that are summed in one sweep
ROWS = 512  # rows of a tile, of a fold over keys
MOST_ROWS = 4096  # rows of all key heads: the scores of a leaf then take 4 MiB


@dataclasses.dataclass(frozen=True)
class CPUArithmetic(Arithmetic):
    """Arithmetic of tiles `[K, rows, width]`; bits of a row depend neither on other rows nor on fusion."""

    keeps_rest: bool = True

    def dot(self, a: Array, b: Array, over: tuple[int, int]) -> Array:
        """Over the last axes of both; or weighed sums `(1, 0)`, of 64 or 128 features at a time.

        Of other widths the program of a few rows rounds otherwise than that of many.
        """
        if over == (1, 1):
            return _product(a, b, (2, 2))
        width = b.shape[-1]
        b = jnp.pad(b, ((0, 0), (0, 0), (0, -width % 64)))
        pieces = (b[..., first : first + 128] for first in range(0, b.shape[-1], 128))
        result = [_product(a, x, (2, 1)) for x in pieces]
        return jnp.concatenate(result, -1)[..., :width] if result else a[..., :0]

    def alone(self, x: Array) -> Array:
        return lax.optimization_barrier(x)

    def rounded(self, x: Array) -> Array:
        return lax.optimization_barrier(unfused(x))

    def each(self, f: Callable[[Array], Array], x: Array) -> Array:
        return of_each(f, x)

    def total(self, x: Array) -> Array:
        return _of_rows(row_sum, x)

    def maximum(self, x: Array) -> Array:
        return _of_rows(row_maximum, x)


def _product(a: Array, b: Array, over: tuple[int, int]) -> Array:
    # The matrix products that contract these axes, of matrices that XLA fuses nothing with. XLA:CPU cuts sums of more
    # than `DEPTH` products in pieces, in some calls, so they are cut here.
    x, y = over
    depth = a.shape[x]
    cuts = [slice(first, first + DEPTH) for first in range(0, depth, DEPTH)] or [slice(0)]
    axes = ((x,), (y,)), ((0,), (0,))

    def piece(cut: slice) -> Array:
        sides = (m[(*[slice(None)] * axis, cut)] for m, axis in ((a, x), (b, y)))
        a_cut, b_cut = lax.optimization_barrier(tuple(sides))
        result = lax.dot_general(a_cut, b_cut, axes, precision(a.dtype))
        # a contraction of length 1 becomes a product, which XLA:CPU fuses with the sum that follows
        return unfused(result) if a_cut.shape[x] == 1 else result

    return functools.reduce(lambda x, y: lax.optimization_barrier(x) + y, map(piece, cuts))


def _of_rows(f: Callable[[Array], Array], x: Array) -> Array:
    return f(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], 1)


class TokensOfTile(NamedTuple):
    """The tokens of a tile of queries or keys: where they are in their arrays, and heads of queries."""

    place: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    segments: Int[Array, " tokens"] | None
    heads: Int[Array, " K #tokens"] | None = None


class PairsOfTile(NamedTuple):
    """The pairs of two tiles, in arrays that broadcast to `[K, kept, iterated]`."""

    place: tuple[Array, ...]  # the entry of the batch, heads, indices of queries and of keys
    seen: Bool[Array, "..."]  # but for a mask array
    at: ScoreIndices  # the indices and positions that a score reads

    def of(self, x: Array) -> Array:
        """Entries for the pairs of an array that broadcasts to `[B, N, T, S]`."""
        pairs = zip(self.place, x.shape, strict=True)
        return x[tuple(at if size > 1 else jnp.int32(0) for at, size in pairs)]


class CPUScores(AbstractTileScores):
    """Scores, biases and masks of tiles, each rounded."""

    def __init__(self, of: AbstractSchedule, score: BoundScore | None, directions: Operands | None):
        self.scale, self._score, self._dtype = of.settings.scale, score, of.dtype
        self._bias, self._mask = of.operands.bias, of.operands.mask
        self._directions = directions

    def masked(self, raw: Array, rows: Blocks, pairs: PairsOfTile) -> Array:
        if self._score is not None:
            raw = computed(self._score, raw, pairs.at)
        return self._hidden(raw, pairs)

    def with_pullback(self, raw: Array, rows: Blocks, pairs: PairsOfTile) -> tuple[Array, Pullback]:
        # dx = g'(x) ds; the slope g'(x) is the tangent in direction 1
        scores, slope = self._moved(raw, 1.0, (), pairs)
        if self._score is None:
            return scores, lambda change: change
        return scores, lambda change: lax.optimization_barrier(unfused(change * slope))

    def along(
        self, raw: Array, change: Array | None, rows: Blocks, pairs: PairsOfTile
    ) -> tuple[Array, Array | None]:
        # ds = g'(x) dx + ∂g/∂θ dθ + db
        assert self._directions is not None
        scores, change = self._moved(raw, change, self._directions.score_arrays, pairs)
        if self._directions.bias is not None:
            d_bias = jnp.broadcast_to(self._terms(self._directions.bias, pairs), raw.shape)
            change = d_bias if change is None else change + d_bias
        return scores, change

    def pulled(self, raw: Array, change: Array, pairs: PairsOfTile) -> Any:
        score: Any = self._score

        # dθ = Σ ds ∂g/∂θ
        def pull(raw: Array, change: Array) -> Any:
            return score.vjp(raw, pairs.at)[1](change)[1]

        return lax.optimization_barrier(computed(pull, raw, unfused(change)))

    def _moved(
        self, raw: Array, change: Any, arrays: Sequence[Any], pairs: PairsOfTile
    ) -> tuple[Array, Any]:
        """Scores, and their tangent given tangents of the scaled products and of the score's arrays."""
        if self._score is None:
            return self._hidden(raw, pairs), change
        change = None if change is None else jnp.broadcast_to(change, raw.shape).astype(raw.dtype)
        result = computed(self._score.jvp, raw, pairs.at, change, rounded(arrays))
        scores, change = lax.optimization_barrier(result)
        return self._hidden(scores, pairs), change

    def _hidden(self, scores: Array, pairs: PairsOfTile) -> Array:
        """`scores`, rounded; with the bias; minus infinity where a key is hidden."""
        scores = lax.optimization_barrier(scores)
        if self._bias is not None:
            scores = scores + self._terms(self._bias, pairs)
        seen = pairs.seen if self._mask is None else pairs.seen & pairs.of(self._mask)
        return lax.optimization_barrier(jnp.where(seen, scores, -jnp.inf))

    def _terms(self, bias: Array, pairs: PairsOfTile) -> Array:
        return unfused(pairs.of(bias).astype(self._dtype))


class RowTiles:
    """Tiles `[K, rows, ...]` that are sliced from arrays `[B, T, N, ...]`.

    A tile holds consecutive tokens, with all query heads of a key head. All tiles have the same number of tokens: the
    last may begin earlier and compute some rows again, as a row's bits do not depend on its tile.
    """

    def __init__(self, batch: int, queries: int, key_heads: int, group: int):
        """`group`: heads of queries for each of keys."""
        self._sizes, self._heads, self._group = (batch, queries), key_heads, group
        most = min(ROWS, MOST_ROWS // key_heads) // group
        self._of_entry = max(-(-queries // max(most, 1)), 1)
        self._tokens = -(-queries // self._of_entry)
        # at least 2: XLA:CPU compiles matrix-vector products differently
        self.rows = max(2, self._tokens * group)

    def place(self, n: Array) -> tuple[Array, Array, Array]:
        """Batch entry of the `n`-th tile, its index in that entry, and its first token."""
        count = jnp.full_like(n, self._of_entry)
        index = lax.rem(n, count)
        first = jnp.minimum(index * self._tokens, self._sizes[1] - self._tokens)
        return lax.div(n, count), index, first

    def of_rows(self, n: Array) -> tuple[Int[Array, " rows"], Int[Array, " rows"]]:
        """The tokens of the rows of the `n`-th tile, and which of the query heads of a key head they are."""
        row = np.minimum(np.arange(self.rows, dtype=np.int32), self._tokens * self._group - 1)
        return self.place(n)[2] + row // self._group, jnp.asarray(row % self._group)

    def spread(self, ids: Int[Array, "b length"]) -> Int[Array, "b tiles rows"]:
        """Positions or segments of tokens for the rows of the tiles; -1 for one that is added."""
        first = np.arange(self._of_entry) * self._tokens
        first = np.minimum(first, self._sizes[1] - self._tokens)
        ids = jnp.repeat(ids[:, first[:, None] + np.arange(self._tokens)], self._group, 2)
        missing = self.rows - ids.shape[2]
        return jnp.pad(ids, ((0, 0), (0, 0), (0, missing)), constant_values=-1)

    def cut(self, x: Array, n: Array) -> Array:
        batch, _, first = self.place(n)
        rest, zero = x.shape[3:], jnp.zeros_like(n)
        x = x.reshape(*x.shape[:2], self._heads, -1)
        x = slice_at(x, (batch, first, zero, zero), (1, self._tokens, *x.shape[2:]))[0]
        x = x.reshape(self._tokens, self._heads, self._group, *rest).swapaxes(0, 1)
        x = lax.collapse(x, 1, 3)
        missing = self.rows - x.shape[1]
        return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * len(rest)))

    def each(self, f: Callable[[Array], Any], like: Array) -> Any:
        """`[B, T, N, ...]` of `f(n)`, the `n`-th tile. Raises, and varies over a mesh, as `each` of one axis."""
        batch, queries = self._sizes
        sizes = batch, queries, self._heads * self._group

        def empty(x: Any) -> Array:
            return lax.full_like(like, 0, x.dtype, (*sizes, *x.shape[2:]))

        def put(whole: Array, x: Array, n: Array) -> Array:
            entry, _, first = self.place(n)
            x = x[:, : self._tokens * self._group]
            x = x.reshape(self._heads, self._tokens, self._group, *x.shape[2:]).swapaxes(0, 1)
            corner = entry, first, *[jnp.zeros_like(n)] * (whole.ndim - 2)
            return lax.dynamic_update_slice(whole, lax.collapse(x, 1, 3)[None], corner)

        def turn(n: Array, result: Any) -> Any:
            return jax.tree.map(lambda xs, x: put(xs, x, n), result, f(n))

        begin = jax.tree.map(empty, jax.eval_shape(f, jnp.int32(0)))
        return lax.fori_loop(jnp.int32(0), hidden(batch * self._of_entry), turn, begin)
