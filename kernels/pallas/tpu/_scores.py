"""The scores of blocks in the TPU kernels: their visibility, the blocks that are visited, and custom scores."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from ..._varying import result_like
from ...call._operands import Operands, bound, hide_unreachable
from ...call._state import unfused
from ...masks._visibility import visible
from .._rows import (
    block_list,
    block_run,
    block_spans,
    features_of,
    meeting_blocks,
    open_blocks,
    padded_visibility,
)
from .._score import score_cotangents, score_directions, score_numbers
from .._score_program import Numbers
from ._kernel import Layout, unfold_rows

HIDDEN = -math.inf


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
    """Name of the array of the `number`-th feature that the mask compares, for the side "row" or "key"."""
    return f"{side}_feature_{number}"


def _repeated(x: Array | None, times: int) -> Any:
    # `jnp.repeat` along the last axis, as sums over windows of numbers with zeros between them: XLA:TPU takes 16 times
    # the memory for `jnp.repeat`, with which `test_ragged_decode_copies_nothing` fails.
    if x is None or times == 1:
        return x
    zero, leading = jnp.zeros((), x.dtype), x.ndim - 1
    x = lax.pad(x, zero, [(0, 0, 0)] * leading + [(0, times - 1, times - 1)])
    window, padding = [1] * leading + [times], [(0, 0)] * leading + [(times - 1, 0)]
    return lax.reduce_window(x, zero, lax.add, window, [1] * (leading + 1), padding)


class BlockRanges(NamedTuple):
    """Ranges `[first, stop)` of iterated blocks for each kept block, and in each a run of blocks that need no mask.

    One axis holds all batch entries, kept blocks and splits.
    """

    first: Int[Array, " ranges"] | Ref
    stop: Int[Array, " ranges"] | Ref
    open_first: Int[Array, " ranges"] | Ref
    open_stop: Int[Array, " ranges"] | Ref
    order: Int[Array, " blocks"] | Ref | None  # the blocks, into which the others are indices


def block_ranges(
    visibility: TPUVisibility, layout: Layout, batch: int, *, of_keys: bool = False, splits: int = 1
) -> BlockRanges:
    """Ranges of key blocks for each block of rows; with `of_keys`, of row blocks for each block of keys.

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


def hide(
    scores: Array, visibility: dict[str, Ref], key_block: Array, layout: Layout, *, turned: bool
) -> Array:
    """Scores `[rows, keys]` of a block, or `[keys, rows]` if `turned`, -inf where hidden."""

    def pair(name: str) -> tuple[Array, Array]:
        row, key = visibility[f"row_{name}"][...], visibility[f"key_{name}"][...]
        return (row, key.T) if turned else (row.T, key)

    conditions: list[Any] = []
    if "row_positions" in visibility:
        if layout.pairs is None:
            conditions.append(visible(layout.settings.mask.bind(), *pair("positions")))
        else:
            conditions.append(
                layout.pairs.visible(*pair("positions"), *_features(visibility, layout, turned))
            )
    if layout.bounded:
        shape, axis = ((layout.key_block, 1), 0) if turned else ((1, layout.key_block), 1)
        number = key_block * layout.key_block + lax.broadcasted_iota(jnp.int32, shape, axis)
        conditions.append(number < layout.keys)
    for name in ("segments", "heads"):
        if f"row_{name}" in visibility:
            conditions.append(operator.eq(*pair(name)))
    if not conditions:
        return scores
    return jnp.where(functools.reduce(operator.and_, conditions), scores, HIDDEN)


def _features(
    visibility: dict[str, Ref], layout: Layout, turned: bool
) -> tuple[list[Array], list[Array]]:
    """Numbers that the mask compares, as columns and rows that broadcast."""
    if layout.pairs is None:
        return [], []
    rows = [visibility[feature("row", i)][...] for i in range(layout.pairs.of_queries)]
    keys = [visibility[feature("key", i)][...] for i in range(layout.pairs.of_keys)]
    return ([x if turned else x.T for x in rows], [x.T if turned else x for x in keys])


