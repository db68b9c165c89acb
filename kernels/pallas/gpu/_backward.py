"""The GPU kernels of the gradients: one iterates over the keys of rows, one over the rows of keys.

A program alone sums the gradient of its tile, in float32, so the order of sums is deterministic. The
formulas are those of FlashAttention-2 (Dao, arXiv 2307.08691).
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from ...call._operands import Operands, cotangents
from ...call._state import AttentionState
from ...xla._blockwise import backward_rows
from .._common import result_like
from .._rows import BlockList, Visibility
from . import _tile as tiles
from ._plan import Plan, tile_ranges, visibility_of


def backward(
    operands: Operands,
    query_plan: Plan,
    key_plan: Plan,
    state: AttentionState,
    cotangent: AttentionState,
    *,
    interpret: bool,
) -> Operands:
    """The cotangents of query, key and value, by plans for "query" and "key"."""
    query, key, value = operands[:3]
    given_rows = backward_rows(operands, state, cotangent)
    lse = given_rows.lse * tiles.LOG2_E  # in bits
    d_out = given_rows.d_out.astype(value.dtype)
    arrays = (given_rows.query, key, value, d_out, lse, given_rows.delta)

    def run(kernel: Callable[..., None], plan: Plan, *like: Array) -> list[Array]:
        given = visibility_of(operands, plan)
        of_keys = kernel is _key_kernel
        count = plan.key_tiles if of_keys else plan.row_tiles
        parts = pl.pallas_call(
            functools.partial(kernel, plan),
            grid=(count * plan.kv_heads * plan.batch * plan.splits,),
            out_shape=[
                result_like(x, (plan.splits, *x.shape), x.dtype if plan.splits == 1 else lse.dtype)
                for x in like
            ],
            compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
            interpret=interpret,
            name="attention_backward_" + ("key" if of_keys else "query"),
        )(*arrays, given, tile_ranges(operands, given, plan, of_keys=of_keys))
        return [part.sum(0).astype(x.dtype) for part, x in zip(parts, like, strict=True)]

    (d_query,) = run(_query_kernel, query_plan, query)
    d_key, d_value = run(_key_kernel, key_plan, key, value)
    return cotangents(d_query, d_key, d_value, None)


def _query_kernel(
    plan: Plan,
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    visibility: Visibility,
    found: Ref | BlockList | None,
    result_ref: Ref,
) -> None:
    at = tiles.program_index(plan, of_keys=False)
    rows = tiles.rows(plan, at.tile, at.kv_head)
    query = tiles.load_rows(query_ref, at, rows, plan.width)
    d_out = tiles.load_rows(out_ref, at, rows, plan.value_width)
    lse = tiles.load_numbers(lse_ref, at, rows, jnp.inf)
    delta = tiles.load_numbers(delta_ref, at, rows, 0.0)

    def step(tile: Array, sums: Array, masked: bool) -> Array:
        key = tiles.load_keys(plan, key_ref, at, tile, plan.width, not masked)
        scores = tiles.product(query, key, 1, 1) * (plan.settings.scale * tiles.LOG2_E)
        if masked:
            seen = tiles.seen(plan, visibility, at, rows, tile, keys_first=False)
            scores = jnp.where(seen, scores, -jnp.inf)
        weights = jnp.exp2(scores - lse[:, None])
        value = tiles.load_keys(plan, value_ref, at, tile, plan.value_width, not masked)
        if masked:
            key, value = tiles.zero_hidden(plan, visibility, at, tile, key, value)
        d_scores = weights * (tiles.product(d_out, value, 1, 1) - delta[:, None])
        return sums + tiles.product(d_scores.astype(key.dtype), key, 1, 0)

    over = tiles.tile_range(plan, found, at, of_keys=False)
    sums = tiles.loop_over(plan, over, at, step, jnp.zeros(query.shape, jnp.float32))
    tiles.store_rows(result_ref, at, rows, sums * plan.settings.scale, plan.width)


def _key_kernel(
    plan: Plan,
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    visibility: Visibility,
    found: Ref | BlockList | None,
    d_key_ref: Ref,
    d_value_ref: Ref,
) -> None:
    at = tiles.program_index(plan, of_keys=True)
    key = tiles.load_keys(plan, key_ref, at, at.tile, plan.width, False)
    value = tiles.load_keys(plan, value_ref, at, at.tile, plan.value_width, False)
    key, value = tiles.zero_hidden(plan, visibility, at, at.tile, key, value)

    def step(tile: Array, carry: tuple[Array, Array], masked: bool) -> tuple[Array, Array]:
        d_key, d_value = carry
        rows = tiles.rows(plan, tile, at.kv_head)
        query = tiles.load_rows(query_ref, at, rows, plan.width)
        # keys in front, so that sums over rows are plain products
        scores = tiles.product(key, query, 1, 1) * (plan.settings.scale * tiles.LOG2_E)
        if masked:
            seen = tiles.seen(plan, visibility, at, rows, at.tile, keys_first=True)
            scores = jnp.where(seen, scores, -jnp.inf)
        weights = jnp.exp2(scores - tiles.load_numbers(lse_ref, at, rows, jnp.inf)[None, :])
        d_out = tiles.load_rows(out_ref, at, rows, plan.value_width)
        d_value += tiles.product(weights.astype(d_out.dtype), d_out, 1, 0)
        delta = tiles.load_numbers(delta_ref, at, rows, 0.0)
        d_scores = weights * (tiles.product(value, d_out, 1, 1) - delta[None, :])
        return d_key + tiles.product(d_scores.astype(query.dtype), query, 1, 0), d_value

    start = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    # Keys that pad the last tile are zero, and their sums are not stored.
    over = tiles.tile_range(plan, found, at, of_keys=True)
    d_key, d_value = tiles.loop_over(plan, over, at, step, start)
    tiles.store_keys(plan, d_key_ref, at, d_key * plan.settings.scale, plan.width)
    tiles.store_keys(plan, d_value_ref, at, d_value, plan.value_width)
