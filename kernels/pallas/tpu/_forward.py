"""The TPU kernels of the state and of its tangent: one pass over the keys of each block of rows.

The state is computed by online softmax (Milakov and Gimelshein, arXiv 1805.02867). The tangent takes its weights from
the saved lse, so that sums over parts of the keys add up; its equations are in `AbstractKernel.tangent`. A kernel's
parameters are the references that Pallas passes.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ...call._operands import Operands, out_dtype
from ...call._state import AttentionState, holds_keys, merge_all
from ...fold._tree import as_written
from .._rows import moving_arrays
from .._score_program import Numbers
from .._tiles import dot
from ._grid import TPUGrid, load_present, visit, zero_past_end
from ._kernel import Layout, fold_keys, fold_rows, unfold_rows
from ._scores import (
    HIDDEN,
    BlockRanges,
    BlockScores,
    block_directions,
    block_numbers,
    block_ranges,
    block_visibility,
    hide,
)


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
    # One step, of a block of rows and a block of keys; statistics stay in scratch memory.
    # query [rows, H], key [keys, H], value [keys, Hv], visibility [1, rows] and [1, keys]; out [rows, Hv],
    # lse [1, rows]; maximum and total [rows, 1], sums [rows, Hv], float32
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
        key_width, value_width = layout.width_axes
        product = dot(query[...], key[...], (1, key_width))
        scores = score.in_units(product)
        scores = hide(scores, compared, block, layout, turned=False)
        # m' = max(m, max S); l = l e^(m - m') + sum e^(S - m'); o = o e^(m - m') + e^(S - m') V
        old = maximum[...]
        new = jnp.maximum(old, scores.max(-1, keepdims=True))
        shift = jnp.where(new == HIDDEN, 0.0, new)
        weights = jnp.exp((scores - shift) * score.unit)
        decay = jnp.exp((old - shift) * score.unit)
        maximum[...] = new
        total[...] = total[...] * decay + weights.sum(-1, keepdims=True)
        values = load_present(value, compared, tall=layout.tall_value)
        product_sums = dot(weights.astype(value.dtype), values, (1, 1 - value_width))
        sums[...] = sums[...] * decay + product_sums

    @pl.when(j == pl.num_programs(4) - 1)
    def _() -> None:
        empty = total[...] == 0
        if "row_positions" in visibility:  # absent rows, as blocks that all rows see are not masked
            empty |= visibility["row_positions"][...].T < 0
        # out = o / l, lse = m + log l
        divisor, largest = jnp.where(empty, 1.0, total[...]), maximum[...] * score.unit
        # the score of a finite product may overflow
        divisor = jnp.where(largest == math.inf, math.nan, divisor)
        out[...] = jnp.where(empty, 0.0, sums[...] / divisor).astype(out.dtype)
        # written as a row: tiles of 128 lanes would pad a column to 128 times its size
        lse[...] = jnp.where(empty, HIDDEN, largest + jnp.log(divisor)).T


def tangent(
    operands: Operands,
    layout: Layout,
    state: AttentionState,
    directions: Operands,
    *,
    interpret: bool,
) -> AttentionState:
    query, value = operands.query, operands.value
    width, value_width = query.shape[-1], value.shape[-1]
    visibility = block_visibility(operands, layout)
    grid = TPUGrid(layout, len(query))
    ranges = block_ranges(visibility, layout, grid.batch, splits=grid.splits)
    of_score = (block_numbers(operands, layout), block_directions(operands, layout, directions))
    tall = {"key": layout.tall_key, "value": layout.tall_value}
    specs = {
        "query": grid.of_rows(width),
        "key": grid.of_keys(width, tall=layout.tall_key),
        "value": grid.of_keys(value_width, tall=layout.tall_value),
    }

    def folded(arrays: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Any]]:
        """Returns the arrays in their kernel layouts, and their specs, by name."""
        blocks = {
            name: fold_keys(x, layout, tall=tall[name]) if name in tall else fold_rows(x, layout)
            for name, x in arrays.items()
        }
        return blocks, {name: specs[name] for name in blocks}

    # fully masked rows and padding rows have lse = inf, and so weights e^(s - inf) = 0
    lse = fold_rows(jnp.where(holds_keys(state.lse), state.lse, jnp.inf), layout, jnp.inf)
    out, lse = grid.run(
        _tangent_kernel,
        ranges,
        [
            folded(moving_arrays(operands)),
            folded(moving_arrays(directions)),
            (fold_rows(state.out, layout), grid.of_rows(value_width)),
            (lse[:, :, None], grid.of_numbers()),
            (visibility.arrays, grid.of_visibility(visibility.arrays)),
            (of_score, tuple(None if x is None else grid.of_score(x) for x in of_score)),
        ],
        grid.parts_like(query, value_width, state.out.dtype if grid.splits == 1 else jnp.float32),
        grid.of_parts(value_width),
        [
            pltpu.VMEM((layout.row_block, 1), jnp.float32),
            pltpu.VMEM((layout.row_block, value_width), jnp.float32),
        ],
        interpret=interpret,
        name="attention_tangent",
    )
    # parts of the keys add up, as all weights are relative to the lse of the whole row
    out, lse = (unfold_rows(x.sum(0), layout) for x in (out, lse.squeeze(-2)))
    return AttentionState(out.astype(state.out.dtype), lse)


def _tangent_kernel(
    ranges: BlockRanges,
    fixed: dict[str, Ref],
    moving: dict[str, Ref],
    out: Ref,
    lse: Ref,
    visibility: dict[str, Ref],
    score_numbers: tuple[Numbers, Numbers | None],
    d_out: Ref,
    d_lse: Ref,
    total: Ref,
    sums: Ref,
    *,
    layout: Layout,
    range_index: Callable[..., Any],
) -> None:
    # One step, of a block of rows and a block of keys: total += P dS, sums += P (dS V + dV).
    # in fixed and in moving: query [rows, H], key [keys, H], value [keys, Hv]; out and d_out [rows, Hv], lse and
    # d_lse [1, rows], visibility [1, rows] and [1, keys]; total [rows, 1] and sums [rows, Hv], float32
    b, p, s, i, j = map(pl.program_id, range(5))
    numbers, d_numbers = score_numbers
    scores_move = bool(moving.keys() & {"query", "key"}) or d_numbers is not None

    @pl.when(j == 0)
    def _() -> None:
        total[...] = jnp.zeros(total.shape, total.dtype)
        sums[...] = jnp.zeros(sums.shape, sums.dtype)

    @visit(ranges, range_index(b, s, i), j, visibility)
    def _(block: Array, compared: dict[str, Ref]) -> None:
        def keys(x: Ref, *, tall: bool) -> Array:
            zero_past_end(x, block, layout, tall=tall)
            return load_present(x, compared, tall=tall)

        key_width, value_width = layout.width_axes
        query, over, of_values = fixed["query"][...], (1, key_width), (1, 1 - value_width)
        key = keys(fixed["key"], tall=layout.tall_key)
        product, score = dot(query, key, over), BlockScores(layout, numbers, visibility)
        scores = hide(score.scores(product), compared, block, layout, turned=False)
        weights = jnp.exp(scores - lse[...].T)
        d_scores = []
        if "query" in moving:
            d_scores.append(dot(moving["query"][...], key, over))
        if "key" in moving:
            d_scores.append(dot(query, keys(moving["key"], tall=layout.tall_key), over))
        if scores_move:
            # dS = scale (dQ K^T + Q dK^T); dlse = sum P dS; dout = P (dS V + dV) - dlse out
            change: Any = None
            if d_scores:
                change = sum(d_scores[1:], d_scores[0]) * layout.settings.scale
            terms = weights * score.jvp(change, product, d_numbers)
            total[...] += terms.sum(-1, keepdims=True)
            value = keys(fixed["value"], tall=layout.tall_value)
            sums[...] += dot(terms.astype(value.dtype), value, of_values)
        if "value" in moving:
            d_value = keys(moving["value"], tall=layout.tall_value)
            sums[...] += dot(weights.astype(d_value.dtype), d_value, of_values)

    @pl.when(j == pl.num_programs(4) - 1)
    def _() -> None:
        has_keys = lse[...].T != jnp.inf
        # dout = Σ P (dS V + dV) - dlse out
        d_out_rows = sums[...]
        if scores_move:
            d_out_rows -= total[...] * out[...].astype(jnp.float32)
        d_out[...] = jnp.where(has_keys, d_out_rows, 0.0).astype(d_out.dtype)
        d_lse[...] = jnp.where(has_keys, total[...], 0.0).T
