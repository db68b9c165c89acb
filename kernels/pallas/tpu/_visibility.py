"""Positions and segments in the layout of the TPU kernels, and the ranges of blocks they visit."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Ref, lax
from jaxtyping import Array, Int

from ...call._operands import Operands, bound, hide_unreachable
from ...masks._abstract import AbstractMask
from ...masks._interval import Interval, interval
from ...masks._visibility import must_meet
from .._rows import (
    Visibility,
    block_list,
    block_spans,
    features_of,
    meeting_blocks,
    visibility_of,
)
from ._layout import Layout


class BlockVisibility(NamedTuple):
    """The arrays that a kernel compares for its masks, and the blocks that it can skip.

    Attributes:
        arrays: int32 `[B or 1, 1, R]` of rows and `[B or 1, 1, C]` of keys, by name: positions,
            segments, heads, and other numbers that the mask compares, if needed. Heads of keys are
            for one block.
        meets: which blocks of rows might see which of keys, `[B or 1, rows, keys]`; None for all.
        open: in which of them all present rows see all keys, the same; None for all.
    """

    arrays: dict[str, Array]
    meets: Array | None
    open: Array | None


def block_visibility(operands: Operands, at: Layout) -> BlockVisibility:
    """The visibility of folded rows and keys."""
    operands = hide_unreachable(operands, at.settings)
    # `visibility_of` repeats rows for the heads that share a key head; these are folded already
    batch, keys, key_block = len(operands.key), operands.key.shape[1], at.key_block // at.key_fold
    folded = operands._replace(
        query=jax.ShapeDtypeStruct((batch, at.rows, 1, 1), jnp.float32),
        key=jax.ShapeDtypeStruct((batch, keys, 1, 1), jnp.float32),
        query_positions=_repeated(operands.query_positions, at.row_fold),
        query_segments=_repeated(operands.query_segments, at.row_fold),
    )
    features = features_of(operands, at.pairs)
    features = features._replace(queries=tuple(_repeated(x, at.row_fold) for x in features.queries))
    found = visibility_of(folded, at.settings, features, at.row_block, key_block)
    mask = bound(at.settings, operands)
    meets = meeting_blocks(found, mask, at.row_block, key_block)
    names = ("row_positions", "key_positions", "row_segments", "key_segments")
    arrays = {n: x[:, None] for n, x in zip(names, found[:4], strict=True) if x is not None}
    for side, numbers in zip(("row", "key"), found.features, strict=True):
        arrays |= {feature(side, i): x[:, None] for i, x in enumerate(numbers)}
    for name in arrays:
        if name.startswith("key"):
            arrays[name] = _repeated(arrays[name], at.key_fold)
    if at.key_fold > 1:
        group = at.row_fold // at.key_fold
        rows = jnp.arange(at.row_blocks * at.row_block, dtype=jnp.int32)
        arrays["row_heads"] = (rows % at.row_fold // group)[None, None]
        arrays["key_heads"] = jnp.arange(at.key_block, dtype=jnp.int32)[None, None] % at.key_fold
    return BlockVisibility(arrays, meets, _open(found, mask, at, key_block))


def feature(side: str, number: int) -> str:
    """The name of an array of numbers that the mask compares, of the side "row" or "key"."""
    return f"{side}_feature_{number}"


def _open(found: Visibility, mask: AbstractMask, at: Layout, key_block: int) -> Any:
    conditions = []

    def cut(rows: Array, keys: Array) -> tuple[Array, Array]:
        return (
            rows.reshape(len(rows), -1, 1, at.row_block),
            keys.reshape(len(keys), 1, -1, key_block),
        )

    if found.row_positions is not None and found.key_positions is not None:
        rows, keys = cut(found.row_positions, found.key_positions)
        all_keys = Interval(keys.min(-1), keys.max(-1))
        conditions.append(must_meet(mask, interval(rows), all_keys))
    if found.row_segments is not None and found.key_segments is not None:
        rows, keys = cut(found.row_segments, found.key_segments)
        # as no minimum exceeds a maximum, all four are equal
        conditions.append((rows.min(-1) == keys.max(-1)) & (rows.max(-1) == keys.min(-1)))
    return functools.reduce(operator.and_, conditions) if conditions else None


def _repeated(x: Array | None, times: int) -> Any:
    """`jnp.repeat` along the last axis, as sums over windows of numbers with zeros between them.

    `jnp.repeat` takes 16 times the memory on XLA:TPU (JAX 0.10.2; red with it: `test_ragged_decode_copies_nothing`).
    """
    if x is None or times == 1:
        return x
    zero, others = jnp.zeros((), x.dtype), x.ndim - 1
    x = lax.pad(x, zero, [(0, 0, 0)] * others + [(0, times - 1, times - 1)])
    window, before = [1] * others + [times], [(0, 0)] * others + [(times - 1, 0)]
    return lax.reduce_window(x, zero, lax.add, window, [1] * (others + 1), before)


class BlockRanges(NamedTuple):
    """The ranges of blocks that blocks visit, with one axis of all batch entries, blocks and parts.

    Attributes:
        first: the first block of a range.
        stop: one past the last.
        open_first: the first of a run of open ones.
        open_stop: one past its last.
        order: None; or the blocks, of which all of the above are indices, where those that are visited
            may lie anywhere.
    """

    first: Int[Array, " ranges"] | Ref
    stop: Int[Array, " ranges"] | Ref
    open_first: Int[Array, " ranges"] | Ref
    open_stop: Int[Array, " ranges"] | Ref
    order: Int[Array, " blocks"] | Ref | None


def block_ranges(
    visibility: BlockVisibility, at: Layout, batch: int, *, of_keys: bool = False, splits: int = 1
) -> BlockRanges:
    """The ranges of blocks of keys that blocks of rows visit; with `of_keys` of rows, for keys.

    One axis holds all batch entries, blocks and `splits` equal parts of a range, because the memory
    for scalars pads the last axis.
    """
    outer, inner = at.row_blocks, at.key_blocks
    if of_keys:
        outer, inner = inner, outer
        visibility = visibility._replace(
            **{
                name: None if x is None else x.swapaxes(1, 2)
                for name, x in (("meets", visibility.meets), ("open", visibility.open))
            }
        )
    whole = tuple(jnp.full((1, outer), x, jnp.int32) for x in (0, inner))
    order = None
    if at.pairs is not None and visibility.meets is not None and visibility.open is not None:
        # the lists of all batch entries and blocks, one after the other
        found = block_list(visibility.meets, visibility.open)
        start = inner * jnp.arange(batch * outer, dtype=jnp.int32).reshape(batch, outer)
        order = jnp.broadcast_to(found.order, (batch, outer, inner)).reshape(-1)
        first, stop = start, start + found.stop
        open_first, open_stop = start, start + found.whole
    else:
        first, stop = whole if visibility.meets is None else block_spans(visibility.meets)
        open_first, open_stop = whole if visibility.open is None else _first_run(visibility.open)

    def each(x: Array) -> Array:
        return jnp.broadcast_to(x[..., None], (batch, outer, splits))

    first, stop, open_first, open_stop = map(each, (first, stop, open_first, open_stop))
    share = (stop - first + splits - 1) // splits
    first = jnp.minimum(first + share * lax.broadcasted_iota(jnp.int32, share.shape, 2), stop)
    stop = jnp.minimum(first + share, stop)
    first, stop, open_first, open_stop = (
        x.reshape(-1) for x in (first, stop, open_first, open_stop)
    )
    return BlockRanges(first, stop, open_first, open_stop, order)


def _first_run(x: Array) -> tuple[Array, Array]:
    first = x.argmax(-1).astype(jnp.int32)
    number = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    ends = jnp.where(x | (number < first[..., None]), x.shape[-1], number).min(-1)
    return first, jnp.where(x.any(-1), ends, 0)
