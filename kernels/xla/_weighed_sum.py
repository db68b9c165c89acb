"""Sums of values with weights of each row's own, at the speed of memory on CPUs."""

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
    shown: Bool[Array, " S"] | None,
    pieces: Pieces,
) -> Float[Array, "K R W"]:
    r"""$\sum_s w_{skr} v_{sk}$ in float32; values that are not `shown` count as zero. For XLA:CPU, on one device.

    A product of matrices would be block-diagonal in the heads, with K times the work. This is a loop over pieces of
    the keys; of a piece's products and sums XLA:CPU makes one loop of vector instructions.
    """
    key_len, kv_heads, width = value.shape
    rows = weights.shape[-1] // kv_heads
    together = min(pieces.keys, key_len)
    most = max(pieces.numbers // (kv_heads * width), together)
    count = -(-key_len // (-(-key_len // most) * together))
    piece = together * min(count, key_len // together)
    count, steps = piece // together, -(-key_len // piece)

    # One axis of heads and widths: for a key head alone, an axis of size 1, XLA:CPU copies all values
    # (`test_values_of_one_key_head_are_not_copied`).
    joined = value.reshape(key_len, kv_heads * width)

    def add_piece(i: Array, sums: Array) -> Array:
        # Tied to the step: else XLA moves the values' cast before the loop, as a copy of all (red in the same test).
        values, i = lax.optimization_barrier((joined, i))
        # the last piece overlaps the one before; keys in both count once
        first = jnp.minimum(i * piece, key_len - piece)
        parts, values = (slice_of(x, 0, first, piece) for x in (weights, values))
        values = values.astype(jnp.float32)
        if shown is not None:
            here = slice_of(shown, 0, first, piece)
            values = jnp.where(here[:, None], values, 0)
        if steps * piece != key_len:
            new = jnp.arange(piece) + first >= i * piece
            parts = jnp.where(new[:, None], parts, 0)
        # Keys that are added together are in different parts of the piece, so that each part is read in order.
        parts = parts.reshape(together, count, kv_heads, rows, 1)
        values = values.reshape(together, count, kv_heads, 1, width)
        return sums + _reduced(lambda a, b: a - (-b), parts * values, 0.0)

    start = jnp.zeros((count, kv_heads, rows, width), jnp.float32)
    sums = lax.fori_loop(0, steps, add_piece, start)
    sums = lax.dot_general(
        jnp.ones(count, jnp.float32), sums.reshape(count, -1), (((0,), (0,)), ((), ()))
    )
    return sums.reshape(kv_heads, rows, width)


def maximum_of(scores: Float[Array, "S R"], pieces: Pieces) -> Float[Array, "1 R"]:
    """The largest score of each row, of scores that XLA:CPU computes meanwhile and does not write."""
    key_len, rows = scores.shape
    together = min(pieces.keys, key_len)
    parts = scores[: key_len // together * together].reshape(together, -1, rows)
    found = _reduced(lambda a, b: -lax.min(-a, -b), parts, -jnp.inf).max(0, keepdims=True)
    # keys in both do not matter
    return jnp.maximum(found, scores[-together:].max(0, keepdims=True))


def _reduced(f: Callable[[Array, Array], Array], x: Array, start: float) -> Array:
    # XLA:CPU gives sums and maxima to YNNPACK, and writes their operand to memory first. Of other functions it
    # makes one loop with the operand: so a + b is written a - (-b). Red with a + b, on JAX 0.10.2 and 0.12.0:
    # `test_weights_are_written_over_the_scores`.
    return lax.reduce(x, jnp.asarray(start, x.dtype), f, (0,))
