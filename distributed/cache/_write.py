"""Writes the slots of a cache, each device its own: new tokens, rows of another cache, and the tokens that stay."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from energy_attn.kernels.internal import autodiff, mesh_axes, unless_exported

from ..methods._parallel import SequenceParallel, reshard_explicit
from ._layout import CacheArrays, CacheSharding, Slots, spec_of

_ERRORS = (
    "lengths: wanted from 0 to as many new tokens as key has",
    "append: a row of the cache has no room for its new tokens; evict old ones first, or make a "
    "cache of more capacity or with a window",
)


def blank(
    key: tuple[int, ...],
    value: tuple[int, ...],
    dtype: DTypeLike,
    parallel: SequenceParallel | None,
) -> CacheArrays:
    """Empty slots of these shapes, each made on its device, with scales if they are of int8."""

    def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        spec = spec_of(parallel, len(shape))
        array = _zeros(shape, jnp.dtype(dtype), spec)()
        if parallel is None or spec is None:
            return array
        # inside of another jit, out_shardings do not set the types of explicit axes
        return reshard_explicit(jax.sharding.get_abstract_mesh(), parallel.axes, array, spec)

    def scale(shape: tuple[int, ...]) -> Array | None:
        return zeros(shape[:-1], jnp.float32) if dtype == jnp.int8 else None

    slots = zeros(key, dtype), zeros(value, dtype), scale(key), scale(value)
    return CacheArrays(*slots, zeros(key[:1], jnp.int32), zeros(key[:1], jnp.int32))


@functools.lru_cache
def _zeros(
    shape: tuple[int, ...], dtype: jnp.dtype, spec: PartitionSpec | None
) -> Callable[[], Array]:
    # Cached, so that caches of one kind compile once.
    return jax.jit(functools.partial(jnp.zeros, shape, dtype), out_shardings=spec)


# Jitted so that a call outside of `jax.jit` runs as one program.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def append(
    sharding: CacheSharding,
    slots: Slots,
    is_ring: bool,
    arrays: CacheArrays,
    new: tuple[Array | None, ...],
    counts: Array,
) -> CacheArrays:
    """Writes the first `counts` of the new tokens of each row: keys, values and their scales.

    A ring buffer drops the tokens that it overwrites; otherwise `counts` come from `fitting`. A row whose count is
    -1 gets one token of NaN, in place of its newest one if it is full: whatever is asked of it from then on is NaN.
    """
    assert new[0] is not None
    tokens = new[0].shape[1]

    def local(arrays: CacheArrays, new: tuple[Array | None, ...], counts: Array) -> CacheArrays:
        *stored, starts, lengths = arrays
        device, _ = sharding.own(slots)
        broken = counts < 0
        begin = jnp.where(broken, jnp.minimum(lengths, starts + slots.capacity - 1), lengths)
        counts = jnp.where(broken, 1, counts)
        # A device's tokens among consecutive ones are consecutive in its own slots.
        first = slots.below(device, begin)[:, None]
        local_index = first + jnp.arange(slots.most(tokens), dtype=jnp.int32)[None]
        token = slots.token(device, local_index) - begin[:, None]
        # absent tokens go after the last slot, each to its own index
        out_of_range = slots.per_device + local_index - first
        slot = jnp.where(token < counts[:, None], local_index % slots.per_device, out_of_range)

        def put(buffer: Array | None, new: Array | None) -> Any:
            if buffer is None or new is None:
                return None
            taken = jax.vmap(lambda x, i: jnp.take(x, i, 0, mode="clip"))(new, token)
            if jnp.issubdtype(taken.dtype, jnp.floating):  # of eight bits, the scales
                nan = jnp.asarray(jnp.nan, taken.dtype)
                taken = jnp.where(broken[(..., *[None] * (taken.ndim - 1))], nan, taken)
            return write_at(buffer, taken, slot)

        new_lengths = begin + counts
        if is_ring:
            starts = jnp.maximum(starts, new_lengths - slots.capacity)
        return CacheArrays(*map(put, stored, new), starts=starts, lengths=new_lengths)

    in_specs = sharding.arrays, sharding.new, sharding.rows
    return sharding.map(local, in_specs, sharding.arrays, arrays, new, counts)


def fitting(
    sharding: CacheSharding,
    capacity: int,
    starts: Array | None,
    lengths: Array,
    counts: Array,
    tokens: int,
) -> Array:
    """The counts, or an error at run time; where none is raised, -1 for the rows at fault, which `append` breaks.

    A row is at fault if it has no room for `counts` more tokens, or if they are not from 0 to
    `tokens`. `starts` is None for a ring buffer, which always has room. Raises, when it runs, Equinox's RuntimeError:
    on CPUs, and on all platforms outside of `jax.jit`. In programs for accelerators an error is a callback, for which
    every step would wait, and which neither runs ahead of time nor is captured in a graph. JAX does not serialise a
    program with one, so that exported programs have none.
    """
    traced = any(isinstance(x, jax.core.Tracer) for x in (starts, lengths, counts))
    return _fitting(sharding, capacity, not traced, starts, lengths, counts, tokens)


# Equinox's jit: outside of any other, JAX's raises an error that does not begin with the message.
@eqx.filter_jit
def _fitting(
    sharding: CacheSharding,
    capacity: int,
    raises: bool,
    starts: Array | None,
    lengths: Array,
    counts: Array,
    tokens: int,
) -> Array:
    def local(starts: Array | None, lengths: Array, counts: Array) -> Array:
        valid = (counts >= 0) & (counts <= tokens)
        fits = valid if starts is None else valid & (lengths + counts - starts <= capacity)

        checked = counts, valid, fits
        if raises:
            counts = _raising(*checked)
        else:
            raising = functools.partial(unless_exported, _raising)
            counts = lax.platform_dependent(*checked, cpu=raising, default=lambda x, *_: x)
        return jnp.where(fits, counts, -1)

    # Each device checks for itself, without communication.
    given = starts, lengths, counts
    return sharding.map(local, (sharding.rows,) * 3, sharding.rows, *given, over_all=True)


def _raising(counts: Array, valid: Array, fits: Array) -> Array:
    message = jnp.where(valid.all(), 1, 0)
    return eqx.branched_error_if(counts, ~fits, message, _ERRORS)


def positions_from(first: Array, counts: Array, tokens: int) -> Array:
    """Positions `[B, tokens]` from `first` `[B]` on; -1 after the row's `counts`."""
    offset = jnp.arange(tokens, dtype=jnp.int32)[None]
    return jnp.where(offset < counts[:, None], first[:, None] + offset, -1)


