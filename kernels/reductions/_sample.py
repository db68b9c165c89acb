"""Keys drawn from the attention weights, block by block.

The key of the largest sum of its score and of noise of Gumbel's distribution is a draw from the weights. The noise
depends on the row's seed, the key's index and the draw alone, so that draws do not depend on blocks or devices.
(E. J. Gumbel, Statistical Theory of Extreme Values and Some Practical Applications, 1954.)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Int, UInt32

from .._varying import vary_together
from ..call._operands import Operands, Settings
from ..call._state import lse_dtype
from ..xla._blocks import BlockedOperands
from ..xla._grid import Index, join_queries, numbers, pad_queries, take_queries


class Draw(NamedTuple):
    """Keys drawn for each row, and their sums of score and noise.

    Attributes:
        indices: of the keys; -1 for a fully masked row, or where a score is NaN.
        sums: minus infinity for a fully masked row.
    """

    indices: Int[Array, "*batch number"]
    sums: Float[Array, "*batch number"]


def sample(
    number: int,
    settings: Settings,
    operands: Operands,
    seeds: UInt32[Array, "B T N 2"],
    first: Int[Array, ""] | int = 0,
) -> Draw:
    """Draws `number` keys for each row, with replacement, from $P_a = e^{s_a - F}$.

    `seeds` are the data of a random key for each row, so that a row's draw does not depend on other rows. `first` is
    the index of the first key.
    """
    operands, seeds = vary_together((operands, seeds))
    (batch, query_len, heads), key_len = operands.query.shape[:3], operands.key.shape[1]
    if 0 in (batch, query_len, key_len):
        return _nothing(operands.query, (batch, query_len, heads, number))
    blocks = BlockedOperands(operands, settings)
    g = blocks.grid
    seeds = pad_queries(g, seeds)

    def one_block_of_queries(query_index: Index) -> Draw:
        row_seeds = take_queries(g, seeds, query_index)

        def one_block_of_keys(drawn: Draw, j: Array) -> tuple[Draw, None]:
            index = query_index._replace(key=j)

            def draw() -> Draw:
                start = j.astype(jnp.int32) * g.keys + first
                return merge_draws(drawn, _draw(number, blocks.scores(index), row_seeds, start))

            meet = blocks.meet(index)
            return (draw() if meet is None else lax.cond(meet, draw, lambda: drawn)), None

        start = _nothing(blocks.query, (batch, g.rows, number))
        return lax.scan(one_block_of_keys, start, numbers(g.key_blocks))[0]

    def one_head(h: Array) -> Draw:
        return lax.map(lambda i: one_block_of_queries(Index(h, i, i)), numbers(g.query_blocks))

    found = lax.map(one_head, numbers(g.kv_heads))
    return Draw(*(join_queries(g, x, query_len) for x in found))


def _nothing(like: Array, shape: tuple[int, ...]) -> Draw:
    index = lax.full_like(like, -1, dtype=jnp.int32, shape=shape)
    return Draw(index, lax.full_like(like, -jnp.inf, dtype=lse_dtype(like.dtype), shape=shape))


def merge_draws(first: Draw, second: Draw) -> Draw:
    """The draws from the union of two disjoint sets of keys."""
    later = (second.sums > first.sums) | jnp.isnan(second.sums)
    indices = jnp.where(later, second.indices, first.indices)
    sums = jnp.where(later, second.sums, first.sums)
    return Draw(jnp.where(jnp.isnan(sums), -1, indices), sums)


def _draw(
    number: int,
    scores: Float[Array, "B rows keys"],
    seeds: UInt32[Array, "B rows 2"],
    first: Int[Array, ""],
) -> Draw:
    index = first + jnp.arange(scores.shape[-1], dtype=jnp.int32)

    def one(draw: Array) -> Draw:
        sums = scores + gumbel(seeds, index, draw, scores.dtype)
        best = jnp.argmax(sums, -1, keepdims=True).astype(jnp.int32)
        largest = jnp.take_along_axis(sums, best, -1)[..., 0]
        hidden = jnp.isneginf(largest) | jnp.isnan(largest)
        return Draw(jnp.where(hidden, -1, first + best[..., 0]), largest)

    drawn = lax.map(one, jnp.arange(number, dtype=jnp.int32))
    return Draw(*(jnp.moveaxis(x, 0, -1) for x in drawn))


def gumbel(
    seeds: UInt32[Array, "*rows 2"],
    keys: Int[Array, " keys"],
    draw: Int[Array, ""],
    dtype: jnp.dtype,
) -> Float[Array, "*rows keys"]:
    """Noise of Gumbel's standard distribution, by the 32 bits that a seed gives to a key in a draw."""
    left, right = seeds[..., 0, None], seeds[..., 1, None]
    keys = jnp.expand_dims(keys, range(left.ndim - 1))
    zero = jnp.zeros_like(left * keys.astype(jnp.uint32))
    counts = (x.astype(jnp.uint32) + zero for x in (keys, draw))
    bits, _ = threefry2x32_p.bind(left + zero, right + zero, *counts)
    chance = (bits.astype(dtype) + 0.5) * 2.0**-32
    # close to 0, where the largest sums are from, floating numbers are dense
    chance = jnp.minimum(chance, 1 - jnp.finfo(dtype).epsneg)
    return -jnp.log(-jnp.log1p(-chance))
