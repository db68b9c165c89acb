"""The GPU kernel of the state: online softmax over tiles of keys, which are split if rows are few.

Sources: the online softmax of Milakov and Gimelshein (arXiv 1805.02867); FlashAttention-2 (Dao,
arXiv 2307.08691); Flash-Decoding for the split of keys over programs.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..._varying import result_like
from ...call._operands import Operands, out_dtype
from ...call._state import AttentionState, fold
from .._rows import BlockList, Visibility, tile_ranges, visibility_of
from .._score import score_numbers
from .._score_program import Numbers
from . import _tile as tiles
from ._default import LEAST
from ._plan import TritonPlan
from ._score import TritonScores


class _KeysOrValues(NamedTuple):
    """Keys or values `[B, S, K, H]` and, if they are of eight bits, scales `[B, S, K]`.

    Integers of eight bits are exact in the dtype of any query, so they are cast without rounding; the scale
    of a key multiplies its scores, that of a value the weights.
    """

    numbers: Array | Ref
    scale: Array | Ref | None


def forward(operands: Operands, plan: TritonPlan, *, interpret: bool) -> AttentionState:
    query, key, value = operands.qkv
    visibility = visibility_of(operands, plan)
    shape = (plan.splits, *query.shape[:-1])
    dtype = out_dtype(operands, plan.settings)
    parts = pl.pallas_call(
        functools.partial(_kernel, plan, interpret),
        grid=(plan.row_tiles * plan.kv_heads * plan.batch * plan.splits,),
        out_shape=[
            result_like(
                query, (*shape, plan.value_width), dtype if plan.splits == 1 else jnp.float32
            ),
            result_like(query, shape, jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret,
        name="attention_forward",
    )(
        *(
            query,
            _KeysOrValues(key, operands.scales.key),
            _KeysOrValues(value, operands.scales.value),
            visibility,
        ),
        tile_ranges(operands, visibility, plan, of_keys=False),
        score_numbers(operands, plan.score),
    )
    if plan.splits == 1:
        return AttentionState(*(part[0] for part in parts))
    return _merge(AttentionState(*parts), query, dtype, interpret=interpret)


def _kernel(
    plan: TritonPlan,
    interpret: bool,
    query_ref: Ref,
    keys: _KeysOrValues,
    values: _KeysOrValues,
    visibility: Visibility,
    ranges: Ref | BlockList | None,
    numbers: Numbers,
    out_ref: Ref,
    lse_ref: Ref,
) -> None:
    program = tiles.program_index(plan, of_keys=False)
    rows = tiles.rows(plan, program.tile, program.kv_head)
    score = TritonScores(plan, numbers, visibility, program)
    row_inputs = score.row_inputs(rows)
    exp2 = functools.partial(tiles.exp2_from, unit=score.unit, interpret=interpret)
    query = tiles.load_rows(query_ref, program, rows, plan.width)

    def step(tile: Array, carry: tuple[Array, ...], masked: bool) -> tuple[Array, ...]:
        maximum, total, sums = carry
        key = _load(plan, keys, program, tile, plan.width, query.dtype, not masked)
        product = _times(tiles.product(query, key.numbers, 1, 1), key.scale)
        scores = score.scores(product, row_inputs, tile)
        if masked:
            seen = tiles.seen(plan, visibility, program, rows, tile, keys_first=False)
            scores = jnp.where(seen, scores, -jnp.inf)
        new = jnp.maximum(maximum, scores.max(1))
        shift = jnp.where(new > -jnp.inf, new, 0.0) if masked else new
        weights = exp2(scores, shift[:, None])
        decay = exp2(maximum, shift)
        value = _load(plan, values, program, tile, plan.value_width, query.dtype, not masked)
        if masked:
            value = _zero_hidden(plan, visibility, program, tile, value)
        scaled = _times(weights, value.scale).astype(value.numbers.dtype)
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


class _Loaded(NamedTuple):
    """A tile of keys or values in the dtype of products, and the scales of its keys; None: 1."""

    numbers: Float[Array, "keys width"]
    scale: Float[Array, " keys"] | None


def _load(
    plan: TritonPlan,
    stored: _KeysOrValues,
    program: tiles.ProgramIndex,
    tile: Array,
    width: int,
    dtype: DTypeLike,
    full: bool,
) -> _Loaded:
    """A tile, zero outside of the array unless it is `full`; eight bits are cast to `dtype`."""
    numbers = tiles.load_keys(plan, stored.numbers, program, tile, width, full)
    if stored.scale is None:
        return _Loaded(numbers, None)
    key = tile * plan.keys + tiles.numbers(plan.keys)
    in_bounds = None if full or plan.full_keys else key < plan.key_len
    scale = tiles.load(stored.scale, (program.batch, key, program.kv_head), in_bounds)
    return _Loaded(numbers.astype(dtype), scale)


def _zero_hidden(
    plan: TritonPlan,
    visibility: Visibility,
    program: tiles.ProgramIndex,
    tile: Array,
    loaded: _Loaded,
) -> _Loaded:
    """A tile with zeros for keys that no row of the call sees; with eight bits, zero scales suffice."""
    numbers, scale = loaded
    if scale is None:
        (numbers,) = tiles.zero_hidden(plan, visibility, program, tile, numbers)
    else:
        (scale,) = tiles.zero_hidden(plan, visibility, program, tile, scale)
    return _Loaded(numbers, scale)


def _times(x: Float[Array, "rows keys"], scale: Array | None) -> Float[Array, "rows keys"]:
    """Products with keys, or weights, times the scale of each key."""
    return x if scale is None else x * jnp.expand_dims(scale, 0)


# The terms that a program adds: 32 for each of its threads.
_TERMS = 4096


def _merge(
    parts: AttentionState, query: Array, dtype: jnp.dtype, *, interpret: bool
) -> AttentionState:
    splits, *shape, width = parts.out.shape
    flat = [x.reshape(splits, -1, *x.shape[4:]) for x in parts]
    rows = flat[1].shape[1]
    block = min(max(LEAST, _TERMS // tiles.power(splits)), tiles.power(width))
    out, lse = pl.pallas_call(
        functools.partial(_merge_kernel, block),
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


def _merge_kernel(block: int, parts_ref: Ref, lses_ref: Ref, out_ref: Ref, lse_ref: Ref) -> None:
    row, column_block = pl.program_id(0), pl.program_id(1)
    splits, _, width = parts_ref.shape
    split = tiles.numbers(tiles.power(splits))
    column = column_block * block + tiles.numbers(block)
    is_part, in_width = split < splits, column < width
    state = fold(
        AttentionState(
            tiles.load(
                parts_ref,
                (split[:, None], row, column[None, :]),
                is_part[:, None] & in_width[None, :],
            ),
            tiles.load(lses_ref, (split, row), is_part, -jnp.inf),
        ),
        lambda x: x.max(0, keepdims=True),
        lambda pair: (pair[0].sum(0, keepdims=True), pair[1].sum(0, keepdims=True)),
    )
    # sums over an axis of one element, as JAX's lowering to Triton has no slices
    out, lse = (x.sum(0) for x in state)
    triton.store(out_ref.at[row, column], out.astype(out_ref.dtype), mask=in_width)
    triton.store(lse_ref.at[row], lse, mask=column_block == 0)
