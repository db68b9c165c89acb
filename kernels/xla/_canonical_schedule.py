"""The canonical schedule of XLA: loops over leaves for tiles of rows, and over tiles of queries for leaves."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ..call._operands import KernelCall, Operands, bound_score
from ..call._tokens import LEAF
from ..fold import _tree as tree
from ..fold._call import QUERIES, AbstractRowsFold, AbstractSchedule, Ids
from ..fold._programs import Blocks, FoldProgram, Partial, without_signs
from ..fold._tree import Part, PositionSlots, entry
from ..masks._visibility import visible
from ..scores._abstract import ScoreIndices
from ._canonical_tiles import CPUArithmetic, CPUScores, PairsOfTile, RowTiles, TokensOfTile
from ._loops import each
from ._tile_program import computed


class FoldOverLeaves(AbstractRowsFold):
    """A loop over leaves for each row tile, which holds all query heads of a key head."""

    of: "XLASchedule"

    def whole(self) -> Any:
        fold, count = self._folds(), self.of.key_slots.tiles
        return self._results(lambda n: fold(n, jnp.zeros_like(n), jnp.full_like(n, count)))

    def nodes(self, leaves: int) -> tuple[list[Array], Int[Array, "b nodes"]]:
        of, fold = self.of, self._folds()
        count = -(-of.key_slots.tiles // leaves)

        def numbers_apart(partial: Partial) -> Any:
            pairs = zip(partial, self.program.widths, strict=True)
            return [x[..., 0] if width is None else x for x, width in pairs]

        def node(number: Array) -> Any:
            first = number * leaves
            stop = jnp.minimum(first + leaves, of.key_slots.tiles)
            one = functools.partial(fold, first=first, stop=stop)
            return of.tiles.each(lambda n: numbers_apart(one(n)), of.operands.query)

        result = each(node, count, of.operands.query)
        return result, of.node_numbers(leaves)

    def of_nodes(self, nodes: Sequence[Array], numbers: Int[Array, "b nodes"]) -> Any:
        tiles, program = self.of.tiles, self.program
        identity = self.of.identity(program, tiles.rows)

        def whole(n: Array) -> Partial:
            some = [jax.vmap(lambda x: tiles.cut(x, n))(x) for x in nodes]
            some = (x if x.ndim == 4 else x[..., None] for x in some)
            return tree.folded(numbers[tiles.place(n)[0]], tuple(some), identity, program.merge)

        return self._results(whole)

    def _folds(self) -> Callable[..., Partial]:
        """The fold of the `n`-th tile over leaves from one number to another."""
        of, program, tiles = self.of, self.program, self.of.tiles
        operands, key_slots = of.operands, of.key_slots
        ids: Any = operands.tokens.query_positions, operands.tokens.query_segments
        side: Any = tuple(None if x is None else tiles.spread(x) for x in ids)
        live_after, identity = tree.following(of.meets(side)), of.identity(program, tiles.rows)

        def fold(n: Array, first: Array, stop: Array) -> Partial:
            batch, index, _ = tiles.place(n)
            row, (queries, members) = of.cut(self.rows, n), tiles.of_rows(n)
            at: list[Any] = [None if x is None else entry(x, batch)[index] for x in side]
            of_rows = TokensOfTile(queries, at[0], at[1], of.first_heads + members[None])

            def term(leaf: Array) -> Partial:
                blocks, of_keys = of.leaf(self.keys, batch, leaf)
                return program.term(row, blocks, of.pairs(batch, of_rows, of_keys))

            live, numbers = entry(live_after, batch)[index], entry(key_slots.numbers, batch)
            args = identity, key_slots.depth, program.merge, (first, stop)
            return tree.fold_live(live, numbers, term, *args)

        return fold

    def _results(self, whole: Callable[[Array], Partial]) -> Any:
        of = self.of

        def one(n: Array) -> tuple[Array, ...]:
            return of.finished(self.program, of.cut(self.rows, n), whole(n))

        return self.wrap(*map(of.key_slots.checked, of.tiles.each(one, of.operands.query)))


class XLASchedule(AbstractSchedule):
    """XLA's loops, which read one tile at a time from the arrays of a call."""

    query_tile = QUERIES
    over_keys = FoldOverLeaves

    def __init__(self, call: KernelCall, in_order: bool):
        super().__init__(call, in_order)
        self.arithmetic = CPUArithmetic(self.dtype)
        self.tiles = RowTiles(self.batch, self.queries, self.key_heads, self.group)
        self.score = bound_score(self.settings, self.operands)
        self.first_heads = jnp.arange(self.key_heads, dtype=jnp.int32)[:, None] * self.group

    def scores(self, directions: Operands | None = None) -> CPUScores:
        return CPUScores(self, self.score, directions)

    def over_queries(self, program: FoldProgram, rows: Blocks, keys: Blocks) -> list[Array]:
        key_slots, query_slots, group = self.key_slots, self.query_slots, self.group
        meets = jnp.repeat(self.meets(self.query_ids).swapaxes(1, 2), group, axis=-1)
        live_after = tree.following(meets)
        numbers = query_slots.numbers[:, :, None] * group
        numbers = numbers + jnp.arange(group, dtype=jnp.int32)[None, None]
        numbers = lax.collapse(numbers, 1, 3)
        identity = self.identity(program, LEAF)
        between = jnp.int32(0), jnp.int32(query_slots.tiles * group)

        def one_leaf(n: Array) -> Any:
            batch, leaf = _digits(n, key_slots.tiles)
            blocks, of_keys = self.leaf(keys, batch, leaf)

            def term(index: Array) -> Partial:
                tile, member = _digits(index, group)
                heads = self.first_heads + member
                row, of_rows = self.queries_of(rows, batch, tile, heads, (member, group))
                return program.term(blocks, row, self.pairs(batch, of_rows, of_keys, False))

            live = entry(live_after, batch)[leaf]
            args = identity, query_slots.depth + group.bit_length(), program.merge, between
            result = tree.fold_live(live, entry(numbers, batch), term, *args)
            return self.finished(program, blocks, result)

        def of_keys(x: Array) -> Array:
            x = x.swapaxes(1, 2).reshape(self.batch, -1, self.key_heads, x.shape[-1])
            return self.at_keys(x)

        results = each(one_leaf, self.batch * key_slots.tiles, self.operands.query)
        return [of_keys(x) for x in results]

    def of_rows(self, f: Callable[[Blocks], Array], rows: Blocks) -> Array:
        return self.tiles.each(lambda n: f(self.cut(rows, n))[:, 0], self.operands.query)

    def computed(self, f: Callable[..., Any], *args: Any) -> Any:
        return computed(f, *args)

    def identity(self, program: FoldProgram, size: int) -> Partial:
        pairs = zip(program.identity, program.sizes, strict=True)
        return tuple(self.empty(self.key_heads, size, width, fill=x) for x, width in pairs)

    def cut(self, rows: Blocks, n: Array) -> Blocks:
        return _blocks(jax.tree.map(lambda x: self.tiles.cut(x, n).astype(self.dtype), rows))

    def leaf(
        self, keys: Blocks, batch: Array, leaf: Array, part: Part = (0, 1)
    ) -> tuple[Blocks, TokensOfTile]:
        """The keys of a leaf, or part of their heads, and their tokens."""
        blocks = self.key_slots.read(keys, batch, leaf, self.dtype, part)
        return blocks, _tokens(self.key_slots, self.key_ids, batch, leaf)

    def queries_of(
        self, rows: Blocks, batch: Array, tile: Array, heads: Array, part: Part
    ) -> tuple[Blocks, TokensOfTile]:
        """The queries of a tile, of the part of the heads that has these; and their tokens."""
        # inside the loop: otherwise XLA materialises the reshaped array in addition to the array
        by_head = {name: x.reshape(*x.shape[:2], len(heads), -1) for name, x in rows.items()}
        result = self.query_slots.read(by_head, batch, tile, self.dtype, part)
        blocks = _blocks({n: x if rows[n].ndim == 4 else x[..., 0] for n, x in result.items()})
        return blocks, _tokens(self.query_slots, self.query_ids, batch, tile, heads)

    def pairs(
        self, batch: Array, rows: TokensOfTile, keys: TokensOfTile, rows_kept: bool = True
    ) -> PairsOfTile:
        """The pairs of a row tile and a key tile. `rows_kept`: rows are on the first axis."""
        kept, iterated = (lambda x: x[..., None]), (lambda x: x[..., None, :])
        of_row, of_key = (kept, iterated) if rows_kept else (iterated, kept)
        mask = jax.tree.map(lambda x: entry(x, batch)[None], self.mask)
        query, key = of_row(rows.positions), of_key(keys.positions)
        seen = visible(mask, query, key)
        if rows.segments is not None and keys.segments is not None:
            seen = seen & (of_row(rows.segments) == of_key(keys.segments))
        heads = of_row(rows.heads)
        place = batch, heads, of_row(rows.place)[None], of_key(keys.place)[None]
        operands, score = self.operands, self.score
        entries, of_heads = operands.indices
        batch = batch if entries is None else entries[batch]
        heads = heads if of_heads is None else of_heads[heads]
        uses_positions = score is not None and score.structure.uses_positions
        at = (query[None], key[None]) if uses_positions else (None, None)
        return PairsOfTile(place, seen[None], ScoreIndices(batch, heads, *at))  # pyright: ignore[reportArgumentType]

    def finished(self, program: FoldProgram, kept: Blocks, partial: Partial) -> tuple[Array, ...]:
        """The results of a fold, `[K, kept, width]` or numbers `[K, kept]`."""
        pairs = zip(program.finish(kept, partial), program.results, strict=True)
        return tuple(
            without_signs((x[:, 0] if kind.width is None else x).astype(kind.dtype))
            for x, kind in pairs
        )


def _tokens(
    slots: PositionSlots, ids: Ids, batch: Array, tile: Array, heads: Array | None = None
) -> TokensOfTile:
    result: Any = [None if x is None else entry(x, batch)[tile] for x in (slots.tokens, *ids)]
    return TokensOfTile(*result, heads=heads)


def _blocks(arrays: Blocks) -> Blocks:
    """Tiles of matrices, and of numbers as rows of matrices."""
    return {name: x if x.ndim == 3 else x[:, None] for name, x in arrays.items()}


def _digits(n: Array, size: int) -> tuple[Array, Array]:
    """The indices of the `n`-th entry along two axes, the last of this size."""
    return lax.div(n, jnp.full_like(n, size)), lax.rem(n, jnp.full_like(n, size))
