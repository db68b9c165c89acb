"""The Pallas schedule of a canonical fold: lays a call out in tiles and runs a platform's fold kernel."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr
from jaxtyping import Array, Int

from ...call._operands import KernelCall, Operands
from ...fold._call import AbstractRowsFold, AbstractSchedule, rounded
from ...fold._programs import Arithmetic, Blocks, FoldProgram, FoldResult, Partial
from ...masks._visibility import visible
from ...program._jaxpr import evaluate_by
from .._rows import block_spans, features_of, pairs_of
from .._score import score_numbers
from .._tiles import dot
from ..gpu._plan import named_gpu
from ..tile_program._evaluated import chip_for, evaluated
from ._sides import (
    FIXED,
    FLOATS,
    ChipScores,
    FormatSizes,
    Pairs,
    Side,
    TokenNumbers,
    Walk,
    subtree_for,
)

_LEAST = 16  # smallest padded width; widths are padded to powers of two


class ChipArithmetic(Arithmetic):
    def dot(self, a: Array, b: Array, over: tuple[int, int]) -> Array:
        return dot(a, b, over)


class FoldInParts(AbstractRowsFold):
    """Folds leaves in one kernel; for few rows in two, leaves to tree nodes and then the nodes."""

    of: "PallasSchedule"

    def whole(self) -> Any:
        kept = self._kept_rows()
        leaves = self.of.walk_keys(kept)
        # few tiles of rows leave most of a chip idle: their leaves are split into parts
        wanted = self.of.least_tiles // math.prod(kept.sizes)
        if wanted < 2:
            return self._results(self._over_leaves(self.program, kept, leaves))
        walk, numbers = self._in_parts(leaves, wanted)
        partials = self._over_leaves(of_part(self.program), kept, walk)
        return self._of(kept, *walk.of_parts(partials, numbers, leaves.consecutive))

    def nodes(self, leaves: int) -> tuple[list[Array], Int[Array, "b nodes"]]:
        kept = self._kept_rows()
        walk = self.of.walk_keys(kept).in_runs(leaves)
        nodes = self._over_leaves(of_part(self.program), kept, walk)
        result = [self._cut(self.of.from_parts(x), 5) for x in nodes]
        return result, self.of.node_numbers(leaves)

    def of_nodes(self, nodes: Sequence[Array], numbers: Int[Array, "b nodes"]) -> Any:
        kept, of = self._kept_rows(), self.of
        batch, count = numbers.shape
        order = jnp.argsort(numbers, axis=1)
        numbers = jnp.take_along_axis(numbers, order, 1)
        absent = (numbers < 0).sum(1, dtype=jnp.int32)[:, None, None]

        def packed(x: Array) -> Array:
            x = jnp.stack([of.in_tiles(node) for node in x], 1)  # [B, nodes, tiles, K, rows, ...]
            index = order.reshape(batch, count, *[1] * (x.ndim - 2))
            x = jnp.take_along_axis(x, index, 1)
            return of.widened(lax.collapse(x.swapaxes(1, 2), 1, 3).swapaxes(2, 3))

        tiles = kept.sizes[1]
        first = count * jnp.arange(tiles, dtype=jnp.int32)[None, :, None]
        walk = Walk(
            jnp.tile(numbers, (1, tiles)), first + absent, first + 0 * absent + count, count, False
        )
        return self._of(kept, Side({str(i): packed(x) for i, x in enumerate(nodes)}, ()), walk)

    def _kept_rows(self) -> Side:
        return self.of.row_side(self.rows | self.of.numbers())

    def _in_parts(self, walk: Walk, wanted: int) -> tuple[Walk, Array]:
        """Splits the walk over leaves into about `wanted` parts; returns it with the parts' numbers in the tree."""
        if walk.consecutive:
            return walk.in_parts(wanted)
        # whole leaves in order, perhaps of a cache
        size = min(subtree_for(walk.numbers.shape[1], wanted), self.of.subtree)
        numbers = jnp.maximum(self.of.node_numbers(size), 0)
        return walk.in_runs(size), lax.cummax(numbers, axis=1)

    def _over_leaves(self, program: FoldProgram, kept: Side, walk: Walk) -> list[Array]:
        return self.of.fold(program, kept, self.of.key_side(self.keys), walk, self.of.pairs)

    def _of(self, kept: Side, nodes: Side, walk: Walk) -> Any:
        results = self.of.fold(of_parts(self.program), kept, nodes, walk, lambda *_: None)
        return self._results(results)

    def _results(self, results: list[Array]) -> Any:
        return self.wrap(*(self._cut(self.of.from_rows(x), 4) for x in results))

    def _cut(self, x: Array, axes: int) -> Array:
        return x[..., : self.width] if x.ndim == axes else x