def write_at(buffer: Array, new: Array, slot: Array) -> Array:
    """`buffer` `[B, S, ...]` with `new` `[B, L, ...]` at `slot` `[B, L]`; dropped where that is ≥ S."""
    return lax.platform_dependent(buffer, new, slot, cpu=_write_in_branch, default=_scatter)


def _scatter(buffer: Array, new: Array, slot: Array) -> Array:
    def row(buffer: Array, new: Array, slot: Array) -> Array:
        return buffer.at[slot].set(new, mode="drop", unique_indices=True)

    return jax.vmap(row)(buffer, new, slot)


# Older versions of XLA:CPU scatter bfloat16 through float32, the whole buffer for each token, and copy the buffer
# if its bits are scattered (`test_append_in_place`). This is one fused loop over the buffer, in place, which stores
# only new entries.
def _choose(buffer: Array, new: Array, slot: Array) -> Array:
    slots, tokens = buffer.shape[1], new.shape[1]

    def row(buffer: Array, new: Array, slot: Array) -> Array:
        no_token, index = jnp.full(slots, tokens, jnp.int32), jnp.arange(tokens, dtype=jnp.int32)
        token = no_token.at[slot].set(index, mode="drop", unique_indices=True)
        is_new = jnp.expand_dims(token < tokens, range(1, buffer.ndim))
        return jnp.where(is_new, jnp.take(new, token, 0, mode="clip"), buffer)

    old, put = (lax.bitcast_convert_type(x, jnp.uint16) for x in (buffer, new))
    return lax.bitcast_convert_type(jax.vmap(row)(old, put, slot), buffer.dtype)


