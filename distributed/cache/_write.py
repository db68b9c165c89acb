"""Writes tokens into the slots of a cache: each device writes its own, without communication."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from energy_attn.kernels.internal import (
    AbstractLinearMap,
    linear_call,
    unless_exported,
    vary_together,
)

from ..merge._abstract import Axes
from ..methods._parallel import SequenceParallel
from ..methods._plan import check_mesh, is_explicit, mesh_axes_of, reshard_explicit
from ._slots import Slots

_ERRORS = (
    "lengths: wanted from 0 to as many new tokens as key has",
    "append: a row of the cache has no room for its new tokens; evict old ones first, or make a "
    "cache of more capacity or with a window",
)


class Stored(NamedTuple):
    """The stored arrays of a cache, `[B, S, K, ...]` each; scales only with int8."""

    key: Any
    value: Any
    key_scale: Any
    value_scale: Any


class CacheSharding(NamedTuple):
    """The mesh axes over which the rows, slots and heads of a cache are sharded; static."""

    mesh: Any  # jax.sharding.AbstractMesh
    batch: Axes
    sequence: Axes
    heads: Axes

    @property
    def axes(self) -> set[str]:
        return {*self.batch, *self.sequence, *self.heads}

    @property
    def slots(self) -> PartitionSpec:
        """The spec of arrays `[B, S, K, ...]`."""
        return PartitionSpec(self.batch or None, self.sequence or None, self.heads or None)

    @property
    def new(self) -> PartitionSpec:
        """The spec of new tokens `[B, T, K, ...]`, equal on all devices that share a row."""
        return PartitionSpec(self.batch or None, None, self.heads or None)

    @property
    def rows(self) -> PartitionSpec:
        """The spec of arrays `[B]`."""
        return PartitionSpec(self.batch or None)

    def map(
        self, function: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: Any, *args: Any
    ) -> Any:
        """`function(*args)` on each device, for its parts of trees of arrays, by specs of these or of their leaves."""
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self.axes,
        )
        return mapped(*self.put(args, in_specs))

    def put(self, tree: Any, specs: Any) -> Any:
        """Trees of arrays as `map` takes them."""

        def put(spec: PartitionSpec, tree: Any) -> Any:
            return reshard_explicit(self.mesh, self.axes, tree, spec)

        return jax.tree.map(put, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


def spec_of(parallel: SequenceParallel | None, rank: int) -> PartitionSpec | None:
    """The spec of an array of a new cache on the mesh in force, over its rows, slots and heads.

    It is written as JAX writes that of the arrays that `append` returns, so that a step compiles
    once: with every axis named where the mesh's are explicit. None without `parallel`.
    """
    if parallel is None:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    spec = [parallel.batch or None, parallel.axes, parallel.heads or None][:rank]
    if is_explicit(mesh, parallel.axes):
        spec += [None] * (rank - len(spec))
    else:
        while spec and spec[-1] is None:
            spec.pop()
    return PartitionSpec(*spec)


def sharding_of(parallel: SequenceParallel | None, rank: int) -> NamedSharding | None:
    """`spec_of` with the devices of the mesh, outside of `jax.jit`."""
    spec = spec_of(parallel, rank)
    return None if spec is None else NamedSharding(jax.sharding.get_mesh(), spec)


def blank(
    key: tuple[int, ...],
    value: tuple[int, ...],
    dtype: DTypeLike,
    parallel: SequenceParallel | None,
) -> tuple[Stored, Array, Array]:
    """Empty slots of these shapes and of a dtype, with scales where that is int8.

    Each device makes its own.
    """

    def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        spec = spec_of(parallel, len(shape))
        array = _zeros(shape, jnp.dtype(dtype), spec)()
        if parallel is None or spec is None:
            return array
        # inside of another jit, out_shardings do not set the types of explicit axes
        return reshard_explicit(jax.sharding.get_abstract_mesh(), parallel.axes, array, spec)

    def scale(shape: tuple[int, ...]) -> Array | None:
        return zeros(shape[:-1], jnp.float32) if dtype == jnp.int8 else None

    stored = Stored(zeros(key, dtype), zeros(value, dtype), scale(key), scale(value))
    return stored, zeros(key[:1], jnp.int32), zeros(key[:1], jnp.int32)


@functools.lru_cache
def _zeros(
    shape: tuple[int, ...], dtype: jnp.dtype, spec: PartitionSpec | None
) -> Callable[[], Array]:
    # Cached, so that caches of one kind compile once.
    return jax.jit(functools.partial(jnp.zeros, shape, dtype), out_shardings=spec)


def cache_sharding(
    parallel: SequenceParallel | None, key: Array, devices: int
) -> CacheSharding | None:
    """The sharding of a cache that was made for `devices` devices; None: on one device.

    Rows and heads may be sharded, too, over the axes that `parallel` or the types name. Raises
    `ValueError` if no mesh is in force, or one that has another number of devices along the cache's
    axes.
    """
    mesh_devices = 1 if parallel is None else check_mesh(parallel)
    key_mesh = jax.typeof(key).sharding.mesh
    batch, sequence, heads = (mesh_axes_of(key, axis) for axis in range(3))
    if parallel is not None:
        batch, heads = parallel.batch or batch, parallel.heads or heads
        sequence = parallel.axes
    else:
        mesh_devices = math.prod(key_mesh.shape[axis] for axis in sequence)
    if mesh_devices != devices:
        raise ValueError(
            f"parallel: wanted a mesh in force with the {devices} devices along the sequence that "
            f"the cache was made for, got one with {mesh_devices}; save and load move a cache to another"
        )
    if not batch + sequence + heads:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    return CacheSharding(key_mesh if mesh.empty else mesh, batch, sequence, heads)


# Jitted so that a call outside of `jax.jit` runs as one program.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def append(
    sharding: CacheSharding | None,
    slots: Slots,
    is_ring: bool,
    stored: Stored,
    new: Stored,
    starts: Array,
    lengths: Array,
    counts: Array,
) -> tuple[Stored, Array, Array]:
    """Writes the first `counts` of the new tokens of each row; returns the arrays that changed.

    A ring buffer drops the tokens that it overwrites; otherwise `counts` come from `fitting`. A row whose count is
    -1 gets one token of NaN, in place of its newest one if it is full: whatever is asked of it from then on is NaN.
    """
    tokens = new.key.shape[1]

    def local(
        stored: Stored, new: Stored, starts: Array, lengths: Array, counts: Array
    ) -> tuple[Stored, Array, Array]:
        device = (
            lax.axis_index(sharding.sequence) if sharding and sharding.sequence else jnp.int32(0)
        )
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
        return Stored(*map(put, stored, new)), starts, new_lengths

    if sharding is None:
        return local(stored, new, starts, lengths, counts)
    rows = sharding.rows
    in_specs = sharding.slots, sharding.new, rows, rows, rows
    out_specs = sharding.slots, rows, rows
    return sharding.map(local, in_specs, out_specs, stored, new, starts, lengths, counts)


def fitting(
    sharding: CacheSharding | None,
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
    sharding: CacheSharding | None,
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

        given = counts, valid, fits
        if raises:
            counts = _raising(*given)
        else:
            raising = functools.partial(unless_exported, _raising)
            counts = lax.platform_dependent(*given, cpu=raising, default=lambda x, *_: x)
        return jnp.where(fits, counts, -1)

    if sharding is None:
        return local(starts, lengths, counts)
    # Each device checks for itself, without communication. A callback that raises needs all axes to be manual.
    kinds = zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
    check = jax.shard_map(
        local,
        mesh=sharding.mesh,
        in_specs=sharding.rows,
        out_specs=sharding.rows,
        axis_names={axis for axis, kind in kinds if kind != AxisType.Manual},
        check_vma=False,  # the branch that raises returns counts of an invariant type
    )
    return check(*sharding.put((starts, lengths, counts), (sharding.rows,) * 3))


def _raising(counts: Array, valid: Array, fits: Array) -> Array:
    message = jnp.where(valid.all(), 1, 0)
    return eqx.branched_error_if(counts, ~fits, message, _ERRORS)


def positions_from(first: Array, counts: Array, tokens: int) -> Array:
    """Positions `[B, tokens]` from `first` `[B]` on; -1 after the row's `counts`."""
    offset = jnp.arange(tokens, dtype=jnp.int32)[None]
    return jnp.where(offset < counts[:, None], first[:, None] + offset, -1)


