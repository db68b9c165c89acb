"""Attention over arrays that are split over a mesh, as their types or the user say."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels._arguments import Call, Operands, Settings
from energy_attn.kernels._errors import received
from energy_attn.kernels._registry import attend

from ._merge import merge_across
from ._parallel import SequenceParallel

Axes = tuple[str, ...]


class Placement(NamedTuple):
    """Which mesh axes the axes of an attention are split over; static.

    Batch rows and heads do not meet: each device attends for its own. Keys do, in the fold.
    """

    mesh: Any  # jax.sharding.AbstractMesh
    batch: Axes
    sequence: Axes
    heads: Axes

    @property
    def axes(self) -> Axes:
        """All the mesh axes that anything is split over."""
        return self.batch + self.sequence + self.heads


def placement(parallel: Any, query: Array, key: Array) -> Placement | None:
    """How a checked call is split: as `parallel` says, and as the types of the arrays say.

    Only explicit mesh axes are part of a type (`jax.typeof`). None if nothing is split.

    Raises `TypeError` if `parallel` is no `SequenceParallel`, and `ValueError` if no mesh is in
    force, an axis is not in it, or an axis is taken by a surrounding `shard_map`.
    """
    if parallel is not None:
        check_mesh(parallel)
    first = key.ndim - 4  # -1 where there is no batch axis
    sequence = _split(key, first + 1) if parallel is None else parallel.axes
    batch = (_split(query, first) or _split(key, first)) if first == 0 else ()
    heads = _split(key, first + 2)
    batch = tuple(axis for axis in batch if axis not in sequence)
    heads = tuple(axis for axis in heads if axis not in sequence + batch)
    if not batch + sequence + heads:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty and not isinstance(key, jax.core.Tracer):
        raise ValueError(
            f"key: wanted the mesh in force that its type is split over, {jax.typeof(key)}, "
            "got none; use jax.set_mesh(mesh)"
        )
    return Placement(_type(key).mesh if mesh.empty else mesh, batch, sequence, heads)


def _type(x: Any) -> NamedSharding:
    return jax.typeof(x).sharding


def _split(x: Any, axis: int) -> Axes:
    spec = _type(x).spec
    part = spec[axis] if axis < len(spec) else None
    return (part,) if isinstance(part, str) else tuple(part or ())


def check_mesh(parallel: Any) -> int:
    """The number of devices that `parallel` spreads over on the mesh in force.

    Raises as `placement` does.
    """
    if not isinstance(parallel, SequenceParallel):
        raise TypeError(f"parallel: wanted a SequenceParallel or None, got {received(parallel)}")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            f"parallel: wanted a mesh in force with the axes {parallel.axes}, got none; "
            "use jax.set_mesh(mesh)"
        )
    for axis in parallel.axes:
        if axis not in mesh.axis_names:
            raise ValueError(
                f"parallel: wanted axes of the mesh in force, {mesh.axis_names}, got {axis!r}"
            )
        if _kind(mesh, axis) == AxisType.Manual:
            raise ValueError(
                f"parallel: wanted axes that no surrounding jax.shard_map has taken, got {axis!r}; "
                "call energy_attn.distributed.tree_attention inside it"
            )
    return math.prod(mesh.shape[axis] for axis in parallel.axes)


def _kind(mesh: AbstractMesh, axis: str) -> AxisType:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis]


def spread_attention(place: Placement, names: Sequence[str], call: Call) -> AttentionState:
    """The state of `call`, split over a mesh as `place` says.

    A number of keys that the devices do not divide is padded with keys that are not there. Queries
    are equal on all devices that share a sequence, and so is the result. Raises as the kernels do.
    """
    return _spread(place, tuple(names), call.settings, call.operands)


# Compiled here, so that a call outside of jit is traced and compiled once for its shapes.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _spread(
    place: Placement, names: tuple[str, ...], settings: Settings, operands: Operands
) -> AttentionState:
    devices = math.prod(place.mesh.shape[axis] for axis in place.sequence)
    operands = _pad_keys(operands, devices)
    specs = _specs(operands, place)

    def local(operands: Operands) -> AttentionState:
        state = attend(names, settings, operands)
        return merge_across(state, place.sequence) if place.sequence else state

    spread = jax.shard_map(
        local,
        mesh=place.mesh,
        in_specs=(specs,),
        out_specs=PartitionSpec(_axes(place.batch), None, _axes(place.heads)),
        axis_names=set(place.axes),
    )
    return spread(_reshard(operands, specs, place))


def _axes(axes: Axes) -> Axes | None:
    return axes or None


def _pad_keys(operands: Operands, devices: int) -> Operands:
    columns = operands.key.shape[1]
    missing = -columns % devices
    if missing == 0:
        return operands
    query_positions, key_positions = operands.query_positions, operands.key_positions
    if query_positions is None or key_positions is None:
        query_positions = jnp.zeros((1, operands.query.shape[1]), jnp.int32)
        key_positions = jnp.zeros((1, columns), jnp.int32)

    def pad(x: Array | None, axis: int, fill: Any = 0) -> Any:
        if x is None or x.shape[axis] != columns:
            return x
        widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, widths, constant_values=fill)

    return Operands(
        query=operands.query,
        key=pad(operands.key, 1),
        value=pad(operands.value, 1),
        bias=pad(operands.bias, 3),
        mask=pad(operands.mask, 3, False),
        query_positions=query_positions,
        key_positions=pad(key_positions, 1, -1),
    )


def _specs(operands: Operands, place: Placement) -> Operands:
    """Operands whose leaves are the specs of the arrays in their place."""
    batch, sequence, heads = (_axes(axes) for axes in (place.batch, place.sequence, place.heads))

    def spec(x: Array | None, *axes: Axes | None) -> Any:
        if x is None:
            return PartitionSpec()
        # an axis of size one is broadcast, not split
        kept = (part if size > 1 else None for size, part in zip(x.shape, axes, strict=True))
        return PartitionSpec(*kept)

    return Operands(
        query=spec(operands.query, batch, None, heads, None),
        key=spec(operands.key, batch, sequence, heads, None),
        value=spec(operands.value, batch, sequence, heads, None),
        bias=spec(operands.bias, batch, heads, None, sequence),
        mask=spec(operands.mask, batch, heads, None, sequence),
        query_positions=spec(operands.query_positions, batch, None),
        key_positions=spec(operands.key_positions, batch, sequence),
    )


def _reshard(operands: Operands, specs: Operands, place: Placement) -> Operands:
    # arrays with explicit axes must arrive as they are taken
    if not any(_kind(place.mesh, axis) == AxisType.Explicit for axis in place.axes):
        return operands

    def put(x: Array | None, spec: Any) -> Any:
        return None if x is None else jax.reshard(x, NamedSharding(place.mesh, spec))

    return Operands(*map(put, operands, specs))
