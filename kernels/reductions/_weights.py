"""The weights of a few rows and keys, with their whole matrix in memory."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .._varying import vary_together
from ..call._operands import Operands, Settings, with_default_positions
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
    return _taken(settings, operands, index, ("query", "query_positions", "query_segments"), 2)


def take_keys(settings: Settings, operands: Operands, index: Int[Array, " keys"]) -> Operands:
    """The same call with the keys of given indices, which are in range."""
    return _taken(settings, operands, index, ("key", "value", "key_positions", "key_segments"), 3)


def _taken(
    settings: Settings, operands: Operands, index: Array, names: tuple[str, ...], axis: int
) -> Operands:
    """Entries of the second axis of operands, and of the axis of biases and masks that is of these."""
    operands = with_default_positions(operands, settings)
    size = getattr(operands, names[0]).shape[1]

    def take(name: str, axis: int) -> Any:
        x = getattr(operands, name)
        if x is None or x.shape[axis] != size:  # absent, or broadcast
            return x
        return jnp.take(x, index, axis, mode="fill")

    axes = {"bias": axis, "mask": axis} | dict.fromkeys(names, 1)
    return operands._replace(**{name: take(name, axis) for name, axis in axes.items()})
