"""The keys of a measure, and the energy that scores them: the arguments of one call."""

import abc
import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from energy_attn.kernels.internal import (
    Operands,
    RowOptions,
    check_options,
    join_masks,
    lse_dtype,
    with_source,
)
from energy_attn.kernels.masks import AbstractMask

from ..functional._free_energy import StaticCall, prepare
from ..functional._options import EnergyOptions, ModuleOptions


class AbstractEnergy(eqx.Module):
    """The options of a call, and a mask besides that of the call."""

    mask: eqx.AbstractVar[AbstractMask | None]

    @abc.abstractmethod
    def _options(self) -> EnergyOptions: ...


class KeySet(eqx.Module):
    """Queries, keys and values, and the energy by which the rows score the keys.

    `rows`: lengths, positions and segment ids by the names of their options, without those not given.
    """

    energy: AbstractEnergy
    query: Float[Array, "*B T N H"]
    key: Float[Array, "*B S K H"]
    value: Float[Array, "*B S K Hv"]
    bias: Float[Array, "..."] | None
    mask: Bool[Array, "..."] | AbstractMask | None
    rows: dict[str, Int[Array, "..."]]
    source: Float[Array, "*B T N Hv"] | None = None  # at which the scores are


class PreparedKeys(eqx.Module):
    """A prepared call as the keys of a measure."""

    call: StaticCall = eqx.field(static=True)
    operands: Operands
    source: Float[Array, "*B T N Hv"] | None = None  # at which the scores are

    @property
    def query(self) -> Array:
        """With a batch axis if the user's arrays had one, as the value."""
        return self.operands.query if self.call.batched else self.operands.query[0]

    @property
    def value(self) -> Array:
        """`[*B, S, K, Hv]`."""
        return self.operands.value if self.call.batched else self.operands.value[0]


Keys = KeySet | PreparedKeys


# Functions, as a bound method of an Equinox module is a module, which takes time to make.
def prepare_keys(keys: Keys) -> tuple[StaticCall, Operands]:
    """The prepared call, with the source in its scores. Raises as `free_energy` does."""
    if isinstance(keys, PreparedKeys):
        call, operands = keys.call, keys.operands
    else:
        arguments = keys.query, keys.key, keys.value, keys.bias, keys.mask
        rows: Any = keys.rows
        call, operands = prepare_at(keys.energy, *arguments, rows)
    if keys.source is None:
        return call, operands
    source = jnp.asarray(keys.source if call.batched else keys.source[None])
    settings, operands = with_source(call.settings, operands, source)
    value = operands.value.astype(operands.query.dtype)
    return call._replace(settings=settings), operands._replace(value=value)


def check_rows(rows: RowOptions) -> None:
    """Raises `TypeError` for an unknown option of a call of an energy."""
    check_options(rows, RowOptions, "bias", "mask", fields=ModuleOptions)


def prepare_at(
    energy: AbstractEnergy,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | AbstractMask | None,
    rows: RowOptions,
) -> tuple[StaticCall, Operands]:
    """The prepared call of an energy. Raises as `FreeEnergy.at`."""
    check_rows(rows)
    mask = join_masks(energy.mask, mask)
    return prepare(query, key, value, bias, mask, **energy._options(), **rows)


def tilt_keys(keys: Keys, source: Float[Array, "*B T N Hv"]) -> Keys:
    r"""The same keys with the scores $s + \zeta \cdot v$."""
    return dataclasses.replace(keys, source=sum_of_sources(keys.source, source))


def sum_of_sources(
    first: Float[Array, "..."] | None, second: Float[Array | np.ndarray, "..."] | None
) -> Array | np.ndarray | None:
    """The sum, in the precision of energies; None is zero."""
    if first is None or second is None:
        return second if first is None else first
    wide = lse_dtype(first.dtype, second.dtype)
    return jnp.asarray(first, wide) + jnp.asarray(second, wide)
