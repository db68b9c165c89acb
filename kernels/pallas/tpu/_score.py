"""Scores of blocks in the TPU kernels: the products themselves or by a score, with its derivatives."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ...call._operands import Operands
from ...call._state import unfused
from .._common import result_like
from .._score import score_cotangents, score_directions, score_numbers
from .._score_program import Numbers
from ._layout import Layout, unfold_rows


class BlockScores:
    """The scores of a step's block `[rows, keys]`, or `[keys, rows]` if `turned`."""

    def __init__(
        self, at: Layout, given: Numbers, visibility: dict[str, Ref], *, turned: bool = False
    ):
        self._at, self._given, self._visibility, self._turned = at, given, visibility, turned

    @property
    def unit(self) -> float:
        """The positive factor from the maximum of `in_units` to that of the scores."""
        plain = self._at.score is None and self._at.settings.scale != 0
        return abs(self._at.settings.scale) if plain else 1.0

    def in_units(self, product: Array) -> Array:
        """The scores of products divided by `unit`: no product of which a fused difference is not rounded."""
        if self._at.score is not None or self._at.settings.scale == 0:
            return unfused(self.scores(product))
        return product if self._at.settings.scale > 0 else -product

    def scores(self, product: Array) -> Array:
        """The scores of products."""
        raw = product * self._at.settings.scale
        if self._at.score is None:
            return raw
        places, numbers, _ = self._read(product.shape)
        return self._at.score.score(raw, places, numbers)

    def pull(self, product: Array) -> tuple[Array, Callable[[Array, Numbers], Array]]:
        """The scores, and what takes their cotangents to those of scaled products.

        It adds the cotangents of numbers and tables to sums in scratch memory, if there are any.
        """
        if self._at.score is None:
            return self.scores(product), lambda cotangent, sums: cotangent
        places, numbers, indices = self._read(product.shape)
        raw = product * self._at.settings.scale
        found, pullback = self._at.score.pull(raw, places, numbers)

        def back(cotangent: Array, sums: Numbers) -> Array:
            to_raw, floats, entries = pullback(cotangent)
            for ref, x in zip(sums.floats, floats, strict=bool(sums.floats)):
                ref[...] += x.sum(-1, keepdims=True)
            for ref, x, index in zip(sums.tables, entries, indices, strict=bool(sums.tables)):
                _add_by_entry(ref, x, index)
            return to_raw

        return found, back

    def along(self, change: Array | None, product: Array, moving: Numbers | None) -> Any:
        """The change of the scores by that of the scaled products and of numbers and tables."""
        if self._at.score is None:
            return change
        places, numbers, indices = self._read(product.shape)
        changes = None
        if moving is not None:
            floats = tuple(self._across(x[...], product.shape) for x in moving.floats)
            changes = Numbers(floats, self._entries(moving, indices, 0.0))
        raw = product * self._at.settings.scale
        return self._at.score.along(raw, places, numbers, change, changes)

    def _read(self, shape: tuple[int, ...]) -> tuple[dict[str, Array], Numbers, list[Array]]:
        """Positions, numbers and entries in the shape of a block, and the indices of the entries."""
        program = self._at.score
        assert program is not None
        places = {}
        if program.compares:
            key = self._visibility["key_positions"][...]
            places = {
                "query": self._across(self._visibility["row_positions"][...], shape),
                "key": jnp.broadcast_to(key.T if self._turned else key, shape),
            }
        numbers = jax.tree.map(
            lambda x: self._across(x[...], shape), self._given._replace(tables=())
        )
        indices = program.indices(places, numbers)
        entries = self._entries(self._given, indices, math.nan)
        return places, numbers._replace(tables=entries), indices

    def _across(self, x: Array, shape: tuple[int, ...]) -> Array:
        """One number for each row `[1, rows]`, in the shape of a block."""
        return jnp.broadcast_to(x if self._turned else x.T, shape)

    def _entries(self, given: Numbers, indices: list[Array], other: float) -> tuple[Array, ...]:
        found = []
        for table, index in zip(given.tables, indices, strict=True):

            def pick(entry: Array, x: Array, table: Ref = table, index: Array = index) -> Array:
                row = self._across(table[pl.ds(entry, 1), :], index.shape)
                return jnp.where(index == entry, row, x)

            start = jnp.full(index.shape, other, jnp.float32)
            found.append(lax.fori_loop(jnp.int32(0), jnp.int32(table.shape[0]), pick, start))
        return tuple(found)