class BlockScores:
    """The scores of a step's block `[rows, keys]`, or `[keys, rows]` if `turned`."""

    def __init__(
        self, layout: Layout, numbers: Numbers, visibility: dict[str, Ref], *, turned: bool = False
    ):
        self._score, self._scale = layout.score, layout.settings.scale
        self._numbers, self._visibility, self._turned = numbers, visibility, turned

    @property
    def unit(self) -> float:
        """The positive factor from the maximum of `in_units` to the maximum of the scores."""
        plain = self._score is None and self._scale != 0
        return abs(self._scale) if plain else 1.0

    def in_units(self, product: Array) -> Array:
        """The scores divided by `unit`, so that subtracting their maximum cannot fuse with a multiplication."""
        if self._score is not None or self._scale == 0:
            return unfused(self.scores(product))
        return product if self._scale > 0 else -product

    def scores(self, product: Array) -> Array:
        raw = product * self._scale
        if self._score is None:
            return raw
        places, numbers, _ = self._read(product.shape)
        return self._score.score(raw, places, numbers)

    def vjp(self, product: Array) -> tuple[Array, Callable[[Array, Numbers], Array]]:
        """The scores, and the pullback to the cotangents of scaled products.

        The pullback also adds the cotangents of numbers and tables to sums in scratch memory, if any.
        """
        if self._score is None:
            return self.scores(product), lambda cotangent, sums: cotangent
        # dx = g'(x) ds, dn_i = Σ_a ds_ia ∂g/∂n; of tables by entry
        places, numbers, indices = self._read(product.shape)
        raw = product * self._scale
        scores, pullback = self._score.vjp(raw, places, numbers)

        def back(cotangent: Array, sums: Numbers) -> Array:
            d_raw, floats, entries = pullback(cotangent)
            for ref, x in zip(sums.floats, floats, strict=bool(sums.floats)):
                ref[...] += x.sum(-1, keepdims=True)
            for ref, x, index in zip(sums.tables, entries, indices, strict=bool(sums.tables)):
                _add_by_entry(ref, x, index)
            return d_raw

        return scores, back

    def jvp(self, change: Array | None, product: Array, directions: Numbers | None) -> Any:
        """Tangent of the scores, given tangents of the scaled products, numbers and tables."""
        if self._score is None:
            return change
        # ds = g'(x) dx + ∂g/∂n dn
        places, numbers, indices = self._read(product.shape)
        changes = None
        if directions is not None:
            floats = tuple(self._across(x[...], product.shape) for x in directions.floats)
            changes = Numbers(floats, self._entries(directions, indices, 0.0))
        raw = product * self._scale
        return self._score.jvp(raw, places, numbers, change, changes)

    def _read(self, shape: tuple[int, ...]) -> tuple[dict[str, Array], Numbers, list[Array]]:
        """Positions, numbers and table entries broadcast to a block, and the indices of the entries."""
        assert self._score is not None
        places = {}
        if self._score.uses_positions:
            key = self._visibility["key_positions"][...]
            places = {
                "query": self._across(self._visibility["row_positions"][...], shape),
                "key": jnp.broadcast_to(key.T if self._turned else key, shape),
            }
        numbers = jax.tree.map(
            lambda x: self._across(x[...], shape), self._numbers._replace(tables=())
        )
        indices = self._score.indices(places, numbers)
        entries = self._entries(self._numbers, indices, math.nan)
        return places, numbers._replace(tables=entries), indices

    def _across(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Broadcasts one number per row, `[1, rows]`, to a block."""
        return jnp.broadcast_to(x if self._turned else x.T, shape)

    def _entries(self, numbers: Numbers, indices: list[Array], other: float) -> tuple[Array, ...]:
        entries = []
        for table, index in zip(numbers.tables, indices, strict=True):

            def pick(entry: Array, x: Array, table: Ref = table, index: Array = index) -> Array:
                row = self._across(table[pl.ds(entry, 1), :], index.shape)
                return jnp.where(index == entry, row, x)

            start = jnp.full(index.shape, other, jnp.float32)
            entries.append(lax.fori_loop(jnp.int32(0), jnp.int32(table.shape[0]), pick, start))
        return tuple(entries)


def _add_by_entry(sums: Ref, x: Array, index: Array) -> None:
    """Adds sums over keys of `[rows, keys]` to the sums `[D, rows]` of their entries."""

    def add(entry: Array, _: None) -> None:
        entry_sums = jnp.where(index == entry, x, 0.0).sum(-1, keepdims=True)
        sums[pl.ds(entry, 1), :] += entry_sums.T

    lax.fori_loop(jnp.int32(0), jnp.int32(sums.shape[0]), add, None)


def block_numbers(operands: Operands, layout: Layout) -> Numbers:
    """The inputs of the score for each row, `[B or 1, P, 1, R]`, and of tables `[B or 1, P, D, R]`."""
    return _folded(score_numbers(operands, layout.score), layout)


def block_directions(operands: Operands, layout: Layout, directions: Operands) -> Numbers | None:
    """Tangents of `block_numbers`, given tangents of the score's arrays; None if there are none."""
    changes = score_directions(operands, layout.score, directions)
    return None if changes is None else _folded(changes, layout)


def block_cotangents(operands: Operands, layout: Layout, sums: Numbers) -> tuple[Array | None, ...]:
    """The cotangents of the score's arrays, from the sums of `sums_like`."""

    def unfolded(x: Array) -> Array:
        return unfold_rows(x.swapaxes(2, 3), layout)

    floats = tuple(unfolded(x)[..., 0] for x in sums.floats)
    rows = Numbers(floats, tuple(map(unfolded, sums.tables)))
    return score_cotangents(operands, layout.score, rows)


def sums_like(numbers: Numbers, batch: int, like: Array) -> Numbers:
    """The types of the sums for each row, `[B, P, 1, R]` and `[B, P, D, R]`."""
    return jax.tree.map(
        lambda x: result_like(like, (batch, *x.shape[1:]), jnp.float32), numbers._replace(fixed=())
    )


def sums_scratch(numbers: Numbers, layout: Layout) -> Numbers:
    return Numbers(
        tuple(pltpu.VMEM((layout.row_block, 1), jnp.float32) for _ in numbers.floats),
        tuple(pltpu.VMEM((x.shape[2], layout.row_block), jnp.float32) for x in numbers.tables),
    )


def zero_sums(sums: Numbers) -> None:
    for ref in jax.tree.leaves(sums):
        ref[...] = jnp.zeros(ref.shape, ref.dtype)


def write_sums(results: Numbers, sums: Numbers) -> None:
    for ref, x in zip(results.floats, sums.floats, strict=True):
        ref[...] = x[...].T
    for ref, x in zip(results.tables, sums.tables, strict=True):
        ref[...] = x[...]


def _folded(numbers: Numbers, layout: Layout) -> Numbers:
    # `[b, n]` and `[b, n, D]` repeated for each row, and for the rows that pad a block, which have scores too.
    rows, heads = layout.row_blocks * layout.row_block, layout.heads * layout.row_fold

    def fold(x: Array) -> Array:
        x = x if x.ndim == 3 else x[:, :, None]
        x = jnp.broadcast_to(x, (len(x), heads, x.shape[2]))
        x = x.reshape(len(x), layout.heads, layout.row_fold, x.shape[2]).swapaxes(2, 3)
        return jnp.tile(x, (1, 1, 1, math.ceil(rows / layout.row_fold)))[..., :rows]

    return jax.tree.map(fold, numbers)
