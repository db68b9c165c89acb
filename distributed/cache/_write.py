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
    """Empty slots of these shapes, each made on its device, with scales for int8."""

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


# Cached, so that caches of one kind compile once.
@functools.lru_cache
def _zeros(
    shape: tuple[int, ...], dtype: jnp.dtype, spec: PartitionSpec | None
) -> Callable[[], Array]:
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
    """Writes the first `counts` of the new tokens of each row: keys, values and their scales."""
    # A ring buffer drops the tokens that it overwrites; otherwise `counts` come from `fitting`. A row with the count -1
    # gets one token of NaN, in place of its newest one if it is full, so that all later results for it are NaN.
    assert new[0] is not None
    tokens = new[0].shape[1]

    def local(arrays: CacheArrays, new: tuple[Array | None, ...], counts: Array) -> CacheArrays:
        *stored, starts, lengths = arrays
        device, _ = sharding.own(slots)
        broken = counts < 0
        begin = jnp.where(broken, jnp.minimum(lengths, starts + slots.capacity - 1), lengths)
        counts = jnp.where(broken, 1, counts)
        # the tokens of a device among consecutive ones are in consecutive slots of the device
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
    """Checks that each row has room for `counts` more tokens, from 0 to `tokens`; a ring buffer (no `starts`) has.

    Raises Equinox's RuntimeError at run time, on CPUs and outside of `jax.jit`; otherwise returns -1 for wrong rows.
    """
    # In programs for accelerators an error is a callback, for which every step would wait, and which cannot be captured
    # in a graph. JAX does not serialise a program with a callback, so that exported programs have none.
    traced = any(isinstance(x, jax.core.Tracer) for x in (starts, lengths, counts))
    return _fitting(sharding, capacity, not traced, starts, lengths, counts, tokens)


# Equinox's jit, since outside of any other jit JAX's raises an error that does not begin with the message.
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

    # each device checks its own rows, without communication
    rows = starts, lengths, counts
    return sharding.map(local, (sharding.rows,) * 3, sharding.rows, *rows, over_all=True)


def _raising(counts: Array, valid: Array, fits: Array) -> Array:
    message = jnp.where(valid.all(), 1, 0)
    return eqx.branched_error_if(counts, ~fits, message, _ERRORS)


def positions_from(first: Array, counts: Array, tokens: int) -> Array:
    """Positions `[B, tokens]` from `first` `[B]` on; -1 after the first `counts`."""
    offset = jnp.arange(tokens, dtype=jnp.int32)[None]
    return jnp.where(offset < counts[:, None], first[:, None] + offset, -1)


def write_at(buffer: Array, new: Array, slot: Array) -> Array:
    """`buffer` `[B, S, ...]` with `new` `[B, L, ...]` at `slot` `[B, L]`; slots from `S` on are dropped."""
    return lax.platform_dependent(buffer, new, slot, cpu=_write_in_branch, default=_scatter)


def _scatter(buffer: Array, new: Array, slot: Array) -> Array:
    def row(buffer: Array, new: Array, slot: Array) -> Array:
        return buffer.at[slot].set(new, mode="drop", unique_indices=True)

    return jax.vmap(row)(buffer, new, slot)


# Older versions of XLA:CPU have no scatter of their own (https://github.com/tensorflow/tensorflow/issues/56511): they
# scatter bfloat16 through float32, the whole buffer for each token, and copy the buffer if its bits are scattered
# (`test_append_in_place`). This is one fused loop over the buffer, in place, which stores only new entries.
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


# A write y = (1 - M) buffer + S new is linear in both, with S the scatter to the slots and M the mask of written slots.
# Its derivatives bypass the branch and the bits.
@dataclasses.dataclass(frozen=True)
class _BranchedWrite(autodiff.AbstractLinearMap):
    slots: int

    def apply(self, fixed: Array, moving: tuple[Array | None, Array | None]) -> Array:
        # in a branch, so that XLA:CPU does not fuse the write with a read, which would copy the buffer
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

    # buffer' = (1 - M) y' and new' = Sᵀ y': a write of zeros, and a read at the slots
    def transpose(self, fixed: Array, moving: Any, cotangent: Array) -> tuple[Any, Any]:
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
    """The position of the token in each slot; -1 in slots without a token."""

    def local(starts: Array, lengths: Array) -> Array:
        token = slots.held(sharding.own(slots)[1], lengths[:, None])
        return jnp.where(token >= starts[:, None], token, -1)

    out_spec = PartitionSpec(sharding.batch or None, sharding.sequence or None)
    return sharding.map(local, (sharding.rows,) * 2, out_spec, starts, lengths)


