"""The GPU kernel of the state: online softmax over tiles of keys, which are split if rows are few.

Sources: the online softmax of Milakov and Gimelshein (arXiv 1805.02867); FlashAttention-2 (Dao,
arXiv 2307.08691); Flash-Decoding for the split of keys over programs.
"""

import functools

import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from ...call._operands import Operands, out_dtype
from ...call._state import AttentionState
from .._common import result_like
from .._ranges import tile_ranges, visibility_of
from .._rows import BlockList, Visibility
from .._score import score_numbers
from .._score_program import Numbers
from . import _tile as tiles
from ._merge import merge
from ._plan import Plan
from ._score import TileScores
from ._stored import Stored, load, times, zero_hidden


def forward(operands: Operands, plan: Plan, *, interpret: bool) -> AttentionState:
    """The state of a call."""
    query, key, value = operands[:3]
    visibility = visibility_of(operands, plan)
    shape = (plan.splits, *query.shape[:-1])
    dtype = out_dtype(operands, plan.settings)
    parts = pl.pallas_call(
        functools.partial(_kernel, plan, interpret),
        grid=(plan.row_tiles * plan.kv_heads * plan.batch * plan.splits,),
        out_shape=[
            result_like(
                query,
                (*shape, plan.value_width),
                dtype if plan.splits == 1 else jnp.float32,
            ),
            result_like(query, shape, jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret,
        name="attention_forward",
    )(
        *(query, Stored(key, operands.key_scale), Stored(value, operands.value_scale), visibility),
        tile_ranges(operands, visibility, plan, of_keys=False),
        score_numbers(operands, plan.score),
    )
    if plan.splits == 1:
        return AttentionState(*(part[0] for part in parts))
    return merge(AttentionState(*parts), query, dtype, interpret=interpret)


def _kernel(
    plan: Plan,
    interpret: bool,
    query_ref: Ref,
    keys: Stored,
    values: Stored,
    visibility: Visibility,
    ranges: Ref | BlockList | None,
    numbers: Numbers,
    out_ref: Ref,
    lse_ref: Ref,
) -> None:
    program = tiles.program_index(plan, of_keys=False)
    rows = tiles.rows(plan, program.tile, program.kv_head)
    score = TileScores(plan, numbers, visibility, program)
    row_inputs = score.row_inputs(rows)
    exp2 = functools.partial(tiles.exp2_from, unit=score.unit, interpret=interpret)
    query = tiles.load_rows(query_ref, program, rows, plan.width)

    def step(tile: Array, carry: tuple[Array, ...], masked: bool) -> tuple[Array, ...]:
        maximum, total, sums = carry
        key = load(plan, keys, program, tile, plan.width, query.dtype, not masked)
        product = times(tiles.product(query, key.numbers, 1, 1), key.scale)
        scores = score.scores(product, row_inputs, tile)
        if masked:
            seen = tiles.seen(plan, visibility, program, rows, tile, keys_first=False)
            scores = jnp.where(seen, scores, -jnp.inf)
        new = jnp.maximum(maximum, scores.max(1))
        shift = jnp.where(new > -jnp.inf, new, 0.0) if masked else new
        weights = exp2(scores, shift[:, None])
        decay = exp2(maximum, shift)
        value = load(plan, values, program, tile, plan.value_width, query.dtype, not masked)
        if masked:
            value = zero_hidden(plan, visibility, program, tile, value)
        scaled = times(weights, value.scale).astype(value.numbers.dtype)
        added = tiles.product(scaled, value.numbers, 1, 0)
        return new, total * decay + weights.sum(1), sums * decay[:, None] + added

    start = (
        jnp.full(plan.rows, -jnp.inf, jnp.float32),
        jnp.zeros(plan.rows, jnp.float32),
        jnp.zeros((plan.rows, tiles.power(plan.value_width)), jnp.float32),
    )
    tile_range = tiles.tile_range(plan, ranges, program, of_keys=False)
    maximum, total, sums = tiles.loop_over(plan, tile_range, program, step, start)
    maximum *= score.unit
    # the score of a finite product may overflow
    total = jnp.where(maximum < jnp.inf, total, jnp.nan)
    absent = tiles.absent_rows(visibility, program, rows)
    if absent is not None:
        total = jnp.where(absent, 0.0, total)
    empty = total == 0
    out = jnp.where(empty[:, None], 0.0, sums / jnp.where(empty, 1.0, total)[:, None])
    tiles.store_rows(out_ref, program, rows, out, plan.value_width)
    lse = jnp.where(empty, -jnp.inf, (maximum + jnp.log2(total)) / tiles.LOG2_E)
    tiles.store_numbers(lse_ref, program, rows, lse)
