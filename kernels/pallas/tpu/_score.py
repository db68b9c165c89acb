"""The scores of blocks in the TPU kernels: scaled products, or a function of them with its derivatives."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..._varying import result_like
from ...call._operands import Operands
from ...call._state import unfused
from .._score import score_cotangents, score_directions, score_numbers
from .._score_program import Numbers
from ._layout import Layout, unfold_rows


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
        """The change of the scores by the changes of the scaled products, of numbers and of tables."""
        if self._score is None:
            return change
        places, numbers, indices = self._read(product.shape)
        changes = None
        if directions is not None:
            floats = tuple(self._across(x[...], product.shape) for x in directions.floats)
            changes = Numbers(floats, self._entries(directions, indices, 0.0))
        raw = product * self._scale
        return self._score.jvp(raw, places, numbers, change, changes)

    def _read(self, shape: tuple[int, ...]) -> tuple[dict[str, Array], Numbers, list[Array]]:
        """Positions, numbers and entries in the shape of a block, and the indices of the entries."""
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
        """One number for each row `[1, rows]`, in the shape of a block."""
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
    """The change of `block_numbers` in the directions of the score's arrays; None if none move."""
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
    """`[b, n]` and `[b, n, D]` repeated for each row, and for the rows that pad a block, which have scores too."""
    rows, heads = layout.row_blocks * layout.row_block, layout.heads * layout.row_fold

    def fold(x: Array) -> Array:
        x = x if x.ndim == 3 else x[:, :, None]
        x = jnp.broadcast_to(x, (len(x), heads, x.shape[2]))
        x = x.reshape(len(x), layout.heads, layout.row_fold, x.shape[2]).swapaxes(2, 3)
        return jnp.tile(x, (1, 1, 1, math.ceil(rows / layout.row_fold)))[..., :rows]

    return jax.tree.map(fold, numbers)
