"""The keys of a measure, and how the rows score them: the arguments of one call."""

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.internal import Candidate, join_masks, lse_dtype
from energy_attn.kernels.masks import AbstractMask
from energy_attn.kernels.scores import AbstractScore

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
    score: AbstractScore | None
    sink: Float[Array, "..."] | None = None
    source: Float[Array, "*B T N Hv"] | None = None  # at which the scores are


# Functions, as a bound method of an Equinox module is a module, which takes time to make.
def prepare_keys(keys: KeySet) -> tuple[Prepared, Arrays]:
    """The prepared call, with the source in its scores. Raises as `free_energy` does."""
    call, arrays = prepare(
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
        score=keys.score,
        sink=keys.sink,
        **keys.rows,
    )
    return (call, arrays) if keys.source is None else _tilted(call, arrays, keys.source)


def tilt_keys(keys: KeySet, source: Float[Array, "*B T N Hv"]) -> KeySet:
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


def _tilted(call: Prepared, arrays: Arrays, source: Array) -> tuple[Prepared, Arrays]:
    """The source as extra width of query and key, which are then in the dtype of the scores, as are the values."""
    (query, key, *_), settings, batched, _ = check_at(call, source, arrays)
    if not batched:
        query, key = query[0], key[0]
    options = {name: x for name, x in arrays.options.items() if name != "scale"}
    static = dict(call.options) | {"scale": settings.scale}
    value = arrays.value.astype(query.dtype)
    arrays = arrays._replace(query=query, key=key, value=value, options=options)
    width = None if settings.score is None else settings.scored_width
    return call._replace(options=tuple(static.items()), scored_width=width), arrays
