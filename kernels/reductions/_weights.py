"""The weights of a few rows and keys, with their whole matrix in memory."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .._varying import vary_together
from ..call._operands import Operands, Settings
from ..call._state import holds_keys
from ..xla._reference import dense_scores


def weights_of_keys(
    axes: tuple[str, ...],
    settings: Settings,
    operands: Operands,
    lse: Float[Array, "B T N"],
    index: Int[Array, "B T N keys"],
) -> Float[Array, "B T N keys"]:
    r"""The weights $P_a = e^{s_a - \mathrm{lse}}$ of the keys of given indices, 0 for those that are not here.

    Args:
        axes: the mesh axes of which each device has an equal share of the keys, in order; none: all are here.
        settings: of the call.
        operands: of the call.
        lse: the energies of the rows.
        index: of the keys, the same for all rows.
    """
    operands, lse, index = vary_together((operands, lse, index))
    number = operands.key.shape[1]
    if 0 in (*index.shape, number):
        return lax.full_like(lse, 0.0, shape=index.shape)
    index = index[0, 0, 0]
    if axes:
        index = index - lax.axis_index(axes).astype(index.dtype) * number
    here = (index >= 0) & (index < number)
    scores = dense_scores(settings, take_keys(settings, operands, jnp.where(here, index, 0)))
    lse = jnp.where(holds_keys(lse), lse, jnp.inf)[..., None]
    return jnp.where(here, jnp.exp(scores.transpose(0, 2, 1, 3) - lse), 0.0)


def take_rows(settings: Settings, operands: Operands, index: Int[Array, " rows"]) -> Operands:
    """The same call with the queries of given indices; those out of range are NaN."""
    size = operands.query.shape[1]
    operands = operands.positioned(settings.compares)
    return operands.map_queries(lambda x, axis: _take(x, index, axis, size))


def take_keys(settings: Settings, operands: Operands, index: Int[Array, " keys"]) -> Operands:
    """The same call with the keys of given indices, which are in range."""
    size = operands.key.shape[1]
    operands = operands.positioned(settings.compares)
    return operands.map_keys(lambda x, axis: _take(x, index, axis, size))


def _take(x: Array, index: Array, axis: int, size: int) -> Array:
    if x.shape[axis] != size:  # broadcast
        return x
    return jnp.take(x, index, axis, mode="fill")
