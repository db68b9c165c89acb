"""The covariance of the values under the attention weights, of the keys on one device."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..call._arguments import Operands, Settings
from ..call._state import CovarianceState, holds_keys, precision
from ..dispatch._registry import attend
from ..xla._blocks import product
from ._expectation import ScoreBlock, weighted_sum


def covariance(names: Sequence[str], settings: Settings, operands: Operands) -> CovarianceState:
    r"""$\nabla^2 F$ beside $\nabla F$ and $F$: attention, and one more walk over the keys.

    The matrix is summed up block by block, $O(T N H^2)$ numbers. Raises as `attend` does.
    """
    operands, origin = centred(operands)
    out, lse = attend(names, settings, operands)
    width = out.shape[-1]
    found = weighted_sum(_scatter, width * width, settings, operands, lse, out)
    found = found.reshape(*out.shape, width)
    found = (found + found.swapaxes(-1, -2)) / 2
    origin = jnp.repeat(origin, out.shape[2] // operands.key.shape[2], axis=2)
    out = jnp.where(holds_keys(lse)[..., None], out + origin, 0.0)
    return CovarianceState(found.astype(out.dtype), out, lse)


def centred(arrays: Any) -> tuple[Any, Array]:
    """Operands, or the like, with the origin of values in the middle of them, and where that is.

    No covariance, nor a cumulant of higher order, depends on it, but their rounding errors do. The
    origin is `[..., 1, K, Hv]`, and 0 where values are not finite. Raises nothing.
    """
    value = arrays.value
    if value.shape[-3] == 0:
        return arrays, value.sum(-3, keepdims=True)
    # Half of a sum: a mean would be rounded in one of XLA's fusions and not in another.
    middle = 0.5 * (value.max(-3, keepdims=True) + value.min(-3, keepdims=True))
    origin = lax.stop_gradient(jnp.where(jnp.isfinite(middle), middle, 0.0))
    return arrays._replace(value=value - origin), origin


def _scatter(block: ScoreBlock, mean: Array) -> Array:
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
