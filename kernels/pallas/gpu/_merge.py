"""The merge of the parts that programs compute when they split the keys."""

import functools

import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from ...call._state import AttentionState, fold
from .._common import result_like
from . import _tile as tiles
from ._sizes import LEAST

# The terms that a program adds: 32 for each of its threads.
TERMS = 4096


def merge(
    parts: AttentionState, query: Array, dtype: jnp.dtype, *, interpret: bool
) -> AttentionState:
    """The merge of parts `[splits, ...]`, in one kernel."""
    splits, *shape, width = parts.out.shape
    flat = [x.reshape(splits, -1, *x.shape[4:]) for x in parts]
    rows = flat[1].shape[1]
    block = min(max(LEAST, TERMS // tiles.power(splits)), tiles.power(width))
    out, lse = pl.pallas_call(
        functools.partial(_kernel, block),
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


def _kernel(block: int, parts_ref: Ref, lses_ref: Ref, out_ref: Ref, lse_ref: Ref) -> None:
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
