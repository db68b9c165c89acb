"""Keys drawn from the attention weights, block by block.

The draw so far and the energy of its keys are a state: the draw from the union of two key sets is
that of the second with probability $e^{F_2 - F}$, else that of the first. (Reservoir sampling with
weights; M. T. Chao, Biometrika 69, 1982.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from .._varying import vary_together
from ..call._operands import Operands, Settings
from ..call._state import exp_from, lse_dtype, safe_shift, share
from ..xla._blocks import BlockedOperands
from ..xla._grid import Index, join_queries, numbers, pad_queries, take_queries


class Draw(NamedTuple):
    """Keys drawn for each row, and the energy of the keys they were drawn from.

    Attributes:
        indices: along the axis of the keys; -1 for a fully masked row, or if `lse` is NaN.
        lse: the energy of those keys.
    """

    indices: Int[Array, "*batch number"]
    lse: Float[Array, "*batch"]


def sample(
    number: int, settings: Settings, operands: Operands, seeds: UInt32[Array, "B T N 2"]
) -> Draw:
    """Draws `number` keys for each row, with replacement, from $P_a = e^{s_a - F}$.

    `seeds` are the data of a random key for each row, so that a row's draw does not depend on other rows.
    Each block takes two new random numbers for a draw, so that probabilities are resolved equally well
    among many keys and few.
    """
    operands, seeds = vary_together((operands, seeds))
    (batch, query_len, heads), key_len = operands.query.shape[:3], operands.key.shape[1]
    if 0 in (batch, query_len, key_len):
        dtype = lse_dtype(operands.query.dtype)
        shape = (batch, query_len, heads)
        index = lax.full_like(operands.query, -1, dtype=jnp.int32, shape=(*shape, number))
        return Draw(index, lax.full_like(operands.query, -jnp.inf, dtype=dtype, shape=shape))
    blocks = BlockedOperands(operands, settings)
    g = blocks.grid
    seeds = pad_queries(g, seeds)

    def one_block_of_queries(query_index: Index) -> Draw:
        keys = take_queries(g, seeds, query_index)

        def one_block_of_keys(drawn: Draw, j: Array) -> tuple[Draw, None]:
            index = query_index._replace(key=j)

            def draw() -> Draw:
                chances = uniform(fold_in_seeds(keys, j), (2, number), drawn.lse.dtype)
                indices, lse = _draw(blocks.scores(index), chances[:, :, 1])
                first = j.astype(jnp.int32) * g.keys
                new = Draw(jnp.where(indices < 0, -1, indices + first), lse)
                return merge_draws(drawn, new, chances[:, :, 0])

            meet = blocks.meet(index)
            return (draw() if meet is None else lax.cond(meet, draw, lambda: drawn)), None

        lse = blocks.full(-jnp.inf, batch, g.rows)
        index = lax.full_like(lse, -1, dtype=jnp.int32, shape=(batch, g.rows, number))
        return lax.scan(one_block_of_keys, Draw(index, lse), numbers(g.key_blocks))[0]

    def one_head(h: Array) -> Draw:
        return lax.map(lambda i: one_block_of_queries(Index(h, i, i)), numbers(g.query_blocks))

    index, lse = lax.map(one_head, numbers(g.kv_heads))
    return Draw(
        join_queries(g, index, query_len), join_queries(g, lse[..., None], query_len)[..., 0]
    )


def merge_draws(first: Draw, second: Draw, chance: Float[Array, "*batch number"]) -> Draw:
    """The draw from the union of two disjoint key sets; `chance` is uniform in $[0, 1)$."""
    lse = jnp.logaddexp(first.lse, second.lse)
    indices = jnp.where(chance < share(second.lse, lse)[..., None], second.indices, first.indices)
    return Draw(jnp.where(jnp.isnan(lse)[..., None], -1, indices), lse)


def fold_in_seeds(
    seeds: UInt32[Array, "*batch 2"], number: Array | int
) -> UInt32[Array, "*batch 2"]:
    """`jax.random.fold_in` of a number into each seed."""

    def fold(seed: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, number))

    return jax.vmap(fold)(seeds.reshape(-1, 2)).reshape(seeds.shape)


def uniform(
    seeds: UInt32[Array, "*batch 2"], shape: tuple[int, ...], dtype: jnp.dtype
) -> Float[Array, "..."]:
    """Uniform numbers in $[0, 1)$, of `shape` for each seed."""

    def draw(seed: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(key, shape, dtype)

    return jax.vmap(draw)(seeds.reshape(-1, 2)).reshape(*seeds.shape[:-1], *shape)


def _draw(
    scores: Float[Array, "B rows keys"], chance: Float[Array, "B rows number"]
) -> tuple[Int[Array, "B rows number"], Float[Array, "B rows"]]:
    """Indices in a block by the inverse of the cumulative distribution, and the block's energy."""
    top = safe_shift(scores.max(-1, keepdims=True))
    weights = exp_from(scores, top)
    below = jnp.cumsum(weights, -1)
    total = below[..., -1:]
    # the last visible key, where rounding lets a number reach the total
    last = scores.shape[-1] - 1 - jnp.argmax(weights[..., ::-1] > 0, -1)

    def index(chance: Array) -> Array:
        return (below <= (chance[..., None] * total)).sum(-1, dtype=jnp.int32)

    indices = lax.map(index, jnp.moveaxis(chance, -1, 0))
    indices = jnp.minimum(jnp.moveaxis(indices, 0, -1), last[..., None].astype(jnp.int32))
    empty = total == 0
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1.0, total)))[..., 0]
    return jnp.where(total > 0, indices, -1), lse
