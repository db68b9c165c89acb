"""The TPU kernel of the state's derivative in a direction: one pass over the keys of rows.

The weights come from the saved energies, so the sums over two parts of the keys add up. The formulas
are those of `AbstractKernel.tangent`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ...call._operands import Operands
from ...call._state import AttentionState, holds_keys
from .._rows import moving_arrays
from .._score_program import Numbers
from ._grid import TPUGrid
from ._layout import Layout, fold_keys, fold_rows, unfold_rows
from ._score import BlockScores, block_directions, block_numbers
from ._step import dot, hide, load_present, visit, zero_past_end
from ._visibility import BlockRanges, block_ranges, block_visibility


def tangent(
    operands: Operands,
    layout: Layout,
    state: AttentionState,
    directions: Operands,
    *,
    interpret: bool,
) -> AttentionState:
    query, value = operands.query, operands.value
    width, value_width = query.shape[-1], value.shape[-1]
    visibility = block_visibility(operands, layout)
    grid = TPUGrid(layout, len(query))
    ranges = block_ranges(visibility, layout, grid.batch, splits=grid.splits)
    of_score = (block_numbers(operands, layout), block_directions(operands, layout, directions))
    tall = {"key": layout.tall_key, "value": layout.tall_value}
    specs = {
        "query": grid.of_rows(width),
        "key": grid.of_keys(width, tall=layout.tall_key),
        "value": grid.of_keys(value_width, tall=layout.tall_value),
    }

    def folded(arrays: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Any]]:
        """The arrays by name, in the layout of their kind, with their specs."""
        blocks = {
            name: fold_keys(x, layout, tall=tall[name]) if name in tall else fold_rows(x, layout)
            for name, x in arrays.items()
        }
        return blocks, {name: specs[name] for name in blocks}

    # rows without keys, and those that pad a block, have no weight: e^{s - inf} = 0
    lse = fold_rows(jnp.where(holds_keys(state.lse), state.lse, jnp.inf), layout, jnp.inf)
    out, lse = grid.run(
        _kernel,
        ranges,
        [
            folded(moving_arrays(operands)),
            folded(moving_arrays(directions)),
            (fold_rows(state.out, layout), grid.of_rows(value_width)),
            (lse[:, :, None], grid.of_numbers()),
            (visibility.arrays, grid.of_visibility(visibility.arrays)),
            (of_score, tuple(None if x is None else grid.of_score(x) for x in of_score)),
        ],
        grid.parts_like(query, value_width, state.out.dtype if grid.splits == 1 else jnp.float32),
        grid.of_parts(value_width),
        [
            pltpu.VMEM((layout.row_block, 1), jnp.float32),
            pltpu.VMEM((layout.row_block, value_width), jnp.float32),
        ],
        interpret=interpret,
        name="attention_tangent",
    )
    out, lse = (unfold_rows(x.sum(0), layout) for x in (out, lse.squeeze(-2)))
    return AttentionState(out.astype(state.out.dtype), lse)


def _kernel(
    ranges: BlockRanges,
    fixed: dict[str, Ref],
    moving: dict[str, Ref],
    out: Ref,
    lse: Ref,
    visibility: dict[str, Ref],
    score_numbers: tuple[Numbers, Numbers | None],
    d_out: Ref,
    d_lse: Ref,
    total: Ref,
    sums: Ref,
    *,
    layout: Layout,
    range_index: Callable[..., Any],
) -> None:
    """One step, of a block of rows and a block of keys: `total += P ds`, `sums += P (ds v + dv)`.

    fixed and those moving: query `[rows, H]`, key `[keys, H]`, value `[keys, Hv]`; out and d_out
    `[rows, Hv]`, lse and d_lse `[1, rows]`, visibility `[1, rows]` and `[1, keys]`; total `[rows, 1]`
    and sums `[rows, Hv]`, float32.
    """
    b, p, s, i, j = map(pl.program_id, range(5))
    numbers, d_numbers = score_numbers
    scores_move = bool(moving.keys() & {"query", "key"}) or d_numbers is not None

    @pl.when(j == 0)
    def _() -> None:
        total[...] = jnp.zeros(total.shape, total.dtype)
        sums[...] = jnp.zeros(sums.shape, sums.dtype)

    @visit(ranges, range_index(b, s, i), j, visibility)
    def _(block: Array, compared: dict[str, Ref]) -> None:
        def keys(x: Ref, *, tall: bool) -> Array:
            zero_past_end(x, block, layout, tall=tall)
            return load_present(x, compared, tall=tall)

        query, over = fixed["query"][...], (1, 0 if layout.tall_key else 1)
        of_values = (1, 1 if layout.tall_value else 0)
        key = keys(fixed["key"], tall=layout.tall_key)
        product, score = dot(query, key, over), BlockScores(layout, numbers, visibility)
        scores = hide(score.scores(product), compared, block, layout, turned=False)
        weights = jnp.exp(scores - lse[...].T)
        d_scores = []
        if "query" in moving:
            d_scores.append(dot(moving["query"][...], key, over))
        if "key" in moving:
            d_scores.append(dot(query, keys(moving["key"], tall=layout.tall_key), over))
        if scores_move:
            change: Any = None
            if d_scores:
                change = sum(d_scores[1:], d_scores[0]) * layout.settings.scale
            terms = weights * score.jvp(change, product, d_numbers)
            total[...] += terms.sum(-1, keepdims=True)
            value = keys(fixed["value"], tall=layout.tall_value)
            sums[...] += dot(terms.astype(value.dtype), value, of_values)
        if "value" in moving:
            d_value = keys(moving["value"], tall=layout.tall_value)
            sums[...] += dot(weights.astype(d_value.dtype), d_value, of_values)

    @pl.when(j == pl.num_programs(4) - 1)
    def _() -> None:
        has_keys = lse[...].T != jnp.inf
        d_out_rows = sums[...]
        if scores_move:
            d_out_rows -= total[...] * out[...].astype(jnp.float32)
        d_out[...] = jnp.where(has_keys, d_out_rows, 0.0).astype(d_out.dtype)
        d_lse[...] = jnp.where(has_keys, total[...], 0.0).T