def _write_in_branch(buffer: Array, new: Array, slot: Array) -> Array:
    return autodiff.linear_call(_BranchedWrite(buffer.shape[1]), slot, (buffer, new))


# A write is linear in the buffer and in the new entries; its derivatives bypass the branch and the bits.
@dataclasses.dataclass(frozen=True)
class _BranchedWrite(autodiff.AbstractLinearMap):
    """The buffer with new entries, from slots and the two arrays."""

    slots: int

    def apply(self, fixed: Array, moving: tuple[Array | None, Array | None]) -> Array:
        """Writes in a branch, so that XLA:CPU does not fuse the write with a read, which would copy the buffer."""
        buffer, new, fixed = mesh_axes.vary_together((*self._both(fixed, moving), fixed))
        write = _choose if buffer.dtype == jnp.bfloat16 else _scatter
        return lax.cond(
            (fixed < self.slots).any(),
            lambda buffer: write(buffer, new, fixed),
            lambda buffer: buffer,
            buffer,
        )

    def plain(self, fixed: Array, moving: tuple[Array | None, Array | None]) -> Array:
        return _scatter(*self._both(fixed, moving), fixed)

    def transpose(self, fixed: Array, moving: Any, cotangent: Array) -> tuple[Any, Any]:
        """The cotangent of the new entries is read at their slots; the cotangent of the buffer is zero there."""
        buffer, new = moving

        def row(cotangent: Array, slot: Array) -> Array:
            return cotangent.at[slot].get(mode="fill", fill_value=0, unique_indices=True)

        return (
            None if buffer is None else autodiff.linear_call(self, fixed, (cotangent, None)),
            None if new is None else jax.vmap(row)(cotangent, fixed),
        )

    def _both(self, fixed: Array, moving: tuple[Array | None, Array | None]) -> tuple[Array, Array]:
        buffer, new = moving
        if buffer is None:
            assert new is not None
            buffer = jnp.zeros((len(new), self.slots, *new.shape[2:]), new.dtype)
        if new is None:
            new = jnp.zeros((*fixed.shape, *buffer.shape[2:]), buffer.dtype)
        return buffer, new


@functools.partial(jax.jit, static_argnums=(0, 1))
def positions(sharding: CacheSharding, slots: Slots, starts: Array, lengths: Array) -> Array:
    """The token in each slot, `[B, S]`; -1 in empty ones."""

    def local(starts: Array, lengths: Array) -> Array:
        token = slots.held(sharding.own(slots)[1], lengths[:, None])
        return jnp.where(token >= starts[:, None], token, -1)

    out_spec = PartitionSpec(sharding.batch or None, sharding.sequence or None)
    return sharding.map(local, (sharding.rows,) * 2, out_spec, starts, lengths)


@functools.partial(jax.jit, static_argnums=0)
def empty_rows(
    sharding: CacheSharding, emptied: Array, begins: Array, starts: Array, lengths: Array
) -> tuple[Array, Array]:
    """Starts and lengths; rows that are `emptied` `[B]` begin at the positions `begins`."""

    def local(emptied: Array, begins: Array, *starts_and_lengths: Array) -> tuple[Array, ...]:
        return tuple(jnp.where(emptied, begins, x) for x in starts_and_lengths)

    specs = (sharding.rows,) * 4
    return sharding.map(local, specs, specs[:2], emptied, begins, starts, lengths)


