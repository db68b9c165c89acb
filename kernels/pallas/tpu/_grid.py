"""Grids of the TPU kernels, block specs of their arrays, and the parts of a grid step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array

from ..._varying import result_like
from .._score_program import Numbers
from ._kernel import Layout
from ._scores import BlockRanges

# A single block of rows reads its keys in two parts at once, as v4 and v5p have two cores.
SPLITS = 2


class TPUGrid(NamedTuple):
    """The grid of a call: batch entries, key heads, splits (if any), kept blocks and iterated blocks."""

    layout: Layout
    batch: int
    keeps_keys: bool = False  # keeps blocks of keys, which iterate over rows; else rows, over keys
    parted: bool = True  # whether there is an axis of splits

    @property
    def splits(self) -> int:
        parted = self.parted and self.layout.row_blocks == 1
        return SPLITS if parted and self.layout.key_blocks >= SPLITS else 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes; only the last axis is sequential."""
        kept, iterated = self.layout.row_blocks, self.layout.key_blocks
        if self.keeps_keys:
            kept, iterated = iterated, kept
        parts = (self.splits,) if self.parted else ()
        return self.batch, self.layout.heads, *parts, kept, pl.cdiv(iterated, self.splits)

    def run(
        self,
        kernel: Callable[..., None],
        ranges: BlockRanges,
        inputs: Sequence[tuple[Any, Any]],
        results: Any,
        out_specs: Any,
        scratch: Sequence[Any],
        *,
        interpret: bool,
        name: str,
    ) -> Any:
        """Runs `kernel(ranges, *inputs, *results, *scratch, layout=, range_index=)`; inputs with their specs."""
        parameters = pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (len(self.sizes) - 1) + ("arbitrary",),
            vmem_limit_bytes=self.layout.granted,
        )
        return pl.pallas_call(
            functools.partial(kernel, layout=self.layout, range_index=self.range_index),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=self.sizes,
                in_specs=[spec for _, spec in inputs],
                out_specs=out_specs,
                scratch_shapes=scratch,
            ),
            out_shape=results,
            compiler_params=parameters,
            interpret=interpret,
            name=name,
        )(ranges, *(x for x, _ in inputs))

    def range_index(self, b: Array, *rest: Array) -> Array:
        """Index into `block_ranges` of a kept block and a split (if any)."""
        *part, i = rest
        index = b * self.sizes[-2] + i
        return index * self.splits + part[0] if part else index

    def _iterated(self, b: Array, *rest: Any) -> Array:
        *part, i, j, ranges = rest
        return step(ranges, self.range_index(b, *part, i), j)

    def row(self, b: Array, *rest: Any) -> Array:
        return self._iterated(b, *rest) if self.keeps_keys else rest[-3]

    def key(self, b: Array, *rest: Any) -> Array:
        return rest[-3] if self.keeps_keys else self._iterated(b, *rest)

    def of_rows(self, width: int) -> pl.BlockSpec:
        """The spec of a block of rows `[B, P, R, width]`."""
        shape = None, None, self.layout.row_block, width
        return pl.BlockSpec(shape, lambda b, p, *rest: (b, p, self.row(b, *rest), 0))

    def of_numbers(self) -> pl.BlockSpec:
        """The spec of a block of one number for each row, `[B, P, 1, R]`."""
        shape = None, None, 1, self.layout.row_block
        return pl.BlockSpec(shape, lambda b, p, *rest: (b, p, 0, self.row(b, *rest)))

    def of_keys(self, width: int, *, tall: bool) -> pl.BlockSpec:
        def index_map(b: Array, p: Array, *rest: object) -> tuple[Any, ...]:
            number = self.key(b, *rest)
            return (b, p, 0, number) if tall else (b, p, number, 0)

        shape = (width, self.layout.key_block) if tall else (self.layout.key_block, width)
        return pl.BlockSpec((None, None, *shape), index_map)

    def of_visibility(self, arrays: dict[str, Array]) -> dict[str, pl.BlockSpec]:
        def spec(name: str, x: Array) -> pl.BlockSpec:
            of_rows = name.startswith("row")
            block = self.layout.row_block if of_rows else self.layout.key_block

            def index_map(b: Array, p: Array, *rest: object) -> tuple[Any, ...]:
                # an array may be shared by the whole batch, or have one block for all blocks
                number = (self.row if of_rows else self.key)(b, *rest) if x.shape[-1] > block else 0
                return b if len(x) > 1 else 0, 0, number

            return pl.BlockSpec((None, 1, block), index_map)

        return {name: spec(name, x) for name, x in arrays.items()}

    def of_score(self, numbers: Numbers) -> Numbers:
        """Specs of the score's numbers, and of their sums and tangents."""

        def spec(x: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
            shape, many = (None, None, x.shape[2], self.layout.row_block), x.shape[0] > 1
            return pl.BlockSpec(
                shape, lambda b, p, *rest: (b if many else 0, p, 0, self.row(b, *rest))
            )

        return jax.tree.map(spec, numbers)

    def of_parts(self, width: int) -> list[pl.BlockSpec]:
        """Specs of the results of each split: rows `[S, B, P, R, width]` and numbers `[S, B, P, 1, R]`."""
        shape, rows = (None, None, None), self.layout.row_block
        return [
            pl.BlockSpec((*shape, rows, width), lambda b, p, s, i, *_: (s, b, p, i, 0)),
            pl.BlockSpec((*shape, 1, rows), lambda b, p, s, i, *_: (s, b, p, 0, i)),
        ]

    def parts_like(self, query: Array, width: int, dtype: DTypeLike) -> list[jax.ShapeDtypeStruct]:
        """Types of the results of `of_parts`; rows have `dtype`."""
        rows = self.layout.row_blocks * self.layout.row_block
        shape = self.splits, self.batch, self.layout.heads
        return [
            result_like(query, (*shape, rows, width), dtype),
            result_like(query, (*shape, 1, rows), jnp.float32),
        ]


def step(ranges: BlockRanges, range_index: Array, number: Array) -> Array:
    """The block of a step of a range; steps past the end repeat the last block, which is not read again."""
    first, stop = ranges.first[range_index], ranges.stop[range_index]
    index = jnp.minimum(first + number, jnp.maximum(stop - 1, 0))
    return index if ranges.order is None else ranges.order[index]


def visit(
    ranges: BlockRanges, range_index: Array, number: Array, visibility: dict[str, Ref]
) -> Callable[[Callable[[Array, dict[str, Ref]], None]], None]:
    """Decorates the body of a step, which takes a block and the arrays to compare for its mask.

    Positions and segments are not compared in the run of blocks where all rows see all keys, which is
    most of a long causal context.
    """
    first, stop, open_first, open_stop = (x[range_index] for x in ranges[:4])
    index = first + number
    heads = {name: x for name, x in visibility.items() if name.endswith("heads")}

    def run(do: Callable[[Array, dict[str, Ref]], None]) -> None:
        if len(heads) == len(visibility):
            pl.when(index < stop)(lambda: do(index, visibility))
            return
        block = index if ranges.order is None else step(ranges, range_index, number)
        is_open = (open_first <= index) & (index < open_stop)
        pl.when((index < stop) & is_open)(lambda: do(block, heads))
        pl.when((index < stop) & jnp.logical_not(is_open))(lambda: do(block, visibility))

    return run


def zero_past_end(x: Ref, key_block: Array, layout: Layout, *, tall: bool) -> None:
    """Writes zeros past the end of keys or values in their last block, where memory might hold NaN."""
    remainder = layout.keys % layout.key_block
    if remainder:

        @pl.when(key_block == layout.key_blocks - 1)
        def _() -> None:
            past = (slice(None), slice(remainder, None)) if tall else slice(remainder, None)
            x[past] = jnp.zeros_like(x[past])


def load_present(x: Ref, visibility: dict[str, Ref], *, tall: bool) -> Array:
    """A block of keys or values with zeros for absent ones, by their positions."""
    if "key_positions" not in visibility:
        return x[...]
    positions = visibility["key_positions"][...]
    present = (positions if tall else positions.T) >= 0
    return jnp.where(present, x[...], jnp.zeros((), x.dtype))
