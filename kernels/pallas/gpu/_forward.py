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
from ...call._state import AttentionState, fold
from .._common import result_like
from .._ranges import tile_ranges, visibility_of
from .._rows import BlockList, Visibility
from .._score import score_numbers
from .._score_program import Numbers
from . import _tile as tiles
from ._plan import Plan
from ._score import TileScores
from ._sizes import LEAST

# The terms that one program of the merge adds: each of its threads loads 32 at once.
TERMS = 4096


def forward(operands: Operands, plan: Plan, *, interpret: bool) -> AttentionState:
    """The state of a call, by a plan for "forward"."""
    query, key, value = operands[:3]
    given = visibility_of(operands, plan)
    wide = out_dtype(operands, plan.settings) if plan.splits == 1 else jnp.float32
    shape = (plan.splits, *query.shape[:-1])
    parts = pl.pallas_call(
        functools.partial(_kernel, plan, tiles.exp2_of(interpret=interpret)),
        grid=(plan.row_tiles * plan.kv_heads * plan.batch * plan.splits,),
        out_shape=[
            result_like(query, (*shape, plan.value_width), wide),
            result_like(query, shape, jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret,
        name="attention_forward",
    )(
        *(query, key, value, given, tile_ranges(operands, given, plan, of_keys=False)),
        score_numbers(operands, plan.score),
    )
    if plan.splits == 1:
        return AttentionState(*(part[0] for part in parts))
    dtype = out_dtype(operands, plan.settings)
    return _merged(AttentionState(*parts), query, dtype, interpret=interpret)


def _kernel(
    plan: Plan,
    exp2: tiles.Exp2,
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    visibility: Visibility,
    found: Ref | BlockList | None,
    numbers: Numbers,
    out_ref: Ref,
    lse_ref: Ref,
) -> None:
    at = tiles.program_index(plan, of_keys=False)
    rows = tiles.rows(plan, at.tile, at.kv_head)
    score = TileScores(plan, numbers, visibility, at)
    own = score.of_rows(rows)
    query = tiles.load_rows(query_ref, at, rows, plan.width)

    def step(tile: Array, carry: tuple[Array, ...], masked: bool) -> tuple[Array, ...]:
        maximum, total, sums = carry
        key = tiles.load_keys(plan, key_ref, at, tile, plan.width, not masked)
        scores, unit = score.scores(tiles.product(query, key, 1, 1), own, tile)
        if masked:
            seen = tiles.seen(plan, visibility, at, rows, tile, keys_first=False)
            scores = jnp.where(seen, scores, -jnp.inf)
        new = jnp.maximum(maximum, scores.max(1) * unit)
        shift = jnp.where(new > -jnp.inf, new, 0.0) if masked else new
        weights = exp2(scores, unit, shift[:, None])
        decay = exp2(maximum, 1.0, shift)
        value = tiles.load_keys(plan, value_ref, at, tile, plan.value_width, not masked)
        if masked:
            (value,) = tiles.zero_hidden(plan, visibility, at, tile, value)
        added = tiles.product(weights.astype(value.dtype), value, 1, 0)
        return new, total * decay + weights.sum(1), sums * decay[:, None] + added

    start = (
        jnp.full(plan.rows, -jnp.inf, jnp.float32),
        jnp.zeros(plan.rows, jnp.float32),
        jnp.zeros((plan.rows, tiles.power(plan.value_width)), jnp.float32),
    )
    over = tiles.tile_range(plan, found, at, of_keys=False)
    maximum, total, sums = tiles.loop_over(plan, over, at, step, start)
    # beside a score that overflows, fused products of finite ones would be no weights, not NaN
    total = jnp.where(maximum < jnp.inf, total, jnp.nan)
    absent = tiles.absent_rows(visibility, at, rows)
    if absent is not None:
        total = jnp.where(absent, 0.0, total)
    empty = total == 0
    out = jnp.where(empty[:, None], 0.0, sums / jnp.where(empty, 1.0, total)[:, None])
    tiles.store_rows(out_ref, at, rows, out, plan.value_width)
    lse = jnp.where(empty, -jnp.inf, (maximum + jnp.log2(total)) / tiles.LOG2_E)
    index = (at.split, at.batch, rows.time, rows.head)
    triton.store(lse_ref.at[index], lse, mask=rows.there)


def _merged(
    parts: AttentionState, query: Array, dtype: jnp.dtype, *, interpret: bool
) -> AttentionState:
    """The merge, in one kernel, of the states of programs that split the keys.

    The last of these programs could do it, known by an atomic counter; but XLA has no memory that keeps its
    value between calls, so that zeroing the counter is a launch as well.
    """
    splits, *shape, width = parts.out.shape
    flat = [x.reshape(splits, -1, *x.shape[4:]) for x in parts]
    rows = flat[1].shape[1]
    block = min(max(LEAST, TERMS // tiles.power(splits)), tiles.power(width))
    out, lse = pl.pallas_call(
        functools.partial(_merge, block),
        grid=(rows, -(-width // block)),
        out_shape=[
            result_like(query, (rows, width), dtype),
            result_like(query, (rows,), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="attention_merge",
    )(*flat)
    return AttentionState(out.reshape(*shape, width), lse.reshape(shape))


def _merge(block: int, parts_ref: Ref, lses_ref: Ref, out_ref: Ref, lse_ref: Ref) -> None:
    row, at = pl.program_id(0), pl.program_id(1)
    splits, _, width = parts_ref.shape
    split = tiles.numbers(tiles.power(splits))
    column = at * block + tiles.numbers(block)
    there, inside = split < splits, column < width
    state = fold(
        AttentionState(
            tiles.load(
                parts_ref,
                (split[:, None], row, column[None, :]),
                there[:, None] & inside[None, :],
            ),
            tiles.load(lses_ref, (split, row), there, -jnp.inf),
        ),
        lambda x: x.max(0, keepdims=True),
        lambda pair: (pair[0].sum(0, keepdims=True), pair[1].sum(0, keepdims=True)),
    )
    # sums of one element: in kernels for Triton, JAX 0.8 has no slices
    out, lse = (x.sum(0) for x in state)
    triton.store(out_ref.at[row, column], out.astype(out_ref.dtype), mask=inside)
    triton.store(lse_ref.at[row], lse, mask=at == 0)
