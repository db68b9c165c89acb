"""Draws keys from the attention weights, block by block, and computes the weights of given keys.

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
from ..call._operands import Operands, Settings, hide_unreachable, zero_absent
from ..call._state import holds_keys, lse_dtype
from ..xla._blocks import BlockedOperands
from ..xla._grid import numbers
from ..xla._reference import dense_scores


class Draw(NamedTuple):
    """Keys drawn for each row, and their sums of score and noise."""

    # of the keys; -1 for a fully masked row, or where a score is NaN
    indices: Int[Array, "*batch number"]
    sums: Float[Array, "*batch number"]  # minus infinity for a fully masked row


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
    seeds = g.pad_queries(seeds)

    def one_block_of_queries(n: Array) -> Draw:
        query_index = blocks.index_of_queries(n)
        row_seeds, query = (g.take_queries(x, query_index) for x in (seeds, blocks.query))

        def one_block_of_keys(drawn: Draw, j: Array) -> tuple[Draw, None]:
            index = query_index._replace(key=j)

            def draw() -> Draw:
                start = j.astype(jnp.int32) * g.keys + first
                scores = blocks.scores_of(query, g.take_keys(blocks.key, index), index)
                return merge_draws(drawn, _draw(number, scores, row_seeds, start))

            meet = blocks.meet(index)
            return (draw() if meet is None else lax.cond(meet, draw, lambda: drawn)), None

        start = _nothing(blocks.query, (batch, g.rows, number))
        return lax.scan(one_block_of_keys, start, numbers(g.key_blocks))[0]

    result = lax.map(one_block_of_queries, numbers(g.kv_heads * g.query_blocks))
    return Draw(*(g.join_queries(x, query_len) for x in result))


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
        # argmax_a (s_a + G_a) has the distribution P_a = e^{s_a - F} for Gumbel noise G
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
    # 1 - u near 1 gives the largest noise; u near 0 is represented most finely
    chance = jnp.minimum(chance, 1 - jnp.finfo(dtype).epsneg)
    # G = -log(-log(1 - u)), u uniform in (0, 1)
    return -jnp.log(-jnp.log1p(-chance))


def weights_of_keys(
    axes: tuple[str, ...],
    settings: Settings,
    operands: Operands,
    lse: Float[Array, "B T N"],
    index: Int[Array, "B T N keys"],
) -> Float[Array, "B T N keys"]:
    r"""The weights $P_a = e^{s_a - \mathrm{lse}}$ of the keys of given indices, 0 for keys on other devices.

    The indices are the same for all rows. Each device along the mesh axes `axes` has an equal share of the keys.
    """
    operands, lse, index = vary_together((operands, lse, index))
    number = operands.key.shape[1]
    if 0 in (*index.shape, number):
        return lax.full_like(lse, 0.0, shape=index.shape)
    index = index[0, 0, 0]
    if axes:
        index = index - lax.axis_index(axes).astype(index.dtype) * number
    is_local = (index >= 0) & (index < number)
    operands = take_keys(settings, operands, jnp.where(is_local, index, 0))
    operands = zero_absent(hide_unreachable(operands, settings))
    lse = jnp.where(holds_keys(lse), lse, jnp.inf)[..., None]
    return jnp.where(is_local, jnp.exp(dense_scores(settings, operands) - lse), 0.0)


def take_rows(settings: Settings, operands: Operands, index: Int[Array, " rows"]) -> Operands:
    """The operands with the queries of given indices; queries out of range are NaN."""
    size = operands.query.shape[1]
    operands = operands.positioned(settings.uses_positions)
    return operands.map_queries(lambda x, axis: _take(x, index, axis, size))


def take_keys(settings: Settings, operands: Operands, index: Int[Array, " keys"]) -> Operands:
    """The operands with the keys of given indices, which are in range."""
    size = operands.key.shape[1]
    operands = operands.positioned(settings.uses_positions)
    return operands.map_keys(lambda x, axis: _take(x, index, axis, size))


def _take(x: Array, index: Array, axis: int, size: int) -> Array:
    if x.shape[axis] != size:  # broadcast
        return x
    return jnp.take(x, index, axis, mode="fill")