class PallasSchedule(AbstractSchedule):
    """Lays queries and keys out in a platform's tile sizes and runs its fold kernel."""

    arithmetic = ChipArithmetic()
    over_keys = FoldInParts

    def __init__(
        self, kernel: Any, call: KernelCall, scores: ChipScores, sizes: FormatSizes, subtree: int
    ):
        """`subtree`: leaves per aligned run of keys in order; 0 if keys are in any order."""
        super().__init__(call, subtree > 0)
        self._kernel, self._call, self._scores = kernel, call, scores
        self.least_tiles = kernel.least_tiles
        self.subtree, (self.rows, self.query_tile) = subtree, sizes
        operands, tokens = self.operands, self.operands.tokens
        self._pairs = pairs_of(operands, self.settings)
        features = features_of(operands, self._pairs)
        self._has_segments = tokens.query_segments is not None
        segments = (tokens.query_segments, tokens.key_segments)
        self._ids = tuple(
            (*(x for x in (segment,) if x is not None), *numbers)
            for segment, numbers in zip(segments, features, strict=True)
        )

    def width_of(self, width: int) -> int:
        return max(_LEAST, 1 << (width - 1).bit_length())

    def pairs(self, queries: TokenNumbers, keys: TokenNumbers) -> Pairs:
        (query, *of_query), (key, *of_key) = queries, keys
        first = int(self._has_segments)
        if self._pairs is None:
            is_visible = visible(self.settings.mask.bind(), query, key)
        else:
            is_visible = self._pairs.visible(query, key, of_query[first:], of_key[first:])
        if self._has_segments:
            is_visible &= of_query[0] == of_key[0]
        return Pairs(is_visible, query, key)

    def row_side(self, arrays: Blocks) -> Side:
        """Tiles the rows `[B, T, N, ...]` of all query heads that share a key head."""
        ids = (self._rows_of(x) for x in (self.operands.tokens.query_positions, *self._ids[0]))
        tiles = {name: self.in_tiles(x).swapaxes(2, 3) for name, x in arrays.items()}
        return self._side(tiles, ids)

    def key_side(self, arrays: Blocks) -> Side:
        """Groups keys `[B, S, K, W]` into leaves."""
        leaves = {name: self.key_slots.spread(x) for name, x in arrays.items()}
        ids = (self.key_slots.positions, *(self.key_slots.spread(x, -1) for x in self._ids[1]))
        return self._side(leaves, ids)

    def query_side(self, arrays: Blocks) -> Side:
        """Tiles queries `[B, T, N, ...]` per head, in order of position."""
        group, query_slots = self.group, self.query_slots

        def by_member(x: Array) -> Array:
            x = query_slots.spread(x.reshape(*x.shape[:2], self.key_heads, group, *x.shape[3:]))
            x = jnp.moveaxis(x, 4, 2)  # [B, tiles, G, size, K, ...]
            return lax.collapse(x, 1, 3)

        tiles = {name: by_member(x) for name, x in arrays.items()}
        ids = (query_slots.positions, *(query_slots.spread(x, -1) for x in self._ids[0]))
        return self._side(tiles, (jnp.repeat(x, group, 1) for x in ids))

    def walk_keys(self, rows: Side) -> Walk:
        numbers, key_slots = self.key_slots.numbers, self.key_slots
        # within one subtree, leaves without keys are numbered too
        is_one_subtree = key_slots.tiles <= self.subtree
        if is_one_subtree:
            numbers = jnp.arange(key_slots.tiles, dtype=jnp.int32)[None]
        consecutive = is_one_subtree or self.counted or key_slots.scattered
        meets = self.meets((rows.ids[0], rows.ids[1] if self._has_segments else None))
        return self._walk(meets, numbers, 1, consecutive)

    def walk_queries(self) -> Walk:
        """Returns the walk over the query tiles, by position and head, that may see a leaf."""
        group, meets = self.group, self.meets(self.query_ids).swapaxes(1, 2)
        numbers = self.query_slots.numbers[:, :, None] * group
        numbers = numbers + jnp.arange(group, dtype=jnp.int32)[None, None]
        return self._walk(meets, lax.collapse(numbers, 1, 3), group, True)

    def _walk(self, meets: Array, numbers: Array, group: int, consecutive: bool) -> Walk:
        first, stop = (group * x[..., None] for x in block_spans(meets))
        numbers, first, stop = (
            jnp.broadcast_to(x, (self.batch, *x.shape[1:])) for x in (numbers, first, stop)
        )
        # a leaf without keys takes the number of the leaf before it, so that numbers never decrease
        numbers = numbers if consecutive else lax.cummax(numbers, axis=1)
        return Walk(numbers, first, stop, numbers.shape[1], consecutive)

    def from_rows(self, x: Array) -> Array:
        """Results of rows `[B, tiles, 1, rows, K, ...]` as `[B, T, N, ...]`; NaN where two keys have one slot."""
        return self.key_slots.checked(self._from_tiles(x.squeeze(2)))

    def from_parts(self, x: Array) -> Array:
        """Results of parts of rows, `[B, tiles, parts, rows, K, ...]`, as `[parts, B, T, N, ...]`."""
        return jax.vmap(self._from_tiles, 2)(x)

    def from_keys(self, x: Array) -> Array:
        """Results of keys `[B, leaves, 1, leaf, K, W]` as `[B, S, K, W]`; NaN where two tokens have one slot."""
        return self.at_keys(lax.collapse(x.squeeze(2), 1, 3))

    def in_tiles(self, x: Array) -> Array:
        """`[B, T, N, ...]` as `[B, tiles, K, rows, ...]`."""
        rest = x.shape[3:]
        x = x.reshape(self.batch, self.queries, self.key_heads, self.group, *rest)
        x = jnp.moveaxis(x, 2, 3).reshape(self.batch, -1, self.key_heads, *rest)
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % self.rows), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(self.batch, -1, self.rows, self.key_heads, *rest), 2, 3)

    def _from_tiles(self, x: Array) -> Array:
        """`[B, tiles, rows, K, ...]` as `[B, T, N, ...]`."""
        x = x.reshape(self.batch, -1, *x.shape[3:])[:, : self.queries * self.group]
        x = x.reshape(self.batch, self.queries, self.group, *x.shape[2:])
        return jnp.moveaxis(x, 2, 3).reshape(self.batch, self.queries, -1, *x.shape[4:])

    def _rows_of(self, x: Array | None) -> Array | None:
        """Positions or segments `[#B, T]` of rows, in the tiles of `in_tiles`."""
        if x is None:
            return None
        x = jnp.repeat(x, self.group, axis=1)
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % self.rows)), constant_values=-1)
        return x.reshape(len(x), -1, self.rows)

    def _side(self, arrays: Blocks, ids: Iterable[Array | None]) -> Side:
        every = (x for x in ids if x is not None)
        every = tuple(jnp.broadcast_to(x, (self.batch, *x.shape[1:])) for x in every)
        return Side({name: self.widened(x) for name, x in arrays.items()}, every)

    def widened(self, x: Array) -> Array:
        """Pads the width of five-axis arrays with zeros to a power of two."""
        missing = self.width_of(x.shape[-1]) - x.shape[-1] if x.ndim == 5 else 0
        return jnp.pad(x, ((0, 0),) * 4 + ((0, missing),)) if missing else x

    def scores(self, directions: Operands | None = None) -> ChipScores:
        del directions
        return self._scores

    def over_queries(self, program: FoldProgram, rows: Blocks, keys: Blocks) -> list[Array]:
        iterated, kept = self.query_side(rows | self.numbers()), self.key_side(keys)
        walk = self.walk_queries()
        results = self.fold(program, kept, iterated, walk, lambda k, q: self.pairs(q, k))
        return [self.from_keys(x) for x in results]

    def of_rows(self, f: Callable[[Blocks], Array], rows: Blocks) -> Array:
        # one number per row as `[1, rows]`, as in a tile
        rows = {name: x if x.ndim == 4 else x[..., None, :] for name, x in rows.items()}
        return self.computed(lambda x: f(x)[..., 0, :], rows)

    def fold(self, *args: Any) -> list[Array]:
        """The results of `(program, kept, iterated, walk, of_pairs)`, `[B, tiles, parts, size, K(, W)]`."""
        return self._kernel.fold(self._call, *args)

    def computed(self, f: Callable[..., Any], *args: Any) -> Any:
        (platform,) = self._kernel.platforms
        chip = chip_for(platform, interpret=self._call.platform != platform)

        def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
            return evaluated(jaxpr, consts, rounded(args), platform, chip)

        with named_gpu(self._call.platform):
            return evaluate_by(evaluate, f, *args)

    def numbers(self) -> Blocks:
        """Numbers of the score for each row, `[B, T, N]`."""
        program = self._scores.program
        if program is None:
            return {}
        numbers = self.computed(lambda x: score_numbers(x, program), self._call.operands)
        named = [(FLOATS, x) for x in numbers.floats] + [(FIXED, x) for x in numbers.fixed]
        shape = self.operands.query.shape[:3]
        return {
            f"{kind}{i:03}": jnp.broadcast_to(x[:, None], shape)
            for i, (kind, x) in enumerate(named)
        }


def of_part(program: FoldProgram) -> FoldProgram:
    """Returns the program with its partials as results, for nodes that another kernel merges."""
    results = tuple(FoldResult(width, jnp.float32) for width in program.widths)

    def finish(kept: Blocks, partial: Partial) -> Partial:
        del kept
        pairs = zip(partial, results, strict=True)
        return tuple(x.T if kind.width is None else x for x, kind in pairs)

    name = f"{program.name}_leaves"
    return program._replace(name=name, finish=finish, results=results, to_partials=True)


def of_parts(program: FoldProgram) -> FoldProgram:
    """Returns the program whose iterated side is the results of `of_part`."""

    def term(kept: Blocks, iterated: Blocks, pairs: None) -> Partial:
        del kept, pairs
        return tuple(x.T if x.shape[0] == 1 else x for x in iterated.values())

    return program._replace(name=f"{program.name}_parts", term=term, of_partials=True)
