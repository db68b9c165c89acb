"""The keys of a measure, and how the rows score them: the arguments of one call."""

import dataclasses
from collections.abc import Sequence

import equinox as eqx
from jaxtyping import Array, Bool, Float, Int

from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.internal import Candidate, join_masks
from energy_attn.kernels.masks import AbstractMask

from ..core._free_energy import Arrays, Prepared, check_at, prepare


class KeySet(eqx.Module):
    """Queries, keys and values, what else scores and masks them, and the options of the call.

    `rule`: the energy's own mask. `rows`: lengths, positions and segment ids by the names of their
    options, without those not given.
    """

    query: Float[Array, "*B T N H"]
    key: Float[Array, "*B S K H"]
    value: Float[Array, "*B S K Hv"]
    bias: Float[Array, "..."] | None
    mask: Bool[Array, "..."] | AbstractMask | None
    rule: AbstractMask | None
    rows: dict[str, Int[Array, "..."]]
    scale: float | Float[Array, ""] | None
    is_causal: bool = eqx.field(static=True)
    local_window_size: int | tuple[int, int] | None = eqx.field(static=True)
    implementation: Candidate | Sequence[Candidate] | None = eqx.field(static=True)
    parallel: SequenceParallel | None = eqx.field(static=True)


# Functions, as a bound method of an Equinox module is a module, which takes time to make.
def prepare_keys(keys: KeySet) -> tuple[Prepared, Arrays]:
    """The prepared call. Raises as `free_energy` does."""
    return prepare(
        keys.query,
        keys.key,
        keys.value,
        keys.bias,
        join_masks(keys.rule, keys.mask),
        scale=keys.scale,
        is_causal=keys.is_causal,
        local_window_size=keys.local_window_size,
        implementation=keys.implementation,
        parallel=keys.parallel,
        **keys.rows,
    )


def tilt_keys(keys: KeySet, source: Float[Array, "*B T N Hv"]) -> KeySet:
    r"""The same keys with the scores $s + \zeta \cdot v$: the source is extra width of query and key."""
    call, arrays = prepare_keys(keys)
    (query, key, *_), settings, batched, _ = check_at(call, source, arrays)
    if not batched:
        query, key = query[0], key[0]
    return dataclasses.replace(keys, query=query, key=key, scale=settings.scale)
