"""The grid of the TPU kernels of the state and of its tangent."""

from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ._layout import Layout
from ._step import key_spec, step, visibility_specs
from ._visibility import BlockRanges, BlockVisibility

# A single block of rows reads its keys in two parts at once, as v4 and v5p have two cores.
SPLITS = 2


def compiler_params(layout: Layout, axes: int) -> pltpu.CompilerParams:
    """The parameters of a kernel whose steps are sequential along the last axis of its grid alone."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel",) * (axes - 1) + ("arbitrary",),
        vmem_limit_bytes=layout.granted,
    )


class Grid(NamedTuple):
    """The grid of a call: batch entries, key heads, parts, blocks of rows, and blocks of their keys."""

    layout: Layout
    batch: int

    @property
    def splits(self) -> int:
        """The parts of the keys."""
        return SPLITS if self.layout.row_blocks == 1 and self.layout.key_blocks >= SPLITS else 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The steps along each axis; only those of the last are sequential."""
        layout = self.layout
        steps = pl.cdiv(layout.key_blocks, self.splits)
        return self.batch, layout.heads, self.splits, layout.row_blocks, steps

    def range_index(self, b: Array, s: Array, i: Array) -> Array:
        """The index of a range of `block_ranges`."""
        return (b * self.layout.row_blocks + i) * self.splits + s

    def row(self, b: Array, s: Array, i: Array, j: Array, _: BlockRanges) -> Array:
        """The block of rows of a step."""
        return i

    def key(self, b: Array, s: Array, i: Array, j: Array, ranges: BlockRanges) -> Array:
        """The block of keys of a step."""
        return step(ranges, self.range_index(b, s, i), j)

    def of_rows(self, width: int) -> pl.BlockSpec:
        """The spec of a block of rows `[B, P, R, width]`."""

        def index_map(b: Array, p: Array, s: Array, i: Array, *_: Any) -> tuple[Any, ...]:
            return b, p, i, 0

        return pl.BlockSpec((None, None, self.layout.row_block, width), index_map)

    def of_numbers(self) -> pl.BlockSpec:
        """The spec of a block of one number for each row, `[B, P, 1, R]`."""

        def index_map(b: Array, p: Array, s: Array, i: Array, *_: Any) -> tuple[Any, ...]:
            return b, p, 0, i

        return pl.BlockSpec((None, None, 1, self.layout.row_block), index_map)

    def of_keys(self, width: int, *, tall: bool) -> pl.BlockSpec:
        """The spec of a block of keys or values."""
        return key_spec(width, self.layout, self.key, tall=tall)

    def of_visibility(self, visibility: BlockVisibility) -> dict[str, pl.BlockSpec]:
        """The specs of the visibility arrays."""
        return visibility_specs(visibility.arrays, self.layout, self.row, self.key)

    def of_parts(self, width: int) -> list[pl.BlockSpec]:
        """The specs of results for each part: rows `[S, B, P, R, width]` and numbers `[S, B, P, 1, R]`."""

        def rows(b: Array, p: Array, s: Array, i: Array, *_: Any) -> tuple[Any, ...]:
            return s, b, p, i, 0

        def numbers(b: Array, p: Array, s: Array, i: Array, *_: Any) -> tuple[Any, ...]:
            return s, b, p, 0, i

        return [
            pl.BlockSpec((None, None, None, self.layout.row_block, width), rows),
            pl.BlockSpec((None, None, None, 1, self.layout.row_block), numbers),
        ]
