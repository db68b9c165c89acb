"""Inputs of the canonical kernels of a platform: queries and keys in tiles, the walk over them, and scores."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from ...call._operands import Operands, Settings
from ...fold._programs import AbstractTileScores, Blocks, Pullback
from .._score import score_of
from .._score_program import Numbers, ScoreProgram, Target

LEVELS = 32  # at most, of the tree over leaves
TokenNumbers = tuple[Array, ...]  # positions, and what else masks compare


class Side(NamedTuple):
    """Queries or keys in tiles.

    Ids are positions (negative for absent tokens) and the other numbers that masks compare. They are empty where all
    tokens are present and all pairs are visible.
    """

    arrays: Blocks  # `[B, tiles, size, K, W]`, or numbers `[B, tiles, size, K]`
    ids: TokenNumbers  # int32 `[B, tiles, size]` each

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch entries, tiles per entry, and key heads."""
        batch, tiles, _, heads = next(iter(self.arrays.values())).shape[:4]
        return batch, tiles, heads


class Pairs(NamedTuple):
    """Visibility and positions of the (kept, iterated) pairs of two tiles; positions broadcast."""

    seen: Bool[Array, "kept iterated"]
    query: Int[Array, "..."]
    key: Int[Array, "..."]


# from the ids of a kept and an iterated tile, which broadcast; None for partials, which are all present
OfPairs = Callable[[TokenNumbers, TokenNumbers], Pairs | None]


class Walk(NamedTuple):
    """The tiles of the iterated side that are folded for each kept tile."""

    numbers: Int[Array, "b iterated"]  # of the iterated tiles in the tree, which increase
    first: Int[Array, "b tiles parts"]  # the first tile of each part of the fold
    stop: Int[Array, "b tiles parts"]
    most: int  # no part has more tiles
    consecutive: bool  # whether numbers are consecutive, so that they split into subtrees

    @property
    def depth(self) -> int:
        """Most nodes that wait at once: one per level of the tree of a part, or one per tile if numbers have gaps."""
        return (self.most - 1).bit_length() + 1 if self.consecutive else min(self.most, LEVELS)

    def in_parts(self, wanted: int) -> tuple["Walk", Array]:
        """Splits the walk into about `wanted` subtrees; returns it with their numbers, `[B, parts]`."""
        count = self.numbers.shape[1]
        size = subtree_for(count, wanted)
        # the first subtree may be cut by the first tile
        parts = -(-(count + size - 1) // size)
        first = self.numbers[:, :1]
        numbers = first // size + jnp.arange(parts, dtype=jnp.int32)[None]
        return self._cut((numbers * size - first)[:, None], size), numbers

    def in_runs(self, size: int) -> "Walk":
        """Splits the walk into runs of `size` tiles."""
        parts = -(-self.numbers.shape[1] // size)
        return self._cut(size * jnp.arange(parts, dtype=jnp.int32)[None, None], size)

    def _cut(self, begin: Int[Array, "#b 1 parts"], size: int) -> "Walk":
        first, stop = (jnp.clip(x, begin, begin + size) for x in (self.first, self.stop))
        # a part is within one subtree of so many tiles
        return self._replace(first=first, stop=stop, most=size, consecutive=True)

    def of_parts(
        self, partials: list[Array], numbers: Array, consecutive: bool
    ) -> tuple[Side, "Walk"]:
        """Returns partials `[B, tiles, parts, ...]` as the iterated side of a fold, and its walk."""
        batch, tiles, parts = self.first.shape
        arrays = {str(i): lax.collapse(x, 1, 3) for i, x in enumerate(partials)}
        first = parts * jnp.arange(tiles, dtype=jnp.int32)[None, :, None]
        first = jnp.broadcast_to(first, (batch, tiles, 1))
        numbers = jnp.tile(numbers, (1, tiles))
        return Side(arrays, ()), Walk(numbers, first, first + parts, parts, consecutive)


def subtree_for(count: int, wanted: int) -> int:
    """Size of the smallest subtrees that cut `count` tiles in at most about `wanted` parts."""
    return 1 << (max(-(-count // wanted), 1) - 1).bit_length()


class FormatSizes(NamedTuple):
    """The constants of a platform's format, powers of two."""

    rows: int  # of a tile, of all heads of a key head
    queries: int  # of a tile of one head, over which gradients of keys are folded


# Prefixes of the names of a score's inputs for each row; the names sort in the order of the inputs.
FLOATS, FIXED = "score_float", "score_fixed"


@dataclasses.dataclass(frozen=True)
class ChipScores(AbstractTileScores):
    """Scores as a static program of scaled products; None for the products themselves."""

    scale: float
    program: ScoreProgram | None

    def masked(self, raw: Array, rows: Blocks, pairs: Pairs) -> Array:
        scores = raw
        if self.program is not None:
            scores = self.program.score(raw, *self._given(raw, rows, pairs))
        return jnp.where(pairs.seen, scores, -jnp.inf)

    def with_pullback(self, raw: Array, rows: Blocks, pairs: Pairs) -> tuple[Array, Pullback]:
        if self.program is None:
            return self.masked(raw, rows, pairs), lambda change: change
        # dx = g'(x) ds, and 0 where hidden, as g' there may be NaN
        scores, pullback = self.program.vjp(raw, *self._given(raw, rows, pairs))

        def to_products(change: Array) -> Array:
            return jnp.where(pairs.seen, pullback(change)[0], 0.0)

        return jnp.where(pairs.seen, scores, -jnp.inf), to_products

    def along(
        self, raw: Array, change: Array | None, rows: Blocks, pairs: Pairs
    ) -> tuple[Array, Array | None]:
        scores = self.masked(raw, rows, pairs)
        if self.program is None or change is None:
            return scores, change
        # ds = g'(x) dx: the numbers of a score do not move here
        tangent = self.program.jvp(raw, *self._given(raw, rows, pairs), change, None)
        return scores, jnp.where(pairs.seen, tangent, 0.0)

    def _given(self, raw: Array, rows: Blocks, pairs: Pairs) -> tuple[dict[str, Array], Numbers]:
        """Positions and row numbers, in the shape of the products."""
        assert self.program is not None
        shape, rows_kept = raw.shape, pairs.query.shape[0] == raw.shape[0]
        places = {}
        if self.program.uses_positions:
            places = {"query": pairs.query, "key": pairs.key}
            places = {name: jnp.broadcast_to(x, shape) for name, x in places.items()}

        def numbers(kind: str) -> tuple[Array, ...]:
            arrays = [rows[name] for name in sorted(rows) if name.startswith(kind)]
            return tuple(jnp.broadcast_to(x.T if rows_kept else x, shape) for x in arrays)

        return places, Numbers(numbers(FLOATS), (), numbers(FIXED))


def scores_of(operands: Operands, settings: Settings, target: Target) -> ChipScores:
    """The scores of a call. Raises `NotImplementedError` for a score that kernels do not compute."""
    program = score_of(operands, settings, target)
    if program is not None and program.sizes:
        raise NotImplementedError(
            f"score: wanted one without tables with reproducible=True in a program for TPUs or GPUs, "
            f"got {program.name}"
        )
    return ChipScores(settings.scale, program)
