"""Loads keys and values in the GPU kernel of the state, with scales if they are of eight bits.

Integers of eight bits are exact in the dtype of any query, so they are cast in registers without rounding. The
scale of a key multiplies its scores, that of a value the weights, in float32.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Ref
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._rows import Visibility
from . import _tile as tiles
from ._plan import Plan


class Stored(NamedTuple):
    """An array `[B, S, K, H]` of keys or values and, if it is of eight bits, its scales `[B, S, K]`."""

    numbers: Array | Ref
    scale: Array | Ref | None


class Loaded(NamedTuple):
    """A tile of keys or values in the dtype of products, and the scales of its keys; None: 1."""

    numbers: Float[Array, "keys width"]
    scale: Float[Array, " keys"] | None


def load(
    plan: Plan,
    stored: Stored,
    program: tiles.ProgramIndex,
    tile: Array,
    width: int,
    dtype: DTypeLike,
    full: bool,
) -> Loaded:
    """A tile, zero outside of the array unless it is `full`; eight bits are cast to `dtype`."""
    numbers = tiles.load_keys(plan, stored.numbers, program, tile, width, full)
    if stored.scale is None:
        return Loaded(numbers, None)
    key = tile * plan.keys + tiles.numbers(plan.keys)
    in_bounds = None if full or plan.full_keys else key < plan.key_len
    scale = tiles.load(stored.scale, (program.batch, key, program.kv_head), in_bounds)
    return Loaded(numbers.astype(dtype), scale)


def zero_hidden(
    plan: Plan, visibility: Visibility, program: tiles.ProgramIndex, tile: Array, loaded: Loaded
) -> Loaded:
    """A tile with zeros for keys that no row of the call sees; with eight bits, zero scales suffice."""
    numbers, scale = loaded
    if scale is None:
        (numbers,) = tiles.zero_hidden(plan, visibility, program, tile, numbers)
    else:
        (scale,) = tiles.zero_hidden(plan, visibility, program, tile, scale)
    return Loaded(numbers, scale)


def times(x: Float[Array, "rows keys"], scale: Array | None) -> Float[Array, "rows keys"]:
    """Products with keys, or weights, times the scale of each key."""
    return x if scale is None else x * jnp.expand_dims(scale, 0)
