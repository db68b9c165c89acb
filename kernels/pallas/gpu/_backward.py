"""The GPU kernels of the gradients: one iterates over the keys of rows, one over the rows of keys.

A program alone sums the gradient of its tile, in float32, so the order of sums is deterministic. The
formulas are those of FlashAttention-2 (Dao, arXiv 2307.08691).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from ..._varying import result_like
from ...call._operands import Operands, cotangents
from ...call._state import AttentionState
from ...xla._blockwise import backward_rows, row_cotangents
from .._rows import BlockList, Visibility, tile_ranges, visibility_of
from .._score import score_cotangents, score_numbers
from .._score_program import Numbers
from . import _tile as tiles
from ._plan import TritonPlan
from ._score import TritonScores, sums_like


def backward(
    operands: Operands,
    query_plan: TritonPlan,
    key_plan: TritonPlan,
    state: AttentionState,
    cotangent: AttentionState,
    *,
    interpret: bool,
) -> Operands:
    query, key, value = operands.qkv
    rows = backward_rows(operands, query_plan.settings, row_cotangents(state, cotangent))
    lse = rows.lse * tiles.LOG2_E  # in bits
    d_out = rows.d_out.astype(value.dtype)
    arrays = (rows.query, key, value, d_out, lse, rows.delta)
    numbers = score_numbers(operands, query_plan.score)

    def run(
        kernel: Callable[..., None], plan: TritonPlan, *like: Array
    ) -> tuple[list[Array], Numbers]:
        visibility = visibility_of(operands, plan)
        of_keys = kernel is _key_kernel
        count = plan.key_tiles if of_keys else plan.row_tiles
        sums = Numbers() if of_keys else sums_like(plan, numbers, query)
        parts, sums = pl.pallas_call(
            functools.partial(kernel, plan, tiles.exp2_of(interpret=interpret)),
            grid=(count * plan.kv_heads * plan.batch * plan.splits,),
            out_shape=(
                [
                    result_like(
                        x, (plan.splits, *x.shape), x.dtype if plan.splits == 1 else lse.dtype
                    )
                    for x in like
                ],
                sums,
            ),
            compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
            interpret=interpret,
            name="attention_backward_" + ("key" if of_keys else "query"),
        )(*arrays, visibility, tile_ranges(operands, visibility, plan, of_keys=of_keys), numbers)
        cotangents = [part.sum(0).astype(x.dtype) for part, x in zip(parts, like, strict=True)]
        return cotangents, jax.tree.map(lambda x: x.sum(0), sums)

    (d_query,), sums = run(_query_kernel, query_plan, query)
    (d_key, d_value), _ = run(_key_kernel, key_plan, key, value)
    to_score = score_cotangents(operands, query_plan.score, sums)
    return cotangents(d_query, d_key, d_value, score_arrays=to_score)


def _query_kernel(
    plan: TritonPlan,
    exp2: tiles.Exp2,
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    visibility: Visibility,
    ranges: Ref | BlockList | None,
    numbers: Numbers,
    results: list[Ref],
    sums_refs: Numbers,
) -> None:
    program = tiles.program_index(plan, of_keys=False)
    rows = tiles.rows(plan, program.tile, program.kv_head)
    query = tiles.load_rows(query_ref, program, rows, plan.width)
    d_out = tiles.load_rows(out_ref, program, rows, plan.value_width)
    lse = tiles.load_numbers(lse_ref, program, rows, jnp.inf)
    delta = tiles.load_numbers(delta_ref, program, rows, 0.0)
    score = TritonScores(plan, numbers, visibility, program)
    row_inputs = score.row_inputs(rows)

    def step(tile: Array, carry: tuple[Array, Numbers], masked: bool) -> tuple[Array, Numbers]:
        sums, score_sums = carry
        key = tiles.load_keys(plan, key_ref, program, tile, plan.width, not masked)
        scores, pull = score.vjp(tiles.product(query, key, 1, 1), row_inputs, tile)
        seen = None
        if masked:
            seen = tiles.seen(plan, visibility, program, rows, tile, keys_first=False)
            scores = jnp.where(seen, scores, -jnp.inf)
        weights = exp2(scores, score.unit, lse[:, None])
        value = tiles.load_keys(plan, value_ref, program, tile, plan.value_width, not masked)
        if masked:
            key, value = tiles.zero_hidden(plan, visibility, program, tile, key, value)
        d_scores = weights * (tiles.product(d_out, value, 1, 1) - delta[:, None])
        d_scores, added = pull(d_scores, seen)
        score_sums = jax.tree.map(jnp.add, score_sums, added)
        return sums + tiles.product(d_scores.astype(key.dtype), key, 1, 0), score_sums

    tile_range = tiles.tile_range(plan, ranges, program, of_keys=False)
    start = jnp.zeros(query.shape, jnp.float32), score.no_sums()
    sums, score_sums = tiles.loop_over(plan, tile_range, program, step, start)
    tiles.store_rows(results[0], program, rows, sums * plan.settings.scale, plan.width)
    score.store(sums_refs, rows, score_sums)


def _key_kernel(
    plan: TritonPlan,
    exp2: tiles.Exp2,
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    visibility: Visibility,
    ranges: Ref | BlockList | None,
    numbers: Numbers,
    results: list[Ref],
    _: Numbers,
) -> None:
    program = tiles.program_index(plan, of_keys=True)
    key = tiles.load_keys(plan, key_ref, program, program.tile, plan.width, False)
    value = tiles.load_keys(plan, value_ref, program, program.tile, plan.value_width, False)
    key, value = tiles.zero_hidden(plan, visibility, program, program.tile, key, value)
    score = TritonScores(plan, numbers, visibility, program, keys_first=True)

    def step(tile: Array, carry: tuple[Array, Array], masked: bool) -> tuple[Array, Array]:
        d_key, d_value = carry
        rows = tiles.rows(plan, tile, program.kv_head)
        query = tiles.load_rows(query_ref, program, rows, plan.width)
        # keys in front, so that sums over rows are plain products
        product = tiles.product(key, query, 1, 1)
        scores, pull = score.vjp(product, score.row_inputs(rows), program.tile)
        seen = None
        if masked:
            seen = tiles.seen(plan, visibility, program, rows, program.tile, keys_first=True)
            scores = jnp.where(seen, scores, -jnp.inf)
        lse = tiles.load_numbers(lse_ref, program, rows, jnp.inf)
        weights = exp2(scores, score.unit, lse[None, :])
        d_out = tiles.load_rows(out_ref, program, rows, plan.value_width)
        d_value += tiles.product(weights.astype(d_out.dtype), d_out, 1, 0)
        delta = tiles.load_numbers(delta_ref, program, rows, 0.0)
        d_scores = weights * (tiles.product(value, d_out, 1, 1) - delta[None, :])
        d_scores, _ = pull(d_scores, seen)
        return d_key + tiles.product(d_scores.astype(query.dtype), query, 1, 0), d_value

    start = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    # Keys that pad the last tile are zero, and their sums are not stored.
    tile_range = tiles.tile_range(plan, ranges, program, of_keys=True)
    d_key, d_value = tiles.loop_over(plan, tile_range, program, step, start)
    tiles.store_keys(plan, results[0], program, d_key * plan.settings.scale, plan.width)
    tiles.store_keys(plan, results[1], program, d_value, plan.value_width)
