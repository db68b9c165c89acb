"""The TPU kernels of the gradients: one iterates over the keys of rows, one over the rows of keys."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ...call._operands import Operands, cotangents
from ...call._state import AttentionState
from ...xla._blockwise import backward_rows, row_cotangents
from .._common import result_like
from .._score_program import Numbers
from ._grid import compiler_params
from ._layout import Layout, fold_keys, fold_rows, unfold_keys, unfold_rows
from ._score import (
    BlockScores,
    block_cotangents,
    block_numbers,
    number_specs,
    sums_like,
    sums_scratch,
    write_sums,
    zero_sums,
)
from ._step import dot, hide, key_spec, load_present, step, visibility_specs, visit, zero_past_end
from ._visibility import BlockRanges, BlockVisibility, block_ranges, block_visibility


def backward(
    operands: Operands,
    layout: Layout,
    state: AttentionState,
    cotangent: AttentionState,
    *,
    interpret: bool,
) -> Operands:
    """The cotangents of query, key, value and score.

    Two kernels recompute the scores. One sums over the keys of a block of rows, the other over the rows of
    a block of keys, so that each block of results is written once.
    """
    key, value = operands.key, operands.value
    query, d_out, lse, delta = backward_rows(
        operands, layout.settings, row_cotangents(state, cotangent)
    )
    lse = fold_rows(lse, layout, jnp.inf)[
        :, :, None
    ]  # also for rows that pad a block: e^{s - inf} = 0
    delta = fold_rows(delta, layout)[:, :, None]
    rows = (fold_rows(query, layout), fold_rows(d_out.astype(value.dtype), layout), lse, delta)
    keys = (
        fold_keys(key, layout, tall=layout.tall_key),
        fold_keys(value, layout, tall=layout.tall_value),
    )
    visibility = block_visibility(operands, layout)
    numbers = block_numbers(operands, layout)
    d_query, sums = _rows_over_keys(rows, keys, visibility, numbers, layout, interpret=interpret)
    d_key, d_value = _keys_over_rows(rows, keys, visibility, numbers, layout, interpret=interpret)
    return cotangents(
        unfold_rows(d_query, layout),
        unfold_keys(d_key, layout, tall=layout.tall_key),
        unfold_keys(d_value, layout, tall=layout.tall_value),
        score_arrays=block_cotangents(operands, layout, sums),
    )


def _specs(
    rows: tuple[Any, ...], layout: Layout, row: Callable[..., Any], key: Callable[..., Any]
) -> list[pl.BlockSpec]:
    """Blocks of query, dout, lse, delta, key and value; `row` and `key` return their indices."""

    def of_row(b: Array, p: Array, *rest: Array | BlockRanges) -> tuple[int | Array, ...]:
        return b, p, row(b, *rest), 0

    def of_row_number(b: Array, p: Array, *rest: Array | BlockRanges) -> tuple[int | Array, ...]:
        return b, p, 0, row(b, *rest)

    width, value_width = (x.shape[-1] for x in rows[:2])
    return [
        *(pl.BlockSpec((None, None, layout.row_block, x.shape[-1]), of_row) for x in rows[:2]),
        *(pl.BlockSpec((None, None, 1, layout.row_block), of_row_number) for _ in rows[2:]),
        key_spec(width, layout, key, tall=layout.tall_key),
        key_spec(value_width, layout, key, tall=layout.tall_value),
    ]


def _rows_over_keys(
    rows: tuple[Any, ...],
    keys: tuple[Any, ...],
    visibility: BlockVisibility,
    numbers: Numbers,
    layout: Layout,
    *,
    interpret: bool,
) -> Any:
    query = rows[0]
    batch, width = query.shape[0], query.shape[-1]
    ranges = block_ranges(visibility, layout, batch)

    def range_index(b: Array, i: Array) -> Array:
        return b * layout.row_blocks + i

    def row(b: Array, i: Array, j: Array, _: BlockRanges) -> Array:
        return i

    def key(b: Array, i: Array, j: Array, ranges: BlockRanges) -> Array:
        return step(ranges, range_index(b, i), j)

    specs = _specs(rows, layout, row, key)
    like = sums_like(numbers, batch, query)
    return pl.pallas_call(
        functools.partial(_rows_kernel, layout=layout, range_index=range_index),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, layout.heads, layout.row_blocks, layout.key_blocks),
            in_specs=[
                *specs,
                visibility_specs(visibility.arrays, layout, row, key),
                number_specs(numbers, layout, row),
            ],
            out_specs=(specs[0], number_specs(like, layout, row)),
            scratch_shapes=[
                pltpu.VMEM((layout.row_block, width), jnp.float32),
                sums_scratch(numbers, layout),
            ],
        ),
        out_shape=(result_like(query, query.shape, query.dtype), like),
        compiler_params=compiler_params(layout, 4),
        interpret=interpret,
        name="attention_backward_rows",
    )(ranges, *rows, *keys, visibility.arrays, numbers)


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
    """One step, of a block of rows and a block of keys: `dq += ds k`.

    query and d_query `[rows, H]`, d_out `[rows, Hv]`, lse and delta `[1, rows]`, key `[keys, H]`,
    value `[keys, Hv]`, visibility `[1, rows]` and `[1, keys]`; sums `[rows, H]`, float32.
    """
    b, p, i, j = map(pl.program_id, range(4))

    @pl.when(j == 0)
    def _() -> None:
        sums[...] = jnp.zeros(sums.shape, sums.dtype)
        zero_sums(score_sums)

    @visit(ranges, range_index(b, i), j, visibility)
    def _(block: Array, compared: dict[str, Ref]) -> None:
        zero_past_end(key, block, layout, tall=layout.tall_key)
        zero_past_end(value, block, layout, tall=layout.tall_value)
        key_width, value_width = _widths(layout)
        keys = load_present(key, compared, tall=layout.tall_key)
        values = load_present(value, compared, tall=layout.tall_value)
        score = BlockScores(layout, numbers, visibility)
        scores, pullback = score.vjp(dot(query[...], keys, (1, key_width)))
        weights = jnp.exp(hide(scores, compared, block, layout, turned=False) - lse[...].T)
        d_scores = weights * (dot(d_out[...], values, (1, value_width)) - delta[...].T)
        d_scores = pullback(d_scores, score_sums)
        sums[...] += dot(d_scores.astype(key.dtype), keys, (1, 1 - key_width))

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        d_query[...] = (sums[...] * layout.settings.scale).astype(d_query.dtype)
        write_sums(d_score, score_sums)


def _keys_over_rows(
    rows: tuple[Any, ...],
    keys: tuple[Any, ...],
    visibility: BlockVisibility,
    numbers: Numbers,
    layout: Layout,
    *,
    interpret: bool,
) -> Any:
    batch = len(rows[0])
    ranges = block_ranges(visibility, layout, batch, of_keys=True)

    def range_index(b: Array, i: Array) -> Array:
        return b * layout.key_blocks + i

    def key(b: Array, i: Array, j: Array, _: BlockRanges) -> Array:
        return i

    def row(b: Array, i: Array, j: Array, ranges: BlockRanges) -> Array:
        return step(ranges, range_index(b, i), j)

    specs = _specs(rows, layout, row, key)
    return pl.pallas_call(
        functools.partial(_keys_kernel, layout=layout, range_index=range_index),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, layout.heads, layout.key_blocks, layout.row_blocks),
            in_specs=[
                *specs,
                visibility_specs(visibility.arrays, layout, row, key),
                number_specs(numbers, layout, row),
            ],
            out_specs=specs[-2:],
            scratch_shapes=[
                pltpu.VMEM((layout.key_block, x.shape[-1]), jnp.float32) for x in rows[:2]
            ],
        ),
        out_shape=[result_like(rows[0], x.shape, x.dtype) for x in keys],
        compiler_params=compiler_params(layout, 4),
        interpret=interpret,
        name="attention_backward_keys",
    )(ranges, *rows, *keys, visibility.arrays, numbers)


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
    """One step, of a block of keys and a block of rows: `dv += P^T dout` and `dk += ds^T q`.

    Scores are `[keys, rows]`, so that no matrix is transposed. Keys past the end only enter rows of
    the results that are not written. Arguments as those of `_rows_kernel`;
    d_key and key_sums `[keys, H]`, d_value and value_sums `[keys, Hv]`.
    """
    b, p, i, j = map(pl.program_id, range(4))

    @pl.when(j == 0)
    def _() -> None:
        key_sums[...] = jnp.zeros(key_sums.shape, key_sums.dtype)
        value_sums[...] = jnp.zeros(value_sums.shape, value_sums.dtype)

    @visit(ranges, range_index(b, i), j, visibility)
    def _(block: Array, compared: dict[str, Ref]) -> None:
        key_width, value_width = _widths(layout)
        keys = load_present(key, compared, tall=layout.tall_key)
        values = load_present(value, compared, tall=layout.tall_value)
        score = BlockScores(layout, numbers, visibility, turned=True)
        scores, pullback = score.vjp(dot(keys, query[...], (key_width, 1)))
        weights = jnp.exp(hide(scores, compared, i, layout, turned=True) - lse[...])
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


def _widths(layout: Layout) -> tuple[int, int]:
    """The axes of the widths in a block of keys and in one of values."""
    return 0 if layout.tall_key else 1, 0 if layout.tall_value else 1
