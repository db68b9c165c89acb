"""The Triton kernels of the state and of its tangent: one pass over the keys of each tile of rows.

If rows are few, several programs split their keys, and online softmax merges their states. The tangent takes its
weights from the saved lse, so that its parts add up; its equations are in `AbstractKernel.tangent`.

Sources: the online softmax of Milakov and Gimelshein (arXiv 1805.02867); FlashAttention-2 (Dao,
arXiv 2307.08691); Flash-Decoding for the split of keys over programs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..._varying import result_like
from ...call._operands import Operands, out_dtype
from ...call._state import AttentionState, fold, holds_keys
from .._rows import moving_arrays
from .._score import score_directions, score_numbers
from .._score_program import Numbers
from .._tiles import LOG2_E
from ._plan import LEAST, TritonPlan, power
from ._score import TritonScores
from ._tile import TritonProgram, launch, load, numbers, product


class _Scaled(NamedTuple):
    """Keys or values, or a tile of them, and the scale of each key if they are of eight bits.

    Integers of eight bits are exact in the dtype of any query, so they are cast without rounding; the scale
    of a key multiplies its scores, that of a value the weights.
    """

    numbers: Any  # an array, or a reference to one
    scale: Any

    def load(
        self, program: TritonProgram, tile: Array, width: int, dtype: DTypeLike, full: bool
    ) -> "_Scaled":
        """A tile, zero outside of the array unless it is `full`; eight bits are cast to `dtype`."""
        x = program.load_keys(self.numbers, tile, width, full)
        if self.scale is None:
            return _Scaled(x, None)
        key, plan = program.key_numbers(tile), program.plan
        in_bounds = None if full or plan.full_keys else key < plan.key_len
        scale = load(self.scale, (program.batch, key, program.kv_head), in_bounds)
        return _Scaled(x.astype(dtype), scale)

    def zero_hidden(self, program: TritonProgram, tile: Array) -> "_Scaled":
        """A tile with zeros for keys that no row of the call sees; with eight bits, zero scales suffice."""
        name = "numbers" if self.scale is None else "scale"
        (x,) = program.zero_hidden(tile, getattr(self, name))
        return self._replace(**{name: x})

    def times(self, x: Float[Array, "rows keys"]) -> Float[Array, "rows keys"]:
        return x if self.scale is None else x * jnp.expand_dims(self.scale, 0)


def forward(operands: Operands, plan: TritonPlan, *, interpret: bool) -> AttentionState:
    query, key, value = operands.qkv
    shape, dtype = query.shape[:-1], out_dtype(operands, plan.settings)
    parts = launch(
        _kernel,
        plan,
        operands,
        (query, _Scaled(key, operands.scales.key), _Scaled(value, operands.scales.value)),
        (score_numbers(operands, plan.score),),
        [
            jax.ShapeDtypeStruct((*shape, plan.value_width), dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        interpret=interpret,
        name="attention_forward",
    )
    if plan.splits == 1:
        return AttentionState(*(part[0] for part in parts))
    return _merge(AttentionState(*parts), query, dtype, interpret=interpret)


def _kernel(
    program: TritonProgram,
    query_ref: Ref,
    keys: _Scaled,
    values: _Scaled,
    numbers: Numbers,
    out_ref: Ref,
    lse_ref: Ref,
) -> None:
    plan, rows = program.plan, program.rows(program.tile)
    score = TritonScores(program, numbers)
    row_inputs = score.row_inputs(rows)
    query = program.load_rows(query_ref, rows, plan.width)

    def step(tile: Array, carry: tuple[Array, ...], masked: bool) -> tuple[Array, ...]:
        maximum, total, sums = carry
        key = keys.load(program, tile, plan.width, query.dtype, not masked)
        products = key.times(product(query, key.numbers, 1, 1))
        scores = score.scores(products, row_inputs, tile)
        if masked:
            scores = jnp.where(program.seen(rows, tile), scores, -jnp.inf)
        # m' = max(m, max S); l = l 2^(m - m') + sum 2^(S - m'); o = o 2^(m - m') + 2^(S - m') V, scores in bits
        new = jnp.maximum(maximum, scores.max(1))
        shift = jnp.where(new > -jnp.inf, new, 0.0) if masked else new
        weights = program.exp2_from(scores, score.unit, shift[:, None])
        decay = program.exp2_from(maximum, score.unit, shift)
        value = values.load(program, tile, plan.value_width, query.dtype, not masked)
        if masked:
            value = value.zero_hidden(program, tile)
        scaled = value.times(weights).astype(value.numbers.dtype)
        added = product(scaled, value.numbers, 1, 0)
        return new, total * decay + weights.sum(1), sums * decay[:, None] + added

    start = (
        jnp.full(plan.rows, -jnp.inf, jnp.float32),
        jnp.zeros(plan.rows, jnp.float32),
        jnp.zeros((plan.rows, power(plan.value_width)), jnp.float32),
    )
    maximum, total, sums = program.loop(step, start)
    maximum *= score.unit
    # the score of a finite product may overflow
    total = jnp.where(maximum < jnp.inf, total, jnp.nan)
    if (positions := program.visibility.row_positions) is not None:
        absent = program.read(positions, rows.time, rows.in_bounds) < 0
        total = jnp.where(absent, 0.0, total)
    # out = o / l, lse = (m + log2 l) / log2 e
    empty = total == 0
    out = jnp.where(empty[:, None], 0.0, sums / jnp.where(empty, 1.0, total)[:, None])
    program.store_rows(out_ref, rows, out, plan.value_width)
    lse = jnp.where(empty, -jnp.inf, (maximum + jnp.log2(total)) / LOG2_E)
    program.store_numbers(lse_ref, rows, lse)


# Numbers that one program of the merge adds: 32 per thread.
_TERMS = 4096


def _merge(
    parts: AttentionState, query: Array, dtype: jnp.dtype, *, interpret: bool
) -> AttentionState:
    splits, *shape, width = parts.out.shape
    flat = [x.reshape(splits, -1, *x.shape[4:]) for x in parts]
    rows = flat[1].shape[1]
    block = min(max(LEAST, _TERMS // power(splits)), power(width))
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
    split = numbers(power(splits))
    column = column_block * block + numbers(block)
    is_part, in_width = split < splits, column < width
    place, in_bounds = (split[:, None], row, column[None, :]), is_part[:, None] & in_width[None, :]
    # F = m + log Σ_i e^{F_i - m}, out = Σ_i e^{F_i - F} out_i over the parts i of a row's keys
    state = fold(
        AttentionState(
            load(parts_ref, place, in_bounds), load(lses_ref, (split, row), is_part, -jnp.inf)
        ),
        lambda x: x.max(0, keepdims=True),
        lambda pair: (pair[0].sum(0, keepdims=True), pair[1].sum(0, keepdims=True)),
    )
    # `sum` drops the axis of one element: JAX's lowering to Triton has no slices (to check: write `x[0]`)
    out, lse = (x.sum(0) for x in state)
    triton.store(out_ref.at[row, column], out.astype(out_ref.dtype), mask=in_width)
    triton.store(lse_ref.at[row], lse, mask=column_block == 0)


def tangent(
    operands: Operands,
    plan: TritonPlan,
    state: AttentionState,
    directions: Operands,
    *,
    interpret: bool,
) -> AttentionState:
    of_score = (
        score_numbers(operands, plan.score),
        score_directions(operands, plan.score, directions),
    )
    parts = launch(
        _tangent_kernel,
        plan,
        operands,
        (*operands.qkv, moving_arrays(directions), *state),
        of_score,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state],
        interpret=interpret,
        name="attention_tangent",
    )
    # all weights are relative to the lse of the whole row, so that parts add up
    pairs = zip(parts, state, strict=True)
    return AttentionState(*(part.sum(0).astype(x.dtype) for part, x in pairs))


def _tangent_kernel(
    program: TritonProgram,
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    moving: dict[str, Ref],
    out_ref: Ref,
    lse_ref: Ref,
    numbers: Numbers,
    d_numbers: Numbers | None,
    d_out_ref: Ref,
    d_lse_ref: Ref,
) -> None:
    # The parameters are the refs that `launch` passes. `step` shares the rows that the program holds: Triton has no
    # calls, and so a function of its own would take each of them.
    plan, rows = program.plan, program.rows(program.tile)
    query = program.load_rows(query_ref, rows, plan.width)
    d_query = None
    if "query" in moving:
        d_query = program.load_rows(moving["query"], rows, plan.width)
    lse = program.load_numbers(lse_ref, rows, -jnp.inf)
    has_keys = holds_keys(lse)
    # in bits; a fully masked row has weights 0
    shift = jnp.where(has_keys, lse * LOG2_E, jnp.inf)
    score = TritonScores(program, numbers)
    row_inputs, of_score = score.row_inputs(rows), None
    if d_numbers is not None:
        of_score = d_numbers, score.row_numbers(d_numbers, rows)
    scores_move = bool(moving.keys() & {"query", "key"}) or of_score is not None

    def step(tile: Array, carry: tuple[Array, Array], masked: bool) -> tuple[Array, Array]:
        total, sums = carry

        def keys(ref: Ref, width: int) -> Array:
            x = program.load_keys(ref, tile, width, not masked)
            return program.zero_hidden(tile, x)[0] if masked else x

        key = keys(key_ref, plan.width)
        products = product(query, key, 1, 1)
        scores, seen = score.scores(products, row_inputs, tile), None
        if masked:
            seen = program.seen(rows, tile)
            scores = jnp.where(seen, scores, -jnp.inf)
        weights = program.exp2(scores, score.unit, shift[:, None])
        d_scores = []
        if d_query is not None:
            d_scores.append(product(d_query, key, 1, 1))
        if "key" in moving:
            d_scores.append(product(query, keys(moving["key"], plan.width), 1, 1))
        if scores_move:
            # dS = scale (dQ K^T + Q dK^T); dlse = sum P dS; dout = P (dS V + dV) - dlse out
            change: Any = None
            if d_scores:
                change = sum(d_scores[1:], d_scores[0]) * plan.settings.scale
            change = score.jvp(change, products, row_inputs, tile, seen, of_score)
            terms = weights * change
            total += terms.sum(1)
            value = keys(value_ref, plan.value_width)
            sums += product(terms.astype(value.dtype), value, 1, 0)
        if "value" in moving:
            d_value = keys(moving["value"], plan.value_width)
            sums += product(weights.astype(d_value.dtype), d_value, 1, 0)
        return total, sums

    start = (
        jnp.zeros(plan.rows, jnp.float32),
        jnp.zeros((plan.rows, power(plan.value_width)), jnp.float32),
    )
    total, sums = program.loop(step, start)
    # dout = Σ P (dS V + dV) - dlse out
    if scores_move:
        out = program.load_rows(out_ref, rows, plan.value_width)
        sums -= total[:, None] * out.astype(jnp.float32)
    sums = jnp.where(has_keys[:, None], sums, 0.0)
    program.store_rows(d_out_ref, rows, sums, plan.value_width)
    program.store_numbers(d_lse_ref, rows, jnp.where(has_keys, total, 0.0))
