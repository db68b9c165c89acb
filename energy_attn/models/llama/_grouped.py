"""Rows times the matrix of their group: `jax.lax.ragged_dot`, and tiles of rows on CPUs."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from energy_attn.kernels.internal import is_static, lse_dtype, rows_of_groups, vary_together

_DIMENSIONS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
# Rows of a tile: a few for each group where there are few rows, as a tile is computed whole.
_LEAST, _MOST = 8, 64
_ANY = 32  # where the number of rows is a symbol


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
    """A product for each tile of rows of one group."""
    kind, rows = lse_dtype(x.dtype), x.shape[0]

    def dot(part: Array, matrix: Array) -> Array:
        axes = ((1,), (1,)), ((), ())
        return lax.dot_general(part, matrix, axes, preferred_element_type=kind)

    if is_static(rows):
        tile = min(rows, max(_LEAST, min(_MOST, rows // len(weight))))
        return rows_of_groups(dot, x, weight, sizes, tile)
    x = jnp.pad(x, ((0, _ANY), (0, 0)))  # a tile may have more rows than there are
    return rows_of_groups(dot, x, weight, sizes, _ANY)[:rows]
