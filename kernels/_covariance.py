"""The covariance of the values under the attention weights, of the keys on one device."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._arguments import Operands, Settings
from ._blocks import product
from ._registry import attend
from ._state import CovarianceState, precision
from ._walk import Block, weighted


def covariance(names: Sequence[str], settings: Settings, operands: Operands) -> CovarianceState:
    r"""$\nabla^2 F$ beside $\nabla F$ and $F$: attention, and one more walk over the keys.

    The matrix is summed up block by block, $O(T N H^2)$ numbers. Raises as `attend` does.
    """
    # No covariance depends on where values have their origin, but its rounding errors do.
    keys = max(operands.value.shape[1], 1)
    origin = lax.stop_gradient(operands.value.sum(1, keepdims=True) / keys)
    operands = operands._replace(value=operands.value - origin)
    out, lse = attend(names, settings, operands)
    width = out.shape[-1]
    found = weighted(_scatter, width * width, settings, operands, lse, out)
    found = found.reshape(*out.shape, width)
    found = (found + found.swapaxes(-1, -2)) / 2
    origin = jnp.repeat(origin, out.shape[2] // operands.key.shape[2], axis=2)
    out = jnp.where(jnp.isfinite(lse)[..., None], out + origin, 0.0)
    return CovarianceState(found.astype(out.dtype), out, lse)


def _scatter(block: Block, mean: Array) -> Array:
    values = block.value
    exact = precision(values.dtype)

    # One factor is taken from the mean of each row, one column at a time.
    @jax.checkpoint
    def column(taken: tuple[Array, Array]) -> Array:
        value, centre = taken
        apart = value[:, None, :] - centre[:, :, None]
        return product(block.weights * apart, values, exact)

    columns = lax.map(column, (jnp.moveaxis(values, -1, 0), jnp.moveaxis(mean, -1, 0)))
    return jnp.moveaxis(columns, 0, 2).reshape(*mean.shape[:2], -1)
