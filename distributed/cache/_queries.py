"""The queries to a cache: their positions, its energy, and the state of their attention."""

import dataclasses
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    LEAF,
    CallPolicy,
    MergedScoreOptions,
    Scales,
    call_policy,
    check_call,
    check_options,
    check_shape,
    received,
)
from energy_attn.kernels.masks import AbstractMask

from ..methods._parallel import SequenceParallel
from ..methods._plan import sharding_plan
from ..methods._sharded import attend_sharded
from ._arguments import check_counts, check_reach, check_stored
from ._tokens import AbstractTokens
from ._write import positions_from

Measure = TypeVar("Measure", covariant=True)


@runtime_checkable
class EnergyLike(Protocol[Measure]):
    """The interface of an energy that a cache uses, such as `energy_attn.FreeEnergy`: a frozen dataclass.

    Attributes:
        local_window_size: how far from a query its keys may lie, or None.
        parallel: how keys are sharded, or None.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def local_window_size(self) -> int | tuple[int | None, int | None] | None: ...

    @property
    def parallel(self) -> SequenceParallel | None: ...

    def at(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K Hv"],
        *,
        query_positions: Int[Array, "B T"] | None,
        key_positions: Int[Array, "B S"] | None,
    ) -> Measure:
        """The energy of these queries and keys."""
        ...


def energy_of_cache(
    energy: EnergyLike[Measure], window: int | None, parallel: SequenceParallel | None
) -> EnergyLike[Measure]:
    """A checked energy with the window and the mesh of a cache.

    Raises `TypeError` if it is no energy, and `ValueError` if its window is wider.
    """
    if not isinstance(energy, EnergyLike):
        raise TypeError(f"energy: wanted an energy_attn.FreeEnergy, got {received(energy)}")
    reach = check_reach(energy.local_window_size, window)
    return dataclasses.replace(energy, local_window_size=reach, parallel=parallel)


def check_scores(
    options: MergedScoreOptions, mask: Array | AbstractMask | None, window: int | None
) -> tuple[CallPolicy, MergedScoreOptions]:
    """The policy, and the options with the causality and the window of a cache.

    Raises `TypeError` for an unknown option or one of another type, and `ValueError` for a window
    that is wider than the cache's.
    """
    check_options(options, MergedScoreOptions)
    policy = call_policy(options.get("implementation"), options.get("reproducible", False))
    reach = check_reach(options.get("local_window_size"), window)
    causal = options.get("is_causal", mask is None)
    return policy, {**options, "is_causal": causal, "local_window_size": reach}


def check_queries(
    query: object,
    key: Array,
    dtype: jnp.dtype,
    cache_lengths: Int[Array, " B"],
    lengths: Int[Array, " B"] | None,
    positions: Int[Array, "..."] | None,
) -> Int[Array, "..."]:
    """The positions of checked queries to a cache with such keys; by default, of the tokens before `ends`.

    Raises `TypeError` for another dtype and `ValueError` for another shape, or for lengths beside
    positions.
    """
    query = check_stored("query", query, dtype)
    check_shape("query", query, (len(cache_lengths), "T", "N", key.shape[-1]))
    if positions is None:
        counts = check_counts(lengths, len(cache_lengths), query.shape[1])
        return positions_from(cache_lengths - counts, counts, query.shape[1])
    if lengths is not None:
        raise ValueError(
            "lengths: wanted None beside query_positions, which say what queries are absent, "
            f"got {received(lengths)}"
        )
    return positions


def run_of(cache: AbstractTokens) -> int | None:
    """The number of successive tokens that lie together in a cache; None: none do."""
    if cache.window is not None:  # a slot may have a token of the next lap
        return None
    capacity, block, devices = cache.slots
    # on one device, token n is in slot n
    return block if devices > 1 else max(LEAF, 1 << (capacity - 1).bit_length())


def state_of(
    cache: AbstractTokens,
    query: Array,
    positions: Array,
    policy: CallPolicy,
    options: MergedScoreOptions,
    *,
    source: Any = None,
    mask: Array | AbstractMask | None = None,
    unrounded: bool = False,
) -> AttentionState:
    """The state of queries at `positions` over the tokens in a cache; `unrounded`, to be merged with others.

    Raises as `KVCache.attend`.
    """
    scored: Any = {"query_positions": positions, "key_positions": cache.positions, **options}
    stored, scales = (cache.key, cache.value), Scales(cache.key_scale, cache.value_scale)
    call = check_call(query, *stored, source, None, mask, scales, **scored)
    plan = sharding_plan(cache.parallel, *call.operands.qkv)
    policy = policy.laid_out(run_of(cache))
    settings = call.settings.needing(unrounded=unrounded)
    return attend_sharded(plan, policy, settings, call.operands)
