"""The GPU kernel of the state's derivative in a direction: one pass over the keys of rows.

The weights come from the saved energies, so the sums of programs that split the keys add up. The
formulas are those of `AbstractKernel.tangent`.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from ..._varying import result_like
from ...call._operands import Operands
from ...call._state import AttentionState, holds_keys
from .._rows import BlockList, Visibility, moving_arrays, tile_ranges, visibility_of
from .._score import score_directions, score_numbers
from .._score_program import Numbers
from . import _tile as tiles
from ._plan import TritonPlan
from ._score import TritonScores


def tangent(
    operands: Operands,
    plan: TritonPlan,
    state: AttentionState,
    directions: Operands,
    *,
    interpret: bool,
) -> AttentionState:
    query, key, value = operands.qkv
    visibility = visibility_of(operands, plan)
    parts = pl.pallas_call(
        functools.partial(_kernel, plan, tiles.exp2_of(interpret=interpret)),
        grid=(plan.row_tiles * plan.kv_heads * plan.batch * plan.splits,),
        out_shape=[
            result_like(
                query, (plan.splits, *x.shape), x.dtype if plan.splits == 1 else jnp.float32
            )
            for x in state
        ],
        compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret,
        name="attention_tangent",
    )(
        *(query, key, value, moving_arrays(directions), *state, visibility),
        tile_ranges(operands, visibility, plan, of_keys=False),
        score_numbers(operands, plan.score),
        score_directions(operands, plan.score, directions),
    )
    return AttentionState(
        *(part.sum(0).astype(x.dtype) for part, x in zip(parts, state, strict=True))
    )


def _kernel(
    plan: TritonPlan,
    exp2: tiles.Exp2,
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    moving: dict[str, Ref],
    out_ref: Ref,
    lse_ref: Ref,
    visibility: Visibility,
    ranges: Ref | BlockList | None,
    numbers: Numbers,
    d_numbers: Numbers | None,
    d_out_ref: Ref,
    d_lse_ref: Ref,
) -> None:
    program = tiles.program_index(plan, of_keys=False)
    rows = tiles.rows(plan, program.tile, program.kv_head)
    query = tiles.load_rows(query_ref, program, rows, plan.width)
    d_query = None
    if "query" in moving:
        d_query = tiles.load_rows(moving["query"], program, rows, plan.width)
    lse = tiles.load_numbers(lse_ref, program, rows, -jnp.inf)
    has_keys = holds_keys(lse)
    # in bits; a row without keys has no weight
    shift = jnp.where(has_keys, lse * tiles.LOG2_E, jnp.inf)
    score = TritonScores(plan, numbers, visibility, program)
    row_inputs = score.row_inputs(rows)
    score_directions = (
        None if d_numbers is None else (d_numbers, score.row_numbers(d_numbers, rows))
    )
    scores_move = bool(moving.keys() & {"query", "key"}) or score_directions is not None

    def step(tile: Array, carry: tuple[Array, Array], masked: bool) -> tuple[Array, Array]:
        total, sums = carry

        def keys(ref: Ref, width: int) -> Array:
            x = tiles.load_keys(plan, ref, program, tile, width, not masked)
            return tiles.zero_hidden(plan, visibility, program, tile, x)[0] if masked else x

        key = keys(key_ref, plan.width)
        product = tiles.product(query, key, 1, 1)
        scores, seen = score.scores(product, row_inputs, tile), None
        if masked:
            seen = tiles.seen(plan, visibility, program, rows, tile, keys_first=False)
            scores = jnp.where(seen, scores, -jnp.inf)
        weights = exp2(scores, score.unit, shift[:, None])
        d_scores = []
        if d_query is not None:
            d_scores.append(tiles.product(d_query, key, 1, 1))
        if "key" in moving:
            d_scores.append(tiles.product(query, keys(moving["key"], plan.width), 1, 1))
        if scores_move:
            change: Any = None
            if d_scores:
                change = sum(d_scores[1:], d_scores[0]) * plan.settings.scale
            change = score.jvp(change, product, row_inputs, tile, seen, score_directions)
            terms = weights * change
            total += terms.sum(1)
            value = keys(value_ref, plan.value_width)
            sums += tiles.product(terms.astype(value.dtype), value, 1, 0)
        if "value" in moving:
            d_value = keys(moving["value"], plan.value_width)
            sums += tiles.product(weights.astype(d_value.dtype), d_value, 1, 0)
        return total, sums

    start = (
        jnp.zeros(plan.rows, jnp.float32),
        jnp.zeros((plan.rows, tiles.power(plan.value_width)), jnp.float32),
    )
    tile_range = tiles.tile_range(plan, ranges, program, of_keys=False)
    total, sums = tiles.loop_over(plan, tile_range, program, step, start)
    if scores_move:
        out = tiles.load_rows(out_ref, program, rows, plan.value_width)
        sums -= total[:, None] * out.astype(jnp.float32)
    tiles.store_rows(
        d_out_ref, program, rows, jnp.where(has_keys[:, None], sums, 0.0), plan.value_width
    )
    tiles.store_numbers(d_lse_ref, program, rows, jnp.where(has_keys, total, 0.0))
