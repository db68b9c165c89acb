"""The TPU kernel of the state: online softmax over blocks of keys, each read once."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ...call._operands import Operands, out_dtype
from ...call._state import AttentionState, merge_all
from ...fold._tree import as_written
from .._score_program import Numbers
from ._grid import TPUGrid
from ._layout import Layout, fold_keys, fold_rows, unfold_rows
from ._score import BlockScores, block_numbers
from ._step import HIDDEN, dot, hide, load_present, visit, zero_past_end
from ._visibility import BlockRanges, block_ranges, block_visibility


def forward(operands: Operands, layout: Layout, *, interpret: bool) -> AttentionState:
    settings = layout.settings
    query, key, value = operands.qkv
    if settings.needs.part:
        query = as_written(query)
    visibility = block_visibility(operands, layout)
    grid = TPUGrid(layout, len(query))
    splits = grid.splits
    ranges = block_ranges(visibility, layout, grid.batch, splits=splits)
    numbers = block_numbers(operands, layout)
    width, value_width = query.shape[-1], value.shape[-1]
    tall_key, tall_value = layout.tall_key, layout.tall_value
    out, lse = grid.run(
        _kernel,
        ranges,
        [
            (fold_rows(query, layout), grid.of_rows(width)),
            (fold_keys(key, layout, tall=tall_key), grid.of_keys(width, tall=tall_key)),
            (fold_keys(value, layout, tall=tall_value), grid.of_keys(value_width, tall=tall_value)),
            (visibility.arrays, grid.of_visibility(visibility.arrays)),
            (numbers, grid.of_score(numbers)),
        ],
        grid.parts_like(
            query, value_width, out_dtype(operands, settings) if splits == 1 else jnp.float32
        ),
        grid.of_parts(value_width),
        [
            pltpu.VMEM((layout.row_block, 1), jnp.float32),
            pltpu.VMEM((layout.row_block, 1), jnp.float32),
            pltpu.VMEM((layout.row_block, value_width), jnp.float32),
        ],
        interpret=interpret,
        name="attention_forward",
    )
    state = AttentionState(out, lse.squeeze(-2))
    state = merge_all(state) if splits > 1 else AttentionState(out[0], state.lse[0])
    out, lse = (unfold_rows(x, layout) for x in state)
    return AttentionState(out.astype(out_dtype(operands, settings)), lse)


def _kernel(
    ranges: BlockRanges,
    query: Ref,
    key: Ref,
    value: Ref,
    visibility: dict[str, Ref],
    numbers: Numbers,
    out: Ref,
    lse: Ref,
    maximum: Ref,
    total: Ref,
    sums: Ref,
    *,
    layout: Layout,
    range_index: Callable[..., Any],
) -> None:
    """One step, of a block of rows and a block of keys; statistics stay in scratch memory.

    query `[rows, H]`, key `[keys, H]`, value `[keys, Hv]`, visibility `[1, rows]` and `[1, keys]`;
    out `[rows, Hv]`, lse `[1, rows]`; maximum and total `[rows, 1]`, sums `[rows, Hv]`, float32.
    """
    b, p, s, i, j = map(pl.program_id, range(5))
    score = BlockScores(layout, numbers, visibility)

    @pl.when(j == 0)
    def _() -> None:
        maximum[...] = jnp.full(maximum.shape, HIDDEN, maximum.dtype)
        total[...] = jnp.zeros(total.shape, total.dtype)
        sums[...] = jnp.zeros(sums.shape, sums.dtype)

    @visit(ranges, range_index(b, s, i), j, visibility)
    def _(block: Array, compared: dict[str, Ref]) -> None:
        zero_past_end(value, block, layout, tall=layout.tall_value)
        product = dot(query[...], key[...], (1, 0 if layout.tall_key else 1))
        scores = score.in_units(product)
        scores = hide(scores, compared, block, layout, turned=False)
        old = maximum[...]
        new = jnp.maximum(old, scores.max(-1, keepdims=True))
        shift = jnp.where(new == HIDDEN, 0.0, new)
        weights = jnp.exp((scores - shift) * score.unit)
        decay = jnp.exp((old - shift) * score.unit)
        maximum[...] = new
        total[...] = total[...] * decay + weights.sum(-1, keepdims=True)
        values = load_present(value, compared, tall=layout.tall_value)
        product_sums = dot(weights.astype(value.dtype), values, (1, 1 if layout.tall_value else 0))
        sums[...] = sums[...] * decay + product_sums

    @pl.when(j == pl.num_programs(4) - 1)
    def _() -> None:
        empty = total[...] == 0
        if "row_positions" in visibility:  # absent rows, as blocks that all rows see are not masked
            empty |= visibility["row_positions"][...].T < 0
        divisor, largest = jnp.where(empty, 1.0, total[...]), maximum[...] * score.unit
        # the score of a finite product may overflow
        divisor = jnp.where(largest == math.inf, math.nan, divisor)
        out[...] = jnp.where(empty, 0.0, sums[...] / divisor).astype(out.dtype)
        # the column is written as a row: a column takes 128 times the memory
        lse[...] = jnp.where(empty, HIDDEN, largest + jnp.log(divisor)).T