@functools.partial(jax.jit, static_argnums=0)
def empty_rows(
    sharding: CacheSharding, emptied: Array, begins: Array, starts: Array, lengths: Array
) -> tuple[Array, Array]:
    """Starts and lengths, both `begins` in the rows that are emptied."""

    def local(emptied: Array, begins: Array, *starts_and_lengths: Array) -> tuple[Array, ...]:
        return tuple(jnp.where(emptied, begins, x) for x in starts_and_lengths)

    specs = (sharding.rows,) * 4
    return sharding.map(local, specs, specs[:2], emptied, begins, starts, lengths)


@functools.partial(jax.jit, static_argnums=0)
def replace_rows(
    sharding: CacheSharding, old: CacheArrays, new: CacheArrays, rows: Array
) -> CacheArrays:
    """Writes `new` rows at the indices `rows` `[n]`: none out of range, and the last of equal indices."""

    def local(old: CacheArrays, new: CacheArrays, rows: Array) -> CacheArrays:
        size, order = len(old.lengths), jnp.arange(len(rows), dtype=jnp.int32)
        index = rows
        if sharding.batch:
            index -= lax.axis_index(sharding.batch) * size
        # of rows that repeat, only the last is written
        later = order[:, None] < order[None]
        repeats = ((rows[:, None] == rows[None]) & later).any(1)
        # dropped rows go after the last one, each to its own index
        row = jnp.where((index >= 0) & (index < size) & ~repeats, index, size + order)[None]

        def put(old: Array, new: Array) -> Any:
            return write_at(old[None], new[None], row)[0]

        return jax.tree.map(put, old, new)

    # new rows are replicated over the devices that hold rows of the cache
    whole, slots = PartitionSpec(), PartitionSpec(None, *sharding.slots[1:])
    in_specs = sharding.arrays, CacheArrays(*[slots] * 4, starts=whole, lengths=whole), whole
    return sharding.map(local, in_specs, sharding.arrays, old, new, rows)


@functools.partial(jax.jit, static_argnums=(0, 2))
def repeat_rows(sharding: CacheSharding, x: Array, count: int) -> Array:
    def local(x: Array) -> Array:
        return jnp.repeat(x, count, total_repeat_length=len(x) * count)

    return sharding.map(local, (sharding.rows,), sharding.rows, x)


# Jitted so that a call outside of `jax.jit` runs as one program.
@functools.partial(jax.jit, static_argnums=(0, 1))
def keep_important(
    sharding: CacheSharding, slots: Slots, arrays: CacheArrays, first: Array, importance: Array
) -> CacheArrays:
    """Moves the tokens of largest `importance` `[B, S, K or 1]` to the slots of the tokens from `first` on."""
    axes = sharding.sequence

    def gathered(x: Array) -> Array:
        return lax.all_gather(x, axes, axis=1, tiled=True) if axes else x

    def local(arrays: CacheArrays, first: Array, importance: Array) -> CacheArrays:
        *stored, starts, lengths = arrays
        slot_index = jnp.arange(slots.capacity, dtype=jnp.int32)[None]
        token = slots.held(slot_index, lengths[:, None])
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
    """The slots of the `count` most important tokens of one row, in order of tokens, then the other slots."""
    # by presence, then importance, then age; the inverse permutation is the rank of each slot
    ranked = jnp.lexsort((-token, -importance, ~present))
    rank = jnp.zeros_like(token).at[ranked].set(jnp.arange(len(token), dtype=token.dtype))
    return jnp.lexsort((token, rank >= count)).astype(jnp.int32)
