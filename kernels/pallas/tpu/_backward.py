"""The TPU backward kernels: dQ loops over keys, dK and dV loop over queries.

A kernel's parameters are the references that Pallas passes. Equations: FlashAttention-2 (Dao, arXiv 2307.08691).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..._varying import result_like
from ...call._operands import Operands, cotangents
from ...call._state import AttentionState
from ...xla._blockwise_derivatives import backward_rows, row_cotangents
from .._score_program import Numbers
from .._tiles import dot
from ._grid import TPUGrid, load_present, visit, zero_past_end
from ._kernel import Layout, fold_keys, fold_rows, unfold_keys, unfold_rows
from ._scores import (
    BlockRanges,
    BlockScores,
    TPUVisibility,
    block_cotangents,
    block_numbers,
    block_ranges,
    block_visibility,
    hide,
    sums_like,
    sums_scratch,
    write_sums,
    zero_sums,
)


def backward(
    operands: Operands,
    layout: Layout,
    state: AttentionState,
    cotangent: AttentionState,
    *,
    interpret: bool,
) -> Operands:
    """Returns the cotangents of query, key, value and score.

    Both kernels recompute the scores. Each sums over the blocks that it iterates over, so that every block of results
    is written once.
    """
    key, value = operands.key, operands.value
    query, d_out, lse, delta = backward_rows(
        operands, layout.settings, row_cotangents(state, cotangent)
    )
    # padding rows have lse = inf, and so weights e^(s - inf) = 0
    lse = fold_rows(lse, layout, jnp.inf)[:, :, None]
    delta = fold_rows(delta, layout)[:, :, None]
    rows = (fold_rows(query, layout), fold_rows(d_out.astype(value.dtype), layout), lse, delta)
    keys = (
        fold_keys(key, layout, tall=layout.tall_key),
        fold_keys(value, layout, tall=layout.tall_value),
    )
    visibility = block_visibility(operands, layout)
    numbers = block_numbers(operands, layout)
    d_query, sums = _run(False, rows, keys, visibility, numbers, layout, interpret=interpret)
    d_key, d_value = _run(True, rows, keys, visibility, numbers, layout, interpret=interpret)
    return cotangents(
        unfold_rows(d_query, layout),
        unfold_keys(d_key, layout, tall=layout.tall_key),
        unfold_keys(d_value, layout, tall=layout.tall_value),
        score_arrays=block_cotangents(operands, layout, sums),
    )


def _run(
    keeps_keys: bool,
    rows: tuple[Array, ...],
    keys: tuple[Array, ...],
    visibility: TPUVisibility,
    numbers: Numbers,
    layout: Layout,
    *,
    interpret: bool,
) -> Any:
    query, d_out = rows[:2]
    grid = TPUGrid(layout, len(query), keeps_keys, parted=False)
    widths = query.shape[-1], d_out.shape[-1]
    specs = [
        *map(grid.of_rows, widths),
        *(grid.of_numbers() for _ in rows[2:]),
        grid.of_keys(widths[0], tall=layout.tall_key),
        grid.of_keys(widths[1], tall=layout.tall_value),
    ]
    results: Any = [result_like(query, x.shape, x.dtype) for x in keys]
    out_specs: Any = specs[-2:]
    scratch = [pltpu.VMEM((layout.key_block, width), jnp.float32) for width in widths]
    if not keeps_keys:
        sums = sums_like(numbers, grid.batch, query)
        results = result_like(query, query.shape, query.dtype), sums
        out_specs = specs[0], grid.of_score(sums)
        rows_scratch: Any = pltpu.VMEM((layout.row_block, widths[0]), jnp.float32)
        scratch = [rows_scratch, sums_scratch(numbers, layout)]
    return grid.run(
        _keys_kernel if keeps_keys else _rows_kernel,
        block_ranges(visibility, layout, grid.batch, of_keys=keeps_keys),
        [
            *zip((*rows, *keys), specs, strict=True),
            (visibility.arrays, grid.of_visibility(visibility.arrays)),
            (numbers, grid.of_score(numbers)),
        ],
        results,
        out_specs,
        scratch,
        interpret=interpret,
        name="attention_backward_" + ("keys" if keeps_keys else "rows"),
    )


def _rows_kernel(
    ranges: BlockRanges,
    query: Ref,
    d_out: Ref,
    lse: Ref,
    delta: Ref,
    key: Ref,
    value: Ref,
    visibility: dict[str, Ref],
    numbers: Numbers,
    d_query: Ref,
    d_score: Numbers,
    sums: Ref,
    score_sums: Numbers,
    *,
    layout: Layout,
    range_index: Callable[..., Any],
) -> None:
    # One step of dQ, of a block of rows and a block of keys: dQ += dS K.
    # query and d_query [rows, H], d_out [rows, Hv], lse and delta [1, rows], key [keys, H], value [keys, Hv],
    # visibility [1, rows] and [1, keys]; sums [rows, H], float32
    b, p, i, j = map(pl.program_id, range(4))

    @pl.when(j == 0)
    def _() -> None:
        sums[...] = jnp.zeros(sums.shape, sums.dtype)
        zero_sums(score_sums)

    @visit(ranges, range_index(b, i), j, visibility)
    def _(block: Array, compared: dict[str, Ref]) -> None:
        zero_past_end(key, block, layout, tall=layout.tall_key)
        zero_past_end(value, block, layout, tall=layout.tall_value)
        key_width, value_width = layout.width_axes
        keys = load_present(key, compared, tall=layout.tall_key)
        values = load_present(value, compared, tall=layout.tall_value)
        score = BlockScores(layout, numbers, visibility)
        scores, pullback = score.vjp(dot(query[...], keys, (1, key_width)))
        # P = e^(S - lse), recomputed
        weights = jnp.exp(hide(scores, compared, block, layout, turned=False) - lse[...].T)
        # dS = P (dOut V^T - delta), with delta = dOut·out - dlse per row
        d_scores = weights * (dot(d_out[...], values, (1, value_width)) - delta[...].T)
        d_scores = pullback(d_scores, score_sums)
        sums[...] += dot(d_scores.astype(key.dtype), keys, (1, 1 - key_width))

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        d_query[...] = (sums[...] * layout.settings.scale).astype(d_query.dtype)
        write_sums(d_score, score_sums)


def _keys_kernel(
    ranges: BlockRanges,
    query: Ref,
    d_out: Ref,
    lse: Ref,
    delta: Ref,
    key: Ref,
    value: Ref,
    visibility: dict[str, Ref],
    numbers: Numbers,
    d_key: Ref,
    d_value: Ref,
    key_sums: Ref,
    value_sums: Ref,
    *,
    layout: Layout,
    range_index: Callable[..., Any],
) -> None:
    # One step of dK and dV, of a block of keys and a block of rows: dV += P^T dOut, dK += dS^T Q.
    # Scores are [keys, rows], so that no matrix is transposed. Keys past the end only enter rows of the results that
    # are not written. Shapes as in `_rows_kernel`; d_key and key_sums [keys, H], d_value and value_sums [keys, Hv]
    b, p, i, j = map(pl.program_id, range(4))

    @pl.when(j == 0)
    def _() -> None:
        key_sums[...] = jnp.zeros(key_sums.shape, key_sums.dtype)
        value_sums[...] = jnp.zeros(value_sums.shape, value_sums.dtype)

    @visit(ranges, range_index(b, i), j, visibility)
    def _(block: Array, compared: dict[str, Ref]) -> None:
        key_width, value_width = layout.width_axes
        keys = load_present(key, compared, tall=layout.tall_key)
        values = load_present(value, compared, tall=layout.tall_value)
        score = BlockScores(layout, numbers, visibility, turned=True)
        scores, pullback = score.vjp(dot(keys, query[...], (key_width, 1)))
        weights = jnp.exp(hide(scores, compared, i, layout, turned=True) - lse[...])
        # dV = P^T dOut; dK = scale dS^T Q, scaled when it is written
        value_sums[...] += dot(weights.astype(d_out.dtype), d_out[...], (1, 0))
        d_scores = weights * (dot(values, d_out[...], (value_width, 1)) - delta[...])
        d_scores = pullback(d_scores, Numbers())
        key_sums[...] += dot(d_scores.astype(query.dtype), query[...], (1, 0))

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        results = key_sums[...] * layout.settings.scale, value_sums[...]
        for x, ref, tall in zip(
            results, (d_key, d_value), (layout.tall_key, layout.tall_value), strict=True
        ):
            ref[...] = (x.T if tall else x).astype(ref.dtype)
