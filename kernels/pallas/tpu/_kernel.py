"""The kernel for TPUs: keys and values read once, in blocks, while the last are computed with."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...call._arguments import Operands, Settings, out_dtype
from ...call._kernel import AbstractKernel, check_operands
from ...call._state import AttentionState, merge_all
from .._common import result_like
from ._backward import backward
from ._layout import Layout, fold_keys, fold_rows, layout, unfold_rows
from ._step import HIDDEN, clear, dot, hide, kept, key_spec, look, mark_specs, step
from ._visibility import marks_of, walks

# The keys of few rows are walked in two shares at once: v4 and v5p are two cores.
SPLITS = 2
_DTYPES = ("bfloat16", "float32")  # what the compiler loads; float16 it does not


class PallasTPU(AbstractKernel):
    """Our own kernel for TPUs, in Pallas.

    Up to 256 queries times heads read keys and values once, where they lie and as XLA lays such
    arrays out, of any width: no copy fills it up to 128. (There is one of either if its width is a
    multiple of 128 and the other's is not, and of both for rare numbers of key heads.) More rows
    move key heads to the front first, by one copy, where the width is a multiple of 128.
    """

    name = "pallas_tpu"
    platforms = ("tpu",)
    interpreted = ("cpu", "cuda", "rocm")
    exported = True

    def check(self, operands: Operands, settings: Settings) -> None:
        """Raises `NotImplementedError` for biases, masks, float16, float64, or no rows or keys."""
        check_operands(operands, _DTYPES, ("bias", "mask"))
        for is_backward in (False, True):
            layout(operands, settings, backward=is_backward)

    def forward(
        self, operands: Operands, settings: Settings, platform: str | None
    ) -> AttentionState:
        """The online softmax over blocks of keys. Raises nothing."""
        return _forward(operands, settings, interpret=platform != "tpu")

    def backward(
        self,
        operands: Operands,
        settings: Settings,
        state: AttentionState,
        cotangent: AttentionState,
        platform: str | None,
    ) -> Operands:
        """Two kernels, one over the keys of each row and one over the rows of each key.

        Raises nothing.
        """
        return backward(operands, settings, state, cotangent, interpret=platform != "tpu")


def _forward(operands: Operands, settings: Settings, *, interpret: bool) -> AttentionState:
    at = layout(operands, settings, backward=False)
    query, key, value = operands[:3]
    batch = query.shape[0]
    marks = marks_of(operands, at)
    splits = SPLITS if at.row_blocks == 1 and at.key_blocks >= SPLITS else 1
    numbers = walks(marks, at, batch, splits=splits)
    grid = (batch, at.heads, splits, at.row_blocks, pl.cdiv(at.key_blocks, splits))

    def walk(b: Any, s: Any, i: Any) -> Any:
        return (b * at.row_blocks + i) * splits + s

    def row(b: Any, s: Any, i: Any, j: Any, *_: Any) -> Any:
        return i

    def key_(b: Any, s: Any, i: Any, j: Any, first: Any, stop: Any, *_: Any) -> Any:
        return step(first, stop, walk(b, s, i), j)

    def rows_at(b: Any, p: Any, s: Any, i: Any, j: Any, *_: Any) -> Any:
        return b, p, i, 0

    def out_at(b: Any, p: Any, s: Any, i: Any, j: Any, *_: Any) -> Any:
        return s, b, p, i, 0

    def lse_at(b: Any, p: Any, s: Any, i: Any, j: Any, *_: Any) -> Any:
        return s, b, p, 0, i

    width, value_width = query.shape[-1], value.shape[-1]
    found_dtype = out_dtype(operands, settings) if splits == 1 else jnp.float32
    rows = at.row_blocks * at.row_block
    specs = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(numbers),
        grid=grid,
        in_specs=[
            pl.BlockSpec((None, None, at.row_block, width), rows_at),
            key_spec(width, at, key_, tall=at.tall_key),
            key_spec(value_width, at, key_, tall=at.tall_value),
            mark_specs(marks.arrays, at, row, key_),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, at.row_block, value_width), out_at),
            pl.BlockSpec((None, None, None, 1, at.row_block), lse_at),
        ],
        scratch_shapes=[
            pltpu.VMEM((at.row_block, 1), jnp.float32),
            pltpu.VMEM((at.row_block, 1), jnp.float32),
            pltpu.VMEM((at.row_block, value_width), jnp.float32),
        ],
    )
    out, lse = pl.pallas_call(
        functools.partial(_kernel, at=at, walk=walk),
        grid_spec=specs,
        out_shape=[
            result_like(query, (splits, batch, at.heads, rows, value_width), found_dtype),
            result_like(query, (splits, batch, at.heads, 1, rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 4 + ("arbitrary",)
        ),
        interpret=interpret,
        name="attention_forward",
    )(
        *numbers,
        fold_rows(query, at),
        fold_keys(key, at, tall=at.tall_key),
        fold_keys(value, at, tall=at.tall_value),
        marks.arrays,
    )
    state = AttentionState(out, lse.squeeze(-2))
    state = merge_all(state) if splits > 1 else AttentionState(out[0], state.lse[0])
    out, lse = (unfold_rows(x, at) for x in state)
    return AttentionState(out.astype(out_dtype(operands, settings)), lse)


def _kernel(
    first: Any,
    stop: Any,
    open_first: Any,
    open_stop: Any,
    query: Any,
    key: Any,
    value: Any,
    marks: dict[str, Any],
    out: Any,
    lse: Any,
    maximum: Any,
    total: Any,
    sums: Any,
    *,
    at: Layout,
    walk: Callable[..., Any],
) -> None:
    """One block of rows meets one block of keys; the statistics stay on the chip meanwhile.

    query `[rows, H]`, key `[keys, H]`, value `[keys, Hv]`, marks `[1, rows]` and `[1, keys]`;
    out `[rows, Hv]`, lse `[1, rows]`; maximum and total `[rows, 1]`, sums `[rows, Hv]`, float32.
    """
    b, p, s, i, j = map(pl.program_id, range(5))
    numbers = first, stop, open_first, open_stop

    @pl.when(j == 0)
    def _() -> None:
        maximum[...] = jnp.full_like(maximum, HIDDEN)
        total[...] = jnp.zeros_like(total)
        sums[...] = jnp.zeros_like(sums)

    @look(numbers, walk(b, s, i), j, marks)
    def _(block: Any, compared: dict[str, Any]) -> None:
        clear(value, block, at, tall=at.tall_value)
        scores = dot(query[...], key[...], (1, 0 if at.tall_key else 1)) * at.settings.scale
        scores = hide(scores, compared, block, at, turned=False)
        old = maximum[...]
        new = jnp.maximum(old, scores.max(-1, keepdims=True))
        shift = jnp.where(new == HIDDEN, 0.0, new)
        weights = jnp.exp(scores - shift)
        decay = jnp.exp(old - shift)
        maximum[...] = new
        total[...] = total[...] * decay + weights.sum(-1, keepdims=True)
        values = kept(value, compared, tall=at.tall_value)
        found = dot(weights.astype(value.dtype), values, (1, 1 if at.tall_value else 0))
        sums[...] = sums[...] * decay + found

    @pl.when(j == pl.num_programs(4) - 1)
    def _() -> None:
        empty = total[...] == 0
        if "row_positions" in marks:  # rows that are not there see what all see
            empty |= marks["row_positions"][...].T < 0
        divisor = jnp.where(empty, 1.0, total[...])
        out[...] = jnp.where(empty, 0.0, sums[...] / divisor).astype(out.dtype)
        # a column of energies for each row, written as a row: a column would take 128 times its
        # memory
        lse[...] = jnp.where(empty, HIDDEN, maximum[...] + jnp.log(divisor)).T
