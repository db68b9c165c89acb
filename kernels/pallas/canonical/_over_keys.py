"""The schedule of Pallas. Few rows are folded by two kernels: one folds leaves to nodes of the tree, one the nodes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ...call._operands import KernelCall, Operands
from ...fold._call import AbstractRowsFold, node_numbers, rounded
from ...fold._programs import Arithmetic, Blocks, FoldProgram, FoldResult, Partial
from .._score import score_numbers
from ..gpu._chip import named_gpu
from ..tile_program._dot import dot
from ..tile_program._evaluated import chip_for, evaluated
from ._scores import FIXED, FLOATS, TileScores
from ._sides import AbstractTiledCall, Side, TileSizes, Walk, subtree_for


class ChipArithmetic(Arithmetic):
    """Of tiles `[rows, width]`: products are summed in float32, and rounded where XLA:CPU interprets them."""

    def dot(self, a: Array, b: Array, over: tuple[int, int]) -> Array:
        return dot(a, b, over)


class FoldInParts(AbstractRowsFold):
    """By one kernel, or for few rows by two: one folds leaves to nodes of the tree, one the nodes."""

    of: "PallasSchedule"

    def whole(self) -> Any:
        own = self._own()
        leaves = self.of.walk_keys(own)
        wanted = self.of.least_tiles // math.prod(own.sizes)
        if wanted < 2:
            return self._results(self._over_leaves(self.program, own, leaves))
        walk, numbers = self._in_parts(leaves, wanted)
        found = self._over_leaves(of_part(self.program), own, walk)
        return self._of(own, *walk.of_parts(found, numbers, leaves.consecutive))

    def nodes(self, leaves: int) -> tuple[list[Array], Int[Array, "b nodes"]]:
        own, held = self._own(), self.of.held
        walk = self.of.walk_keys(own).in_runs(leaves)
        nodes = self._over_leaves(of_part(self.program), own, walk)
        found = [self._cut(self.of.from_parts(x), 5) for x in nodes]
        numbers = node_numbers(held, leaves)
        return found, jnp.broadcast_to(numbers, (self.of.batch, numbers.shape[1]))

    def of_nodes(self, nodes: Sequence[Array], numbers: Int[Array, "b nodes"]) -> Any:
        own, of = self._own(), self.of
        batch, count = numbers.shape
        order = jnp.argsort(numbers, axis=1)
        numbers = jnp.take_along_axis(numbers, order, 1)
        absent = (numbers < 0).sum(1, dtype=jnp.int32)[:, None, None]

        def laid(x: Array) -> Array:
            x = jnp.stack([of.in_tiles(node) for node in x], 1)  # [B, nodes, tiles, K, rows, ...]
            index = order.reshape(batch, count, *[1] * (x.ndim - 2))
            x = jnp.take_along_axis(x, index, 1)
            return of.widened(lax.collapse(x.swapaxes(1, 2), 1, 3).swapaxes(2, 3))

        tiles = own.sizes[1]
        first = count * jnp.arange(tiles, dtype=jnp.int32)[None, :, None]
        walk = Walk(
            jnp.tile(numbers, (1, tiles)), first + absent, first + 0 * absent + count, count, False
        )
        return self._of(own, Side({str(i): laid(x) for i, x in enumerate(nodes)}, ()), walk)

    def _own(self) -> Side:
        return self.of.row_side(self.rows | self.of.numbers())

    def _in_parts(self, walk: Walk, wanted: int) -> tuple[Walk, Array]:
        """The leaves that each tile may see, in about so many parts, and the numbers of parts in the tree."""
        if walk.consecutive:
            return walk.in_parts(wanted)
        # whole leaves in order, perhaps of a cache
        size = min(subtree_for(walk.numbers.shape[1], wanted), self.of.subtree)
        numbers = node_numbers(self.of.held, size)
        numbers = jnp.broadcast_to(numbers, (self.of.batch, numbers.shape[1]))
        return walk.in_runs(size), lax.cummax(jnp.maximum(numbers, 0), axis=1)

    def _over_leaves(self, program: FoldProgram, own: Side, walk: Walk) -> list[Array]:
        return self.of.fold(program, own, self.of.key_side(self.keys), walk, self.of.pairs)

    def _of(self, own: Side, nodes: Side, walk: Walk) -> Any:
        found = self.of.fold(of_parts(self.program), own, nodes, walk, lambda *_: None)
        return self._results(found)

    def _results(self, found: list[Array]) -> Any:
        return self.wrap(*(self._cut(self.of.from_rows(x), 4) for x in found))

    def _cut(self, x: Array, axes: int) -> Array:
        return x[..., : self.width] if x.ndim == axes else x


class PallasSchedule(AbstractTiledCall):
    """Tiles are folded by kernels of a platform.

    Attributes:
        fold: the platform's, `(program, own, other, walk, of_pairs)`.
        least_tiles: a fold over keys of fewer tiles of rows is in parts.
    """

    arithmetic = ChipArithmetic()
    over_keys = FoldInParts

    def __init__(
        self,
        call: KernelCall,
        sizes: TileSizes,
        subtree: int,
        scores: TileScores,
        platform: str,
        fold: Callable[..., list[Array]],
        least_tiles: int,
    ):
        super().__init__(call, sizes, subtree)
        self._call, self._scores, self._platform = call, scores, platform
        self.fold, self.least_tiles = fold, least_tiles

    def scores(self, directions: Operands | None = None) -> TileScores:
        del directions
        return self._scores

    def over_queries(self, program: FoldProgram, rows: Blocks, keys: Blocks) -> list[Array]:
        other, own = self.query_side(rows | self.numbers()), self.key_side(keys)
        found = self.fold(program, own, other, self.walk_queries(), lambda k, q: self.pairs(q, k))
        return [self.from_keys(x) for x in found]

    def of_rows(self, f: Callable[[Blocks], Array], rows: Blocks) -> Array:
        # numbers as rows of matrices, as in a tile
        rows = {name: x if x.ndim == 4 else x[..., None, :] for name, x in rows.items()}
        return self.computed(lambda x: f(x)[..., 0], rows)

    def computed(self, f: Callable[..., Any], *args: Any) -> Any:
        program, struct = jax.make_jaxpr(f, return_shape=True)(*args)
        with named_gpu(self._call.platform):
            chip = chip_for(self._platform, interpret=self._call.platform != self._platform)
            given = rounded(jax.tree.leaves(args))
            found = evaluated(program.jaxpr, program.consts, given, self._platform, chip)
        return jax.tree.unflatten(jax.tree.structure(struct), found)

    def numbers(self) -> Blocks:
        """Those of the score for each row, `[B, T, N]`."""
        program = self._scores.program
        if program is None:
            return {}
        found = self.computed(lambda x: score_numbers(x, program), self._call.operands)
        named = [(FLOATS, x) for x in found.floats] + [(FIXED, x) for x in found.fixed]
        shape = self.operands.query.shape[:3]
        return {
            f"{kind}{i:03}": jnp.broadcast_to(x[:, None], shape)
            for i, (kind, x) in enumerate(named)
        }


def of_part(program: FoldProgram) -> FoldProgram:
    """A program whose results are the partials of parts of a fold, unchanged."""
    results = tuple(FoldResult(width, jnp.float32) for width in program.widths)

    def finish(own: Blocks, partial: Partial) -> Partial:
        del own
        pairs = zip(partial, results, strict=True)
        return tuple(x.T if kind.width is None else x for x, kind in pairs)

    name = f"{program.name}_leaves"
    return program._replace(name=name, finish=finish, results=results, to_partials=True)


def of_parts(program: FoldProgram) -> FoldProgram:
    """The same program, of what `of_part` returns in place of tiles of the other side."""

    def term(own: Blocks, other: Blocks, pairs: None) -> Partial:
        del own, pairs
        return tuple(x.T if x.shape[0] == 1 else x for x in other.values())

    return program._replace(name=f"{program.name}_parts", term=term, of_partials=True)
