"""The Triton backward kernels: dQ loops over keys, dK and dV loop over queries.

One program sums the whole gradient of its tile, in float32, so that the order of the sum is deterministic. A kernel's
parameters are the references that `launch` passes. Equations: FlashAttention-2 (Dao, arXiv 2307.08691).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Ref
from jaxtyping import Array

from ...call._operands import Operands, cotangents
from ...call._state import AttentionState
from ...xla._blockwise_derivatives import backward_rows, row_cotangents
from .._score import score_cotangents, score_numbers
from .._score_program import Numbers
from .._tiles import LOG2_E
from ._plan import TritonPlan
from ._score import TritonScores, sums_like
from ._tile import TritonProgram, launch, product


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
    lse = rows.lse * LOG2_E  # in bits
    d_out = rows.d_out.astype(value.dtype)
    arrays = (rows.query, key, value, d_out, lse, rows.delta)
    numbers = score_numbers(operands, query_plan.score)

    def run(kernel: Callable[..., None], plan: TritonPlan, name: str, like: Any) -> Any:
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like]
        of_keys = kernel is _key_kernel
        sums = Numbers() if of_keys else sums_like(plan, numbers, query)
        inputs = plan, operands, arrays, (numbers,), (results, sums)
        parts, sums = launch(kernel, *inputs, of_keys=of_keys, interpret=interpret, name=name)
        gradients = [part.sum(0).astype(x.dtype) for part, x in zip(parts, like, strict=True)]
        return *gradients, jax.tree.map(lambda x: x.sum(0), sums)

    d_query, sums = run(_query_kernel, query_plan, "attention_backward_query", [query])
    d_key, d_value, _ = run(_key_kernel, key_plan, "attention_backward_key", [key, value])
    to_score = score_cotangents(operands, query_plan.score, sums)
    return cotangents(d_query, d_key, d_value, score_arrays=to_score)


def _query_kernel(
    program: TritonProgram,
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    numbers: Numbers,
    results: list[Ref],
    sums_refs: Numbers,
) -> None:
    plan, rows = program.plan, program.rows(program.tile)
    query = program.load_rows(query_ref, rows, plan.width)
    d_out = program.load_rows(out_ref, rows, plan.value_width)
    lse = program.load_numbers(lse_ref, rows, jnp.inf)
    delta = program.load_numbers(delta_ref, rows, 0.0)
    score = TritonScores(program, numbers)
    row_inputs = score.row_inputs(rows)

    def step(tile: Array, carry: tuple[Array, Numbers], masked: bool) -> tuple[Array, Numbers]:
        sums, score_sums = carry
        key = program.load_keys(key_ref, tile, plan.width, not masked)
        scores, pull = score.vjp(product(query, key, 1, 1), row_inputs, tile)
        seen = None
        if masked:
            seen = program.seen(rows, tile)
            scores = jnp.where(seen, scores, -jnp.inf)
        weights = program.exp2(scores, score.unit, lse[:, None])
        value = program.load_keys(value_ref, tile, plan.value_width, not masked)
        if masked:
            key, value = program.zero_hidden(tile, key, value)
        # dS = P (dOut V^T - delta), P = e^(S - lse), delta = dOut·out - dlse; dQ = scale dS K
        d_scores = weights * (product(d_out, value, 1, 1) - delta[:, None])
        d_scores, added = pull(d_scores, seen)
        score_sums = jax.tree.map(jnp.add, score_sums, added)
        return sums + product(d_scores.astype(key.dtype), key, 1, 0), score_sums

    start = jnp.zeros(query.shape, jnp.float32), score.no_sums()
    sums, score_sums = program.loop(step, start)
    program.store_rows(results[0], rows, sums * plan.settings.scale, plan.width)
    score.store(sums_refs, rows, score_sums)


def _key_kernel(
    program: TritonProgram,
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    numbers: Numbers,
    results: list[Ref],
    _: Numbers,
) -> None:
    plan = program.plan
    key = program.load_keys(key_ref, program.tile, plan.width, False)
    value = program.load_keys(value_ref, program.tile, plan.value_width, False)
    key, value = program.zero_hidden(program.tile, key, value)
    score = TritonScores(program, numbers)

    def step(tile: Array, carry: tuple[Array, Array], masked: bool) -> tuple[Array, Array]:
        d_key, d_value = carry
        rows = program.rows(tile)
        query = program.load_rows(query_ref, rows, plan.width)
        # transposed scores [keys, rows], so that sums over rows are plain products
        products = product(key, query, 1, 1)
        scores, pull = score.vjp(products, score.row_inputs(rows), program.tile)
        seen = None
        if masked:
            seen = program.seen(rows, program.tile)
            scores = jnp.where(seen, scores, -jnp.inf)
        lse = program.load_numbers(lse_ref, rows, jnp.inf)
        weights = program.exp2(scores, score.unit, lse[None, :])
        d_out = program.load_rows(out_ref, rows, plan.value_width)
        # dV = P^T dOut; dK = scale dS^T Q
        d_value += product(weights.astype(d_out.dtype), d_out, 1, 0)
        delta = program.load_numbers(delta_ref, rows, 0.0)
        d_scores = weights * (product(value, d_out, 1, 1) - delta[None, :])
        d_scores, _ = pull(d_scores, seen)
        return d_key + product(d_scores.astype(query.dtype), query, 1, 0), d_value

    start = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    # Keys that pad the last tile are zero, and their sums are not stored.
    d_key, d_value = program.loop(step, start)
    program.store_keys(results[0], d_key * plan.settings.scale, plan.width)
    program.store_keys(results[1], d_value, plan.value_width)
