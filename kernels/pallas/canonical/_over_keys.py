"""The fold of each row over its leaves, by two kernels: one folds leaves to nodes of the tree, one the nodes."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ...xla._canonical_passes import node_numbers
from ._programs import Program, of_part, of_parts
from ._sides import Sides, given, in_tiles, widened
from ._tiles import Side, Walk, subtree_for


class OverKeys(NamedTuple):
    """The results of a program for rows, over the leaves of keys.

    Attributes:
        sides: of the call.
        program: what is computed.
        rows: arrays of rows by name, `[B, T, N, W]` or `[B, T, N]`.
        keys: of keys, `[B, S, K, W]`.
        fold: a platform's.
        least_tiles: a fold of fewer tiles of rows is in parts.
        width: of results and nodes that are no numbers.
    """

    sides: Sides
    program: Program
    rows: dict[str, Array]
    keys: dict[str, Array]
    fold: Callable[..., list[Array]]
    least_tiles: int
    width: int

    def whole(self) -> list[Array]:
        """The results, over all leaves."""
        own = self._own()
        leaves = self.sides.over_keys(own)
        wanted = self.least_tiles // math.prod(own.sizes)
        if wanted < 2:
            return self._rows(self._over_leaves(self.program, own, leaves))
        walk, numbers = self._in_parts(leaves, wanted)
        found = self._over_leaves(of_part(self.program), own, walk)
        return self._of(own, *walk.of_parts(found, numbers, leaves.consecutive))

    def nodes(self, leaves: int) -> tuple[list[Array], Int[Array, "b nodes"]]:
        """The folds over so many times `LEAF` keys, `[nodes, B, T, N, ...]`, and the number of a leaf of each, or -1.

        There must be a power of two of them, of which the first has a position that is a multiple of all.
        """
        own, held = self._own(), self.sides.of.held
        walk = self.sides.over_keys(own).in_runs(leaves)
        nodes = self._over_leaves(of_part(self.program), own, walk)
        found = [self._cut(self.sides.of_parts(x), 5) for x in nodes]
        numbers = node_numbers(held, leaves)
        return found, jnp.broadcast_to(numbers, (self.sides.of.batch, numbers.shape[1]))

    def of_nodes(self, nodes: Sequence[Array], numbers: Int[Array, "b nodes"]) -> list[Array]:
        """The results, over nodes of all devices."""
        own, of = self._own(), self.sides.of
        batch, count = numbers.shape
        order = jnp.argsort(numbers, axis=1)
        numbers = jnp.take_along_axis(numbers, order, 1)
        absent = (numbers < 0).sum(1, dtype=jnp.int32)[:, None, None]

        def laid(x: Array) -> Array:
            x = jnp.stack([in_tiles(node, of) for node in x], 1)  # [B, nodes, tiles, K, rows, ...]
            index = order.reshape(batch, count, *[1] * (x.ndim - 2))
            x = jnp.take_along_axis(x, index, 1)
            return widened(lax.collapse(x.swapaxes(1, 2), 1, 3).swapaxes(2, 3))

        tiles = own.sizes[1]
        first = count * jnp.arange(tiles, dtype=jnp.int32)[None, :, None]
        walk = Walk(
            jnp.tile(numbers, (1, tiles)), first + absent, first + 0 * absent + count, count, False
        )
        return self._of(own, Side({str(i): laid(x) for i, x in enumerate(nodes)}, ()), walk)

    def _own(self) -> Side:
        return self.sides.rows(self.rows | given(sink=self.sides.of.sink()))

    def _in_parts(self, walk: Walk, wanted: int) -> tuple[Walk, Array]:
        """The leaves that each tile may see, in about so many parts, and the numbers of parts in the tree."""
        if walk.consecutive:
            return walk.in_parts(wanted)
        # whole leaves in order, perhaps of a cache
        size = min(subtree_for(walk.numbers.shape[1], wanted), self.sides.subtree)
        numbers = node_numbers(self.sides.of.held, size)
        numbers = jnp.broadcast_to(numbers, (self.sides.of.batch, numbers.shape[1]))
        return walk.in_runs(size), lax.cummax(jnp.maximum(numbers, 0), axis=1)

    def _over_leaves(self, program: Program, own: Side, walk: Walk) -> list[Array]:
        return self.fold(program, own, self.sides.keys(self.keys), walk, self.sides.pairs)

    def _of(self, own: Side, nodes: Side, walk: Walk) -> list[Array]:
        return self._rows(self.fold(of_parts(self.program), own, nodes, walk, lambda *_: None))

    def _rows(self, found: list[Array]) -> list[Array]:
        return [self._cut(self.sides.of_rows(x), 4) for x in found]

    def _cut(self, x: Array, axes: int) -> Array:
        return x[..., : self.width] if x.ndim == axes else x
