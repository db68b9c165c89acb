"""Rows times the matrix of their group: `jax.lax.ragged_dot`, and tiles of rows on CPUs."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from energy_attn.kernels.internal import lse_dtype, vary_together

_DIMENSIONS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
# Rows of a tile: a few for each group where there are few rows, as a tile is computed whole.
_LEAST, _MOST = 8, 64


def grouped_dot(
    x: Float[Array, "rows in"], weight: Float[Array, "groups out in"], sizes: Int[Array, " groups"]
) -> Float[Array, "rows out"]:
    """Each row times the transpose of its group's matrix, in float32 or wider; zeros for rows behind all groups.

    The first `sizes[0]` rows are the first group's.
    """
    # inside a `shard_map` the derivative of what is on all devices is a sum over them
    return _grouped_dot(*vary_together((x, weight, sizes)))


@jax.custom_jvp
def _grouped_dot(x: Array, weight: Array, sizes: Array) -> Array:
    # XLA on CPUs multiplies all rows by all matrices, a masked copy of the rows for each
    return lax.platform_dependent(x, weight, sizes, cpu=_tiles, default=_ragged)


@_grouped_dot.defjvp
def _derivative(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (x, weight, sizes), (dx, dweight, _) = primals, tangents
    out = _grouped_dot(x, weight, sizes)
    return out, _ragged(dx, weight, sizes) + _ragged(x, dweight, sizes)


def _ragged(x: Array, weight: Array, sizes: Array) -> Array:
    kind = lse_dtype(x.dtype)
    return lax.ragged_dot_general(x, weight, sizes, _DIMENSIONS, preferred_element_type=kind)


def _tiles(x: Array, weight: Array, sizes: Array) -> Array:
    """A product for each tile of rows of one group: as many as there are rows, and one more for each group."""
    rows, kind = len(x), lse_dtype(x.dtype)
    tile = min(rows, max(_LEAST, min(_MOST, rows // len(weight))))
    state = jnp.zeros((), sizes.dtype), jnp.zeros((rows, weight.shape[1]), kind)
    # inside a `shard_map` the state of a loop varies over the axes that its arguments do
    x, weight, ends, state = vary_together((x, weight, jnp.cumsum(sizes), state))

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        begin, out = state
        group = (ends <= begin).sum(dtype=ends.dtype)
        start = jnp.minimum(begin, rows - tile)
        matrix = lax.dynamic_index_in_dim(weight, group, keepdims=False)
        part = lax.dynamic_slice_in_dim(x, start, tile)
        product = lax.dot_general(
            part, matrix, (((1,), (1,)), ((), ())), preferred_element_type=kind
        )
        end = jnp.minimum(ends[group], start + tile)
        index = start + jnp.arange(tile, dtype=begin.dtype)
        inside = (index >= begin) & (index < end)
        old = lax.dynamic_slice_in_dim(out, start, tile)
        new = jnp.where(inside[:, None], product, old)
        return end, lax.dynamic_update_slice_in_dim(out, new, start, 0)

    return lax.while_loop(lambda state: state[0] < ends[-1], step, state)[1]