def write_at(buffer: Array, new: Array, slot: Array) -> Array:
    """`buffer` `[B, S, ...]` with `new` `[B, L, ...]` at `slot` `[B, L]`; dropped where that is ≥ S."""
    return lax.platform_dependent(buffer, new, slot, cpu=_in_branch, default=_scatter)


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


def _in_branch(buffer: Array, new: Array, slot: Array) -> Array:
    return linear_call(_InBranch(buffer.shape[1]), slot, (buffer, new))


# A write is linear in the buffer and in the new entries; its derivatives bypass the branch and the bits.
@dataclasses.dataclass(frozen=True)
class _InBranch(AbstractLinearMap):
    """The buffer with new entries, from slots and the two arrays."""

    slots: int

    def apply(self, fixed: Array, moving: tuple[Array | None, Array | None]) -> Array:
        """Writes in a branch, so that XLA:CPU does not fuse the write with a read, which would copy the buffer."""
        buffer, new, fixed = vary_together((*self._both(fixed, moving), fixed))
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
        """Reads the cotangent of the new entries at their slots; that of the buffer is zero there."""
        buffer, new = moving

        def row(cotangent: Array, slot: Array) -> Array:
            return cotangent.at[slot].get(mode="fill", fill_value=0, unique_indices=True)

        return (
            None if buffer is None else linear_call(self, fixed, (cotangent, None)),
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
def positions(sharding: CacheSharding | None, slots: Slots, starts: Array, lengths: Array) -> Array:
    """The token in each slot, `[B, S]`; -1 in empty ones."""

    def local(starts: Array, lengths: Array) -> Array:
        device = (
            lax.axis_index(sharding.sequence) if sharding and sharding.sequence else jnp.int32(0)
        )
        slot = device * slots.per_device + jnp.arange(slots.per_device, dtype=jnp.int32)
        token = slots.held(slot[None], lengths[:, None])
        return jnp.where(token >= starts[:, None], token, -1)

    if sharding is None:
        return local(starts, lengths)
    out_spec = PartitionSpec(sharding.batch or None, sharding.sequence or None)
    return sharding.map(local, (sharding.rows,) * 2, out_spec, starts, lengths)