@functools.partial(jax.jit, static_argnums=0)
def replace_rows(
    sharding: CacheSharding, mine: CacheArrays, new: CacheArrays, rows: Array
) -> CacheArrays:
    """The rows of a cache with `new` ones at the indices `rows` `[n]`; dropped where these are out of range.

    Of indices that repeat the last counts. Rows of `new` are on all devices that have rows of the cache.
    """

    def local(mine: CacheArrays, new: CacheArrays, rows: Array) -> CacheArrays:
        size, order = len(mine.lengths), jnp.arange(len(rows), dtype=jnp.int32)
        index = rows
        if sharding.batch:
            index -= lax.axis_index(sharding.batch) * size
        later = order[:, None] < order[None]
        repeats = ((rows[:, None] == rows[None]) & later).any(1)
        # dropped rows go after the last one, each to its own index
        row = jnp.where((index >= 0) & (index < size) & ~repeats, index, size + order)[None]

        def put(old: Array, new: Array) -> Any:
            return write_at(old[None], new[None], row)[0]

        return jax.tree.map(put, mine, new)

    whole, every = PartitionSpec(), PartitionSpec(None, *sharding.slots[1:])
    in_specs = sharding.arrays, CacheArrays(*[every] * 4, starts=whole, lengths=whole), whole
    return sharding.map(local, in_specs, sharding.arrays, mine, new, rows)


@functools.partial(jax.jit, static_argnums=(0, 2))
def repeat_rows(sharding: CacheSharding, x: Array, count: int) -> Array:
    """`[R]` to `[R * count]`: each entry `count` times."""

    def local(x: Array) -> Array:
        return jnp.repeat(x, count, total_repeat_length=len(x) * count)

    return sharding.map(local, (sharding.rows,), sharding.rows, x)


# Jitted so that a call outside of `jax.jit` runs as one program.
@functools.partial(jax.jit, static_argnums=(0, 1))
def keep_important(
    sharding: CacheSharding, slots: Slots, arrays: CacheArrays, first: Array, importance: Array
) -> CacheArrays:
    """The tokens of largest `importance`, in order, in the slots of the tokens from `first` on.

    `importance` is `[B, S, K]`, or `[B, S, 1]` for all heads at once. Of equals the newer one stays. Each device
    gathers the slots of all, one array after the other.
    """
    axes = sharding.sequence

    def gathered(x: Array) -> Array:
        return lax.all_gather(x, axes, axis=1, tiled=True) if axes else x

    def local(arrays: CacheArrays, first: Array, importance: Array) -> CacheArrays:
        *stored, starts, lengths = arrays
        every = jnp.arange(slots.capacity, dtype=jnp.int32)[None]
        token = slots.held(every, lengths[:, None])
        present = token >= starts[:, None]
        # sources[b, k, j]: the slot of the j-th token that stays
        pick = jax.vmap(jax.vmap(_sources, (None, None, None, 1)))
        sources = pick(token, present, lengths - first, gathered(importance))
        number = slots.held(sharding.own(slots)[1], lengths[:, None]) - first[:, None]
        index = jnp.broadcast_to(
            jnp.maximum(number, 0)[:, None], (*sources.shape[:2], number.shape[1])
        )
        source = jnp.take_along_axis(sources, index, 2).swapaxes(1, 2)

        def moved(x: Array | None) -> Any:
            if x is None:
                return None
            index = jnp.broadcast_to(source, (*source.shape[:2], x.shape[2]))
            index = index.reshape(*index.shape, *[1] * (x.ndim - 3))
            return jnp.take_along_axis(gathered(x), index, 1)

        return CacheArrays(*map(moved, stored), starts=first, lengths=lengths)

    heads = sharding.slots if importance.shape[2] > 1 else PartitionSpec(*sharding.slots[:2])
    in_specs = sharding.arrays, sharding.rows, heads
    return sharding.map(local, in_specs, sharding.arrays, arrays, first, importance)


def _sources(token: Array, present: Array, count: Array, importance: Array) -> Array:
    """The slots of the `count` most important tokens of one row, in the order of the tokens; behind them the others."""
    ranked = jnp.lexsort((-token, -importance, ~present))
    rank = jnp.zeros_like(token).at[ranked].set(jnp.arange(len(token), dtype=token.dtype))
    return jnp.lexsort((token, rank >= count)).astype(jnp.int32)
