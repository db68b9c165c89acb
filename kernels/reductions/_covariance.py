"""The covariance of the values under the attention weights, for the keys on one device."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..call._kernel import Candidate
from ..call._operands import Operands, Settings
from ..call._state import CovarianceState, holds_keys, precision
from ..dispatch._registry import attend
from ..xla._blocks import product
from ._expectation import ScoreBlock, weighted_mean


def covariance(
    names: Sequence[Candidate], settings: Settings, operands: Operands
) -> CovarianceState:
    r"""$\nabla^2 F$, $\nabla F$ and $F$: attention, and a second pass over the keys.

    The matrix, $O(T N H^2)$ numbers, is summed block by block. Raises as `attend`.
    """
    operands, origin = centred(operands)
    out, lse = attend(names, settings, operands)
    width = out.shape[-1]
    matrix = weighted_mean(_scatter, width * width, settings, operands, lse, out)
    matrix = matrix.reshape(*out.shape, width)
    matrix = (matrix + matrix.swapaxes(-1, -2)) / 2
    origin = jnp.repeat(origin, out.shape[2] // operands.key.shape[2], axis=2)
    out = jnp.where(holds_keys(lse)[..., None], out + origin, 0.0)
    return CovarianceState(matrix.astype(out.dtype), out, lse)


def centred(arrays: Any) -> tuple[Any, Array]:
    """`arrays` with values relative to the middle of their range, and that origin.

    Covariances and higher cumulants do not depend on the origin; their rounding errors do. It is
    `[..., 1, K, Hv]`, and 0 where values are not finite.
    """
    value = arrays.value
    if value.shape[-3] == 0:
        return arrays, value.sum(-3, keepdims=True)
    # Not jnp.mean, which XLA rounds differently in different fusions.
    middle = 0.5 * (value.max(-3, keepdims=True) + value.min(-3, keepdims=True))
    origin = lax.stop_gradient(jnp.where(jnp.isfinite(middle), middle, 0.0))
    return arrays._replace(value=value - origin), origin


def _scatter(block: ScoreBlock, mean: Array) -> Array:
    values = block.value
    exact = precision(values.dtype)

    # One factor is relative to the mean of each row; one column of the matrix at a time.
    @jax.checkpoint
    def column(column_values: tuple[Array, Array]) -> Array:
        value, centre = column_values
        centred_column = value[:, None, :] - centre[:, :, None]
        return product(block.weights * centred_column, values, exact)

    columns = lax.map(column, (jnp.moveaxis(values, -1, 0), jnp.moveaxis(mean, -1, 0)))
    return jnp.moveaxis(columns, 0, 2).reshape(*mean.shape[:2], -1)
