"""Which tokens of a cache stay when the least important ones go, and where they then are."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._slots import Slots
from ._write import CacheSharding, Stored


# Jitted so that a call outside of `jax.jit` runs as one program.
@functools.partial(jax.jit, static_argnums=(0, 1))
def keep_important(
    sharding: CacheSharding | None,
    slots: Slots,
    stored: Stored,
    starts: Array,
    lengths: Array,
    first: Array,
    importance: Array,
) -> Stored:
    """The tokens of largest `importance`, in order, in the slots of the tokens from `first` on.

    `importance` is `[B, S, K]`, or `[B, S, 1]` for all heads at once. Of equals the newer one stays. Each device
    gathers the slots of all, one array after the other.
    """
    axes = sharding.sequence if sharding else ()

    def gathered(x: Array) -> Array:
        return lax.all_gather(x, axes, axis=1, tiled=True) if axes else x

    def local(
        stored: Stored, starts: Array, lengths: Array, first: Array, importance: Array
    ) -> Stored:
        every = jnp.arange(slots.capacity, dtype=jnp.int32)[None]
        token = slots.held(every, lengths[:, None])
        present = token >= starts[:, None]
        # sources[b, k, j]: the slot of the j-th token that stays
        pick = jax.vmap(jax.vmap(_sources, (None, None, None, 1)))
        sources = pick(token, present, lengths - first, gathered(importance))
        here = _own(every, slots, axes)
        number = slots.held(here, lengths[:, None]) - first[:, None]
        index = jnp.broadcast_to(
            jnp.maximum(number, 0)[:, None], (len(lengths), sources.shape[1], here.shape[1])
        )
        source = jnp.take_along_axis(sources, index, 2)
        return Stored(*(_moved(gathered, x, source) for x in stored))

    if sharding is None:
        return local(stored, starts, lengths, first, importance)
    of_rows = sharding.rows
    heads = sharding.slots if importance.shape[2] > 1 else jax.P(*sharding.slots[:2])
    in_specs = sharding.slots, of_rows, of_rows, of_rows, heads
    given = stored, starts, lengths, first, importance
    return sharding.map(local, in_specs, sharding.slots, *given)


def _sources(token: Array, present: Array, count: Array, importance: Array) -> Array:
    """The slots of the `count` most important tokens of one row, in the order of the tokens; behind them the others."""
    ranked = jnp.lexsort((-token, -importance, ~present))
    rank = jnp.zeros_like(token).at[ranked].set(jnp.arange(len(token), dtype=token.dtype))
    return jnp.lexsort((token, rank >= count)).astype(jnp.int32)


def _own(every: Array, slots: Slots, axes: tuple[str, ...]) -> Array:
    """The slots of this device."""
    if not axes:
        return every
    first = lax.axis_index(axes).astype(jnp.int32) * slots.per_device
    return lax.dynamic_slice_in_dim(every, first, slots.per_device, 1)


def _moved(gathered: Callable[[Array], Array], x: Array | None, source: Array) -> Any:
    """The entries `[B, S, K, ...]` at the slots `source` `[B, K or 1, S]`."""
    if x is None:
        return None
    index = source.swapaxes(1, 2)
    index = jnp.broadcast_to(index, (*index.shape[:2], x.shape[2]))
    return jnp.take_along_axis(gathered(x), index.reshape(*index.shape, *[1] * (x.ndim - 3)), 1)
