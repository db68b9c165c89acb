"""The merge of the parts that programs have computed which split the keys: by a kernel, or by the last of them."""

import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Int

from ...call._state import AttentionState, fold
from .._common import result_like
from . import _tile as tiles
from ._plan import Plan
from ._sizes import LEAST

# The terms that a program of four warps adds at once: each of its threads has loaded 32.
TERMS = 4096


def by_kernel(
    parts: AttentionState, query: Array, dtype: jnp.dtype, *, interpret: bool
) -> AttentionState:
    """The merge of parts `[splits, ...]` in one kernel, which starts when the one before it has ended."""
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
    row, at = pl.program_id(0), pl.program_id(1)
    splits, _, width = parts_ref.shape
    split = tiles.numbers(tiles.power(splits))
    column = at * block + tiles.numbers(block)
    there, inside = split < splits, column < width
    out, lse = _folded(
        tiles.load(
            parts_ref,
            (split[:, None], row, column[None, :]),
            there[:, None] & inside[None, :],
        ),
        tiles.load(lses_ref, (split, row), there, -jnp.inf),
    )
    triton.store(out_ref.at[row, column], out.astype(out_ref.dtype), mask=inside)
    triton.store(lse_ref.at[row], lse, mask=at == 0)


def _folded(parts: Array, lses: Array) -> AttentionState:
    """The fold of parts over their first axis."""
    state = fold(
        AttentionState(parts, lses),
        lambda x: x.max(0, keepdims=True),
        lambda pair: (pair[0].sum(0, keepdims=True), pair[1].sum(0, keepdims=True)),
    )
    # sums of one element: in kernels for Triton, JAX 0.8 has no slices
    return AttentionState(*(x.sum(0) for x in state))


class Last(NamedTuple):
    """What the last program of each tile writes to: the types of it, or, in a kernel, the refs.

    Attributes:
        out, lse: the merged state, `[1, B, T, N, ...]`.
        done: how many programs of a tile have stored their parts.
    """

    out: Any
    lse: Any
    done: Any


def counters(plan: Plan) -> Int[Array, " tiles"]:
    """Zeros, one for each tile of rows: XLA has no memory that keeps its value between calls."""
    return jnp.zeros(_tiles(plan), jnp.int32)


def _tiles(plan: Plan) -> int:
    return plan.row_tiles * plan.kv_heads * plan.batch


def last_like(plan: Plan, query: Array, dtype: jnp.dtype) -> Last:
    """The types of what is written."""
    shape = 1, *query.shape[:-1]
    return Last(
        result_like(query, (*shape, plan.value_width), dtype),
        result_like(query, shape, jnp.float32),
        result_like(query, (_tiles(plan),), jnp.int32),
    )


def by_last(
    plan: Plan,
    at: tiles.ProgramIndex,
    parts_ref: Ref,
    lses_ref: Ref,
    into: Last,
    *,
    interpret: bool,
) -> None:
    """Counts a program that has stored its part, and merges those of its tile if it is the last.

    All threads have stored before one of them counts, and the addition releases what they stored and acquires
    what the programs that counted before have released: Pallas gives it the order `acq_rel` on the whole GPU. An
    interpreter runs programs one after another, and shows nothing of this. It has no barrier.
    """
    if not interpret:
        triton.debug_barrier()
    _, tile = tiles.divide(pl.program_id(0), _tiles(plan))
    done = triton.atomic_add(into.done, (tile,), jnp.ones((), jnp.int32))

    @pl.when(done == plan.splits - 1)
    def merge() -> None:
        _merge_tile(plan, at, parts_ref, lses_ref, into)


def _merge_tile(
    plan: Plan, at: tiles.ProgramIndex, parts_ref: Ref, lses_ref: Ref, into: Last
) -> None:
    """The merge of a tile's rows, so many at a time as registers hold, without those that are always idle."""
    width, parts = tiles.power(plan.value_width), pl.next_power_of_2(plan.splits)
    most = min(plan.row_times, plan.query_len) * plan.row_heads
    held = min(pl.next_power_of_2(most), max(TERMS * plan.warps // 4 // (parts * width), 1))
    split, columns = tiles.numbers(parts)[:, None], tiles.columns(plan.value_width)
    of_split = None if parts == plan.splits else split < plan.splits

    def step(i: Array, _: None) -> None:
        rows = tiles.rows(plan, at.tile, at.kv_head, i * held, held)
        row = None if rows.there is None else rows.there[None, :]
        there = _all((of_split, row), (parts, held))
        inside = _all(
            (
                None if there is None else there[:, :, None],
                None if columns.there is None else columns.there[None, :, :],
            ),
            (parts, held, width),
        )
        index = split, at.batch, rows.time[None, :], rows.head[None, :]
        of_parts = (*(x[..., None] if x.ndim else x for x in index), columns.number[None, :, :])
        out, lse = _folded(
            tiles.load(parts_ref, of_parts, inside),
            tiles.load(lses_ref, index, there, -jnp.inf),
        )
        whole = at._replace(split=0)
        tiles.store_rows(into.out, whole, rows, out, plan.value_width)
        tiles.store_numbers(into.lse, whole, rows, lse)

    lax.fori_loop(0, -(-most // held), step, None)


def _all(conditions: tuple[Array | None, ...], shape: tuple[int, ...]) -> Array | None:
    found = [x for x in conditions if x is not None]
    return jnp.broadcast_to(functools.reduce(operator.and_, found), shape) if found else None
