"""The parts of one step of the TPU kernels."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from ...masks._visibility import visible
from ._layout import Layout
from ._visibility import BlockRanges, feature

HIDDEN = -math.inf


def step(ranges: BlockRanges, range_index: Array, number: Array) -> Array:
    """The block of a step of a range; steps past the end repeat the last block, which is not read again."""
    first, stop = ranges.first[range_index], ranges.stop[range_index]
    index = jnp.minimum(first + number, jnp.maximum(stop - 1, 0))
    return index if ranges.order is None else ranges.order[index]


def visit(
    ranges: BlockRanges, range_index: Array, number: Array, visibility: dict[str, Ref]
) -> Callable[[Callable[[Array, dict[str, Ref]], None]], None]:
    """Decorates the body of a step, which takes a block and the arrays to compare for its mask.

    Positions and segments are not compared in the run of blocks where all rows see all keys, which is
    most of a long causal context.
    """
    first, stop, open_first, open_stop = (x[range_index] for x in ranges[:4])
    index = first + number
    heads = {name: x for name, x in visibility.items() if name.endswith("heads")}

    def run(do: Callable[[Array, dict[str, Ref]], None]) -> None:
        if len(heads) == len(visibility):
            pl.when(index < stop)(lambda: do(index, visibility))
            return
        block = index if ranges.order is None else step(ranges, range_index, number)
        is_open = (open_first <= index) & (index < open_stop)
        pl.when((index < stop) & is_open)(lambda: do(block, heads))
        pl.when((index < stop) & jnp.logical_not(is_open))(lambda: do(block, visibility))

    return run


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
    """The numbers of rows and of keys that the mask compares, as columns and rows that broadcast."""
    if layout.pairs is None:
        return [], []
    rows = [visibility[feature("row", i)][...] for i in range(layout.pairs.of_queries)]
    keys = [visibility[feature("key", i)][...] for i in range(layout.pairs.of_keys)]
    return ([x if turned else x.T for x in rows], [x.T if turned else x for x in keys])


def zero_past_end(x: Ref, key_block: Array, layout: Layout, *, tall: bool) -> None:
    """Writes zeros past the end of keys or values in their last block, where memory might hold NaN."""
    remainder = layout.keys % layout.key_block
    if remainder:

        @pl.when(key_block == layout.key_blocks - 1)
        def _() -> None:
            past = (slice(None), slice(remainder, None)) if tall else slice(remainder, None)
            x[past] = jnp.zeros_like(x[past])


def load_present(x: Ref, visibility: dict[str, Ref], *, tall: bool) -> Array:
    """A block of keys or values with zeros for absent ones, by their positions."""
    if "key_positions" not in visibility:
        return x[...]
    positions = visibility["key_positions"][...]
    present = (positions if tall else positions.T) >= 0
    return jnp.where(present, x[...], jnp.zeros((), x.dtype))


def dot(a: Array, b: Array, over: tuple[int, int]) -> Array:
    """The product of two matrices over the axes `over`, summed in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )
