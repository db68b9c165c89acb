"""The TPU kernel of the state's derivative in a direction: one pass over the keys of rows.

The weights come from the saved energies, so the sums over two parts of the keys add up. The formulas
are those of `AbstractKernel.tangent`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ...call._operands import Operands
from ...call._state import AttentionState, holds_keys
from .._common import moving_arrays, result_like
from .._score_program import Numbers
from ._grid import Grid, compiler_params
from ._layout import Layout, fold_keys, fold_rows, unfold_rows
from ._score import BlockScores, block_directions, block_numbers, number_specs
from ._step import dot, hide, load_present, visit, zero_past_end
from ._visibility import BlockRanges, block_ranges, block_visibility


def tangent(
    operands: Operands,
    at: Layout,
    state: AttentionState,
    directions: Operands,
    *,
    interpret: bool,
) -> AttentionState:
    """The derivative of the state in a direction, by the layout of its kernel."""
    query, _, value = operands[:3]
    batch, width, value_width = len(query), query.shape[-1], value.shape[-1]
    visibility = block_visibility(operands, at)
    grid = Grid(at, batch)
    ranges = block_ranges(visibility, at, batch, splits=grid.splits)

    def folded(arrays: dict[str, Array]) -> dict[str, Array]:
        tall = {"key": at.tall_key, "value": at.tall_value}
        return {
            name: fold_keys(x, at, tall=tall[name]) if name in tall else fold_rows(x, at)
            for name, x in arrays.items()
        }

    of_score = (block_numbers(operands, at), block_directions(operands, at, directions))
    fixed, moving = (folded(moving_arrays(x)) for x in (operands, directions))
    of = {
        "query": grid.of_rows(width),
        "key": grid.of_keys(width, tall=at.tall_key),
        "value": grid.of_keys(value_width, tall=at.tall_value),
    }
    specs = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=grid.sizes,
        in_specs=[
            of,
            {name: of[name] for name in moving},
            grid.of_rows(value_width),
            grid.of_numbers(),
            grid.of_visibility(visibility),
            tuple(None if x is None else number_specs(x, at, grid.row) for x in of_score),
        ],
        out_specs=grid.of_parts(value_width),
        scratch_shapes=[
            pltpu.VMEM((at.row_block, 1), jnp.float32),
            pltpu.VMEM((at.row_block, value_width), jnp.float32),
        ],
    )
    # rows without keys, and those that pad a block, have no weight: e^{s - inf} = 0
    lse = fold_rows(jnp.where(holds_keys(state.lse), state.lse, jnp.inf), at, jnp.inf)
    rows = at.row_blocks * at.row_block
    shape = (grid.splits, batch, at.heads)
    dtype = state.out.dtype if grid.splits == 1 else jnp.float32
    out, lse = pl.pallas_call(
        functools.partial(_kernel, at=at, range_index=grid.range_index),
        grid_spec=specs,
        out_shape=[
            result_like(query, (*shape, rows, value_width), dtype),
            result_like(query, (*shape, 1, rows), jnp.float32),
        ],
        compiler_params=compiler_params(at, len(grid.sizes)),
        interpret=interpret,
        name="attention_tangent",
    )(ranges, fixed, moving, fold_rows(state.out, at), lse[:, :, None], visibility.arrays, of_score)
    out, lse = (unfold_rows(x.sum(0), at) for x in (out, lse.squeeze(-2)))
    return AttentionState(out.astype(state.out.dtype), lse)


def _kernel(
    ranges: BlockRanges,
    fixed: dict[str, Ref],
    moving: dict[str, Ref],
    out: Ref,
    lse: Ref,
    visibility: dict[str, Ref],
    of_score: tuple[Numbers, Numbers | None],
    d_out: Ref,
    d_lse: Ref,
    total: Ref,
    sums: Ref,
    *,
    at: Layout,
    range_index: Callable[..., Any],
) -> None:
    """One step, of a block of rows and a block of keys: `total += P ds`, `sums += P (ds v + dv)`.

    fixed and those moving: query `[rows, H]`, key `[keys, H]`, value `[keys, Hv]`; out and d_out
    `[rows, Hv]`, lse and d_lse `[1, rows]`, visibility `[1, rows]` and `[1, keys]`; total `[rows, 1]`
    and sums `[rows, Hv]`, float32.
    """
    b, p, s, i, j = map(pl.program_id, range(5))
    numbers, numbers_moving = of_score
    scores_move = bool(moving.keys() & {"query", "key"}) or numbers_moving is not None

    @pl.when(j == 0)
    def _() -> None:
        total[...] = jnp.zeros(total.shape, total.dtype)
        sums[...] = jnp.zeros(sums.shape, sums.dtype)

    @visit(ranges, range_index(b, s, i), j, visibility)
    def _(block: Array, compared: dict[str, Ref]) -> None:
        def keys(x: Ref, *, tall: bool) -> Array:
            zero_past_end(x, block, at, tall=tall)
            return load_present(x, compared, tall=tall)

        query, over = fixed["query"][...], (1, 0 if at.tall_key else 1)
        of_values = (1, 1 if at.tall_value else 0)
        key = keys(fixed["key"], tall=at.tall_key)
        product, score = dot(query, key, over), BlockScores(at, numbers, visibility)
        scores = hide(score.scores(product), compared, block, at, turned=False)
        weights = jnp.exp(scores - lse[...].T)
        d_scores = []
        if "query" in moving:
            d_scores.append(dot(moving["query"][...], key, over))
        if "key" in moving:
            d_scores.append(dot(query, keys(moving["key"], tall=at.tall_key), over))
        if scores_move:
            change: Any = None
            if d_scores:
                change = sum(d_scores[1:], d_scores[0]) * at.settings.scale
            terms = weights * score.along(change, product, numbers_moving)
            total[...] += terms.sum(-1, keepdims=True)
            value = keys(fixed["value"], tall=at.tall_value)
            sums[...] += dot(terms.astype(value.dtype), value, of_values)
        if "value" in moving:
            d_value = keys(moving["value"], tall=at.tall_value)
            sums[...] += dot(weights.astype(d_value.dtype), d_value, of_values)

    @pl.when(j == pl.num_programs(4) - 1)
    def _() -> None:
        some = lse[...].T != jnp.inf
        found = sums[...]
        if scores_move:
            found -= total[...] * out[...].astype(jnp.float32)
        d_out[...] = jnp.where(some, found, 0.0).astype(d_out.dtype)
        d_lse[...] = jnp.where(some, total[...], 0.0).T
