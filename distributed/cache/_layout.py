"""The layout of a cache: the slot of each token, and the devices that hold the slots."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from ..merge._abstract import Axes
from ..methods._parallel import (
    SequenceParallel,
    check_mesh,
    check_share,
    device_count,
    is_explicit,
    mesh_axes_of,
    reshard_explicit,
)

Index = TypeVar("Index", Array, np.ndarray)


class Slots(NamedTuple):
    """A layout of tokens over the slots of several devices; static."""

    # With blocks of b tokens and p devices, token n is in block g = ⌊n / b⌋, on device g mod p. The u-th token of a
    # device is in its slot u mod c, with c slots on each device: a token takes the slot of token n - capacity.
    capacity: int  # slots of all devices
    block: int  # b, which divides the slots of a device
    devices: int  # p

    @property
    def per_device(self) -> int:
        return self.capacity // self.devices

    @property
    def stripe(self) -> int:
        """The tokens of one block on every device."""
        return self.block * self.devices

    def most(self, tokens: int) -> int:
        """The largest number of tokens on one device among `tokens` consecutive ones."""
        return tokens // self.stripe * self.block + min(tokens % self.stripe, self.block)

    def below(self, device: Index, token: Index) -> Index:
        """The number of tokens before `token` on a device."""
        # whole blocks of the stripes before, and the part of its block in the last stripe
        in_stripe = token % self.stripe - device * self.block
        return token // self.stripe * self.block + in_stripe.clip(0, self.block)

    def token(self, device: Index, count: Index) -> Index:
        """The `count`-th token of a device, from 0."""
        return count // self.block * self.stripe + device * self.block + count % self.block

    def slot(self, token: Index) -> Index:
        """The index of a token among the slots of all devices."""
        within = token % self.capacity
        device = within // self.block % self.devices
        return device * self.per_device + within // self.stripe * self.block + within % self.block

    def held(self, slot: Index, length: Index) -> Index:
        """The newest token below `length` for a slot of all devices; negative if there is none."""
        # a slot holds the tokens first, first + capacity, ...; whether this lap has reached it
        first = self.token(slot // self.per_device, slot % self.per_device)
        not_yet = first >= length % self.capacity
        laps = length // self.capacity - not_yet.astype(length.dtype)
        return first + self.capacity * laps


def slots_for(
    capacity: int, block: int, parallel: SequenceParallel | None, rows: int, kv_heads: int
) -> Slots:
    """Room for `capacity` tokens in whole blocks. Raises as `check_mesh` and `check_share` do."""
    devices = 1
    if parallel is not None:
        devices = check_mesh(parallel)
        mesh = jax.sharding.get_abstract_mesh()
        check_share("batch", "rows", rows, device_count(mesh, parallel.batch))
        check_share("kv_heads", "heads", kv_heads, device_count(mesh, parallel.heads))
    stripe = block * devices
    return Slots(-(-capacity // stripe) * stripe, block, devices)


class CacheArrays(NamedTuple):
    """The arrays of a cache, `[B, S, K, ...]` and `[B]`, or their specs; scales only with int8."""

    key: Any
    value: Any
    key_scale: Any
    value_scale: Any
    starts: Any
    lengths: Any


class CacheSharding(NamedTuple):
    """The mesh axes over which the rows, slots and heads of a cache are sharded; static."""

    mesh: Any = None  # jax.sharding.AbstractMesh
    batch: Axes = ()
    sequence: Axes = ()
    heads: Axes = ()

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

    @property
    def arrays(self) -> CacheArrays:
        return CacheArrays(*[self.slots] * 4, starts=self.rows, lengths=self.rows)

    def own(self, slots: Slots) -> tuple[Array, Array]:
        """Inside `map`, the index of this device along the sequence, and the indices of its slots, `[1, S]`."""
        device = lax.axis_index(self.sequence) if self.sequence else jnp.int32(0)
        slot = device * slots.per_device + jnp.arange(slots.per_device, dtype=jnp.int32)
        return device, slot[None]

    def map(
        self,
        function: Callable[..., Any],
        in_specs: tuple[Any, ...],
        out_specs: Any,
        *args: Any,
        over_all: bool = False,
    ) -> Any:
        """`function(*args)` on the shards of each device."""
        if not self.axes:
            return function(*args)
        # a function that raises at run time is mapped over all axes of the mesh, one error check on each device
        axes = self.axes
        if over_all:
            kinds = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
            axes = {axis for axis, kind in kinds if kind != AxisType.Manual}
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axes,
            check_vma=not over_all,  # the branch that raises returns results of an invariant type
        )
        return mapped(*self.put(args, in_specs))

    def put(self, tree: Any, specs: Any) -> Any:
        if not self.axes:
            return tree

        def put(spec: PartitionSpec, tree: Any) -> Any:
            return reshard_explicit(self.mesh, self.axes, tree, spec)

        return jax.tree.map(put, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


def spec_of(parallel: SequenceParallel | None, rank: int) -> PartitionSpec | None:
    """The spec of an array of a new cache on the mesh in force; None without `parallel`."""
    if parallel is None:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    # Equal to the specs of the arrays that `append` returns, so that a step compiles once. JAX pads specs over
    # explicit mesh axes with None, and drops trailing None otherwise.
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


def cache_sharding(parallel: SequenceParallel | None, key: Array, devices: int) -> CacheSharding:
    """The sharding of a cache; raises `ValueError` unless the mesh in force has `devices` along the sequence."""
    # inside jit without a mesh in force, explicit axes are still in the types of the arrays
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
        return CacheSharding()
    mesh = jax.sharding.get_abstract_mesh()
    return CacheSharding(key_mesh if mesh.empty else mesh, batch, sequence, heads)