def _add_by_entry(sums: Ref, x: Array, index: Array) -> None:
    """Adds the sums over keys of `[rows, keys]` to those of the entry `[D, rows]` that each is of."""

    def add(entry: Array, _: None) -> None:
        found = jnp.where(index == entry, x, 0.0).sum(-1, keepdims=True)
        sums[pl.ds(entry, 1), :] += found.T

    lax.fori_loop(jnp.int32(0), jnp.int32(sums.shape[0]), add, None)


def block_numbers(operands: Operands, at: Layout) -> Numbers:
    """The inputs of the score for each row, `[B or 1, P, 1, R]`, and of tables `[B or 1, P, D, R]`."""
    return _folded(score_numbers(operands, at.score), at)


def block_directions(operands: Operands, at: Layout, directions: Operands) -> Numbers | None:
    """The change of these in the directions of the score's arrays; None: none move."""
    found = score_directions(operands, at.score, directions)
    return None if found is None else _folded(found, at)


def block_cotangents(operands: Operands, at: Layout, sums: Numbers) -> tuple[Array | None, ...]:
    """The cotangents of the score's arrays, from the sums of `sums_like`."""

    def unfolded(x: Array) -> Array:
        return unfold_rows(x.swapaxes(2, 3), at)

    return score_cotangents(
        operands,
        at.score,
        Numbers(tuple(unfolded(x)[..., 0] for x in sums.floats), tuple(map(unfolded, sums.tables))),
    )


def number_specs(given: Numbers, at: Layout, row: Callable[..., Any]) -> Numbers:
    """The specs of blocks of them, of sums and of directions; `row` returns the index of a block."""

    def spec(x: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        def where(b: Array, p: Array, *others: Any) -> tuple[Any, ...]:
            return b if x.shape[0] > 1 else 0, p, 0, row(b, *others)

        return pl.BlockSpec((None, None, x.shape[2], at.row_block), where)

    return jax.tree.map(spec, given)


def sums_like(given: Numbers, batch: int, like: Array) -> Numbers:
    """The types of the sums for each row, `[B, P, 1, R]` and `[B, P, D, R]`."""
    return jax.tree.map(
        lambda x: result_like(like, (batch, *x.shape[1:]), jnp.float32), given._replace(fixed=())
    )


def sums_scratch(given: Numbers, at: Layout) -> Numbers:
    """The scratch memory of a block's sums: `[rows, 1]` and `[D, rows]`."""
    return Numbers(
        tuple(pltpu.VMEM((at.row_block, 1), jnp.float32) for _ in given.floats),
        tuple(pltpu.VMEM((x.shape[2], at.row_block), jnp.float32) for x in given.tables),
    )


def clear(sums: Numbers) -> None:
    """Zeros in scratch memory."""
    for ref in jax.tree.leaves(sums):
        ref[...] = jnp.zeros(ref.shape, ref.dtype)


def write(results: Numbers, sums: Numbers) -> None:
    """The sums of a block of rows to their results."""
    for ref, x in zip(results.floats, sums.floats, strict=True):
        ref[...] = x[...].T
    for ref, x in zip(results.tables, sums.tables, strict=True):
        ref[...] = x[...]


def _folded(given: Numbers, at: Layout) -> Numbers:
    """`[b, n]` and `[b, n, D]` for each row; also for those that pad a block, which have a score."""
    rows, heads = at.row_blocks * at.row_block, at.heads * at.row_fold

    def fold(x: Array) -> Array:
        x = x if x.ndim == 3 else x[:, :, None]
        x = jnp.broadcast_to(x, (len(x), heads, x.shape[2]))
        x = x.reshape(len(x), at.heads, at.row_fold, x.shape[2]).swapaxes(2, 3)
        return jnp.tile(x, (1, 1, 1, math.ceil(rows / at.row_fold)))[..., :rows]

    return jax.tree.map(fold, given)
