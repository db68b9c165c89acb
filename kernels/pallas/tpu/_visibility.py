"""Positions and segments in the layout of the TPU kernels, and the ranges of blocks they visit."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Ref, lax
from jaxtyping import Array, Int

from ...call._operands import Operands, bound, hide_unreachable
from .._rows import (
    block_list,
    block_run,
    block_spans,
    features_of,
    meeting_blocks,
    open_blocks,
    padded_visibility,
)
from ._layout import Layout


class TPUVisibility(NamedTuple):
    """The arrays that a kernel compares for its masks, and the blocks that it can skip.

    Arrays are int32, `[B or 1, 1, R]` of rows and `[B or 1, 1, C]` of keys: positions, segments, heads, and other
    numbers that the mask compares, if needed. Heads of keys are for one block. Blocks are `[B or 1, rows, keys]`.
    """

    arrays: dict[str, Array]
    meets: Array | None  # the blocks of rows that might see blocks of keys; None: all
    open: Array | None  # in which all present rows see all keys; None: all


def block_visibility(operands: Operands, layout: Layout) -> TPUVisibility:
    settings = layout.settings
    operands = hide_unreachable(operands, settings).positioned(settings.uses_positions)
    key_block = layout.key_block // layout.key_fold
    features = features_of(operands, layout.pairs)
    features = features._replace(
        queries=tuple(_repeated(x, layout.row_fold) for x in features.queries)
    )
    tokens = operands.tokens.map_queries(lambda x: _repeated(x, layout.row_fold))
    folded = operands._replace(tokens=tokens)
    visibility = padded_visibility(folded, features, layout.row_block, key_block)
    mask = bound(settings, operands)
    meets = meeting_blocks(visibility, mask, layout.row_block, key_block)
    names = ("row_positions", "key_positions", "row_segments", "key_segments")
    arrays = {n: x[:, None] for n, x in zip(names, visibility[:4], strict=True) if x is not None}
    for side, numbers in zip(("row", "key"), visibility.features, strict=True):
        arrays |= {feature(side, i): x[:, None] for i, x in enumerate(numbers)}
    for name in arrays:
        if name.startswith("key"):
            arrays[name] = _repeated(arrays[name], layout.key_fold)
    if layout.key_fold > 1:
        group = layout.row_fold // layout.key_fold
        rows = jnp.arange(layout.row_blocks * layout.row_block, dtype=jnp.int32)
        arrays["row_heads"] = (rows % layout.row_fold // group)[None, None]
        arrays["key_heads"] = (
            jnp.arange(layout.key_block, dtype=jnp.int32)[None, None] % layout.key_fold
        )
    all_seen = open_blocks(visibility, mask, layout.row_block, key_block)
    return TPUVisibility(arrays, meets, all_seen)


def feature(side: str, number: int) -> str:
    """The name of an array of numbers that the mask compares, of the side "row" or "key"."""
    return f"{side}_feature_{number}"


def _repeated(x: Array | None, times: int) -> Any:
    """`jnp.repeat` along the last axis, as sums over windows of numbers with zeros between them.

    XLA:TPU takes 16 times the memory for `jnp.repeat`, with which `test_ragged_decode_copies_nothing` fails.
    """
    if x is None or times == 1:
        return x
    zero, leading = jnp.zeros((), x.dtype), x.ndim - 1
    x = lax.pad(x, zero, [(0, 0, 0)] * leading + [(0, times - 1, times - 1)])
    window, padding = [1] * leading + [times], [(0, 0)] * leading + [(times - 1, 0)]
    return lax.reduce_window(x, zero, lax.add, window, [1] * (leading + 1), padding)


class BlockRanges(NamedTuple):
    """The ranges of blocks that blocks visit, from `first` to before `stop`, and in them a run of open blocks.

    One axis is of all batch entries, blocks and parts.
    """

    first: Int[Array, " ranges"] | Ref
    stop: Int[Array, " ranges"] | Ref
    open_first: Int[Array, " ranges"] | Ref
    open_stop: Int[Array, " ranges"] | Ref
    order: Int[Array, " blocks"] | Ref | None  # the blocks, into which the others are indices


def block_ranges(
    visibility: TPUVisibility,
    layout: Layout,
    batch: int,
    *,
    of_keys: bool = False,
    splits: int = 1,
) -> BlockRanges:
    """The ranges of blocks of keys that blocks of rows visit; with `of_keys` of rows, for keys.

    One axis holds all batch entries, blocks and `splits` equal parts of a range, because the memory
    for scalars pads the last axis.
    """
    outer, inner = layout.row_blocks, layout.key_blocks
    meets, is_open = visibility.meets, visibility.open
    if of_keys:
        outer, inner = inner, outer
        meets, is_open = (None if x is None else x.swapaxes(1, 2) for x in (meets, is_open))
    full_range = tuple(jnp.full((1, outer), x, jnp.int32) for x in (0, inner))
    order = None
    if layout.pairs is not None and meets is not None and is_open is not None:
        # the lists of all batch entries and blocks, one after the other
        blocks = block_list(meets, is_open)
        start = inner * jnp.arange(batch * outer, dtype=jnp.int32).reshape(batch, outer)
        order = jnp.broadcast_to(blocks.order, (batch, outer, inner)).reshape(-1)
        ranges = start, start + blocks.stop, start, start + blocks.unmasked
    else:
        spans = full_range if meets is None else block_spans(meets)
        ranges = *spans, *(full_range if is_open is None else block_run(is_open))
    first, stop, *runs = (jnp.broadcast_to(x[..., None], (batch, outer, splits)) for x in ranges)
    share = (stop - first + splits - 1) // splits
    first = jnp.minimum(first + share * lax.broadcasted_iota(jnp.int32, share.shape, 2), stop)
    stop = jnp.minimum(first + share, stop)
    return BlockRanges(*(x.reshape(-1) for x in (first, stop, *runs)), order=order)
