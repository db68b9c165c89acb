"""Weighted sums of values for few rows, at the speed of memory on CPUs."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ._slice import slice_of


class Pieces(NamedTuple):
    """How values are read; static. The defaults were chosen by measurement.

    Attributes:
        keys: keys whose products are added in registers, between two updates of the sums.
        numbers: most numbers in a piece of the values: few, so that sums stay in a CPU's cache; enough, so that
            starting a loop over them costs little.
    """

    keys: int = 16
    numbers: int = 1 << 20


def weighed_sum(
    weights: Float[Array, "S rows"],
    value: Float[Array, "S K W"],
    present: Bool[Array, " S"] | None,
    pieces: Pieces,
) -> Float[Array, "K R W"]:
    r"""$\sum_s w_{skr} v_{sk}$ in float32; values that are not `present` count as zero. For XLA:CPU, on one device.

    A matrix product would be block-diagonal in the heads, with K times the work. This loops over pieces of the keys,
    whose products and sums XLA:CPU fuses into one loop of vector instructions.
    """
    key_len, kv_heads, width = value.shape
    rows = weights.shape[-1] // kv_heads
    unrolled = min(pieces.keys, key_len)
    most = max(pieces.numbers // (kv_heads * width), unrolled)
    count = -(-key_len // (-(-key_len // most) * unrolled))
    piece = unrolled * min(count, key_len // unrolled)
    count, steps = piece // unrolled, -(-key_len // piece)

    # One axis of heads and widths: for a key head alone, an axis of size 1, XLA:CPU copies all values
    # (`test_values_of_one_key_head_are_not_copied`).
    joined = value.reshape(key_len, kv_heads * width)

    def add_piece(i: Array, sums: Array) -> Array:
        # Tied to the step: else XLA hoists the cast of all values out of the loop (the same test fails).
        values, i = lax.optimization_barrier((joined, i))
        # the last piece overlaps the one before; keys in both count once
        first = jnp.minimum(i * piece, key_len - piece)
        parts, values = (slice_of(x, 0, first, piece) for x in (weights, values))
        values = values.astype(jnp.float32)
        if present is not None:
            present_piece = slice_of(present, 0, first, piece)
            values = jnp.where(present_piece[:, None], values, 0)
        if steps * piece != key_len:
            is_new = jnp.arange(piece) + first >= i * piece
            parts = jnp.where(is_new[:, None], parts, 0)
        # Keys that are added together are in different parts of the piece, so that each part is read in order.
        parts = parts.reshape(unrolled, count, kv_heads, rows, 1)
        values = values.reshape(unrolled, count, kv_heads, 1, width)
        return sums + _reduced(lambda a, b: a - (-b), parts * values, 0.0)

    start = jnp.zeros((count, kv_heads, rows, width), jnp.float32)
    sums = lax.fori_loop(0, steps, add_piece, start)
    sums = lax.dot_general(
        jnp.ones(count, jnp.float32), sums.reshape(count, -1), (((0,), (0,)), ((), ()))
    )
    return sums.reshape(kv_heads, rows, width)


def maximum_of(scores: Float[Array, "S R"], pieces: Pieces) -> Float[Array, "1 R"]:
    """The largest score of each row; XLA:CPU fuses this with the scores, which it does not write to memory."""
    key_len, rows = scores.shape
    unrolled = min(pieces.keys, key_len)
    parts = scores[: key_len // unrolled * unrolled].reshape(unrolled, -1, rows)
    maximum = _reduced(lambda a, b: -lax.min(-a, -b), parts, -jnp.inf).max(0, keepdims=True)
    # keys in both do not matter
    return jnp.maximum(maximum, scores[-unrolled:].max(0, keepdims=True))


def _reduced(f: Callable[[Array, Array], Array], x: Array, start: float) -> Array:
    # XLA:CPU calls YNNPACK for sums and maxima, and writes their operand to memory first. It fuses other functions
    # with their operand, so a + b is written a - (-b); `test_weights_are_written_over_the_scores` fails with a + b.
    return lax.reduce(x, jnp.asarray(start, x.dtype), f, (0,))
