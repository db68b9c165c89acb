"""Loops over tiles of consecutive rows of one group: as many as there are rows, and one more for each group."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .._varying import vary_together

# of the state, the group of a tile, its first row, and which of its rows are the group's and in no other tile
Step = Callable[[Array, Int[Array, ""], Int[Array, ""], Bool[Array, " tile"]], Array]


def over_groups(
    step: Step, sizes: Int[Array, " groups"], rows: int, tile: int, state: Array
) -> Array:
    """The state after all tiles of so many rows, of which the first `sizes[0]` are the first group's."""
    # inside a `shard_map` the state of a loop varies over the axes that its arguments do
    ends, begin, state = vary_together((jnp.cumsum(sizes), jnp.zeros((), sizes.dtype), state))

    def one(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        begin, state = carry
        group = (ends <= begin).sum(dtype=ends.dtype)
        start = jnp.minimum(begin, rows - tile)
        end = jnp.minimum(ends[group], start + tile)
        index = start + jnp.arange(tile, dtype=begin.dtype)
        return end, step(state, group, start, (index >= begin) & (index < end))

    return lax.while_loop(lambda carry: carry[0] < ends[-1], one, (begin, state))[1]


def rows_of_groups(
    dot: Callable[[Array, Array], Array],
    x: Float[Array, "rows in"],
    weight: Float[Array, "groups ..."],
    sizes: Int[Array, " groups"],
    tile: int,
) -> Float[Array, "rows out"]:
    """`dot(x, weight[group])` of each row's group; zeros for rows behind all groups."""
    x, weight, sizes = vary_together((x, weight, sizes))

    def step(out: Array, group: Array, start: Array, inside: Array) -> Array:
        matrix = lax.dynamic_index_in_dim(weight, group, keepdims=False)
        found = dot(lax.dynamic_slice_in_dim(x, start, tile), matrix)
        old = lax.dynamic_slice_in_dim(out, start, tile)
        return lax.dynamic_update_slice_in_dim(
            out, jnp.where(inside[:, None], found, old), start, 0
        )

    kind = jax.eval_shape(dot, x[:tile], weight[0])
    out = jnp.zeros((x.shape[0], *kind.shape[1:]), kind.dtype)
    return over_groups(step, sizes, x.shape[0], tile, out)


def sums_of_groups(
    dot: Callable[[Array, Array], Array],
    a: Float[Array, "rows m"],
    b: Float[Array, "rows n"],
    sizes: Int[Array, " groups"],
    tile: int,
) -> Float[Array, "groups m n"]:
    """The sum of `dot(a^T, b)` over tiles of the rows of each group."""
    a, b, sizes = vary_together((a, b, sizes))

    def step(out: Array, group: Array, start: Array, inside: Array) -> Array:
        x, y = (
            jnp.where(inside[:, None], lax.dynamic_slice_in_dim(z, start, tile), 0) for z in (a, b)
        )
        old = lax.dynamic_index_in_dim(out, group, keepdims=False)
        return lax.dynamic_update_index_in_dim(out, old + dot(x.T, y), group, 0)

    out = jnp.zeros((len(sizes), a.shape[1], b.shape[1]), jnp.float32)
    return over_groups(step, sizes, len(a), tile, out)
