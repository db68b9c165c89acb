"""Attention over arrays that are split over a mesh, as their types or the user say."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, auto_axes
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    CheckedCall,
    Operands,
    Settings,
    attend,
    with_default_positions,
)

from ..spec._arguments import Axes
from ..spec._plan import Placement, arrive, is_explicit, left_to_compiler, split_of
from ._ring import ring, what_rotates
from ._tree import tree, tree_of_shards
from ._ulysses import ulysses


def spread_attention(place: Placement, names: Sequence[str], call: CheckedCall) -> AttentionState:
    """The state of `call`, split over a mesh as `place` says.

    A length that the devices do not divide is padded with keys, and queries, that are not there.
    The result is split as the queries are. Raises as the kernels do.
    """
    return _spread(place, tuple(names), call.settings, call.operands)


# Compiled here, so that a call outside of jit is traced and compiled once for its shapes.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _spread(
    place: Placement, names: tuple[str, ...], settings: Settings, operands: Operands
) -> AttentionState:
    place = where_rows_are(place, operands)
    if place.sequence:
        operands = with_default_positions(
            operands, settings
        )  # a device's part does not count from 0
    return over_devices(place, functools.partial(_method(place), names, settings), operands)


def where_rows_are(place: Placement, operands: Operands) -> Placement:
    """`place`, or one that splits nothing where nothing is asked: XLA splits no empty program."""
    if place.inside or 0 not in operands.query.shape[:2]:
        return place
    return place._replace(batch=(), sequence=(), heads=(), queries=False)


def over_devices(
    place: Placement, run: Callable[..., Any], operands: Operands, *rows: Array
) -> Any:
    """`run(operands, *rows)` on each device, of its part of the operands and of `rows`.

    `rows`, and the arrays of the tree that `run` returns, are `[B, T, N, ...]` and are split as the
    queries are. Raises as `run` does.
    """
    rest = left_to_compiler(place.mesh, place.axes)
    if rest:

        def within(operands: Operands, *rows: Array) -> Any:
            mesh = jax.sharding.get_abstract_mesh()
            return _over_devices(place._replace(mesh=mesh), run, operands, *rows)

        line = NamedSharding(place.mesh, _line(place, operands.query))
        return auto_axes(within, axes=rest, out_sharding=line)(operands, *rows)
    return _over_devices(place, run, operands, *rows)


def _line(place: Placement, query: Array) -> PartitionSpec:
    """How what is found for `query` is split, as its type says: `[B, T, N, ...]`."""
    if not place.axes:
        return PartitionSpec(*(split_of(query, axis) or None for axis in range(3)))
    kept = place.sequence if place.queries and split_of(query, 1) else ()
    parts = (
        tuple(axis for axis in axes if is_explicit(place.mesh, (axis,)))
        for axes in (place.batch, kept, place.heads)
    )
    return PartitionSpec(*(part or None for part in parts))


def _over_devices(
    place: Placement, run: Callable[..., Any], operands: Operands, *rows: Array
) -> Any:
    if place.inside or not place.axes:
        return run(operands, *rows)
    number, split = operands.query.shape[1], split_of(operands.query, 1)
    if place.sequence:
        operands = _pad_keys(operands, place.devices)
    if place.queries:
        operands = _pad_queries(operands, place.devices)
        rows = tuple(_pad(x, 1, number, -number % place.devices) for x in rows)
    specs = _specs(operands, place)
    sequence = place.sequence if place.queries else None
    line = PartitionSpec(_axes(place.batch), sequence, _axes(place.heads))
    spread = jax.shard_map(
        run,
        mesh=place.mesh,
        in_specs=(specs, *[line] * len(rows)),
        out_specs=line,
        axis_names=set(place.axes),
    )
    lines = (arrive(place.mesh, place.axes, x, line) for x in rows)
    found = spread(_reshard(operands, specs, place), *lines)
    if split or not place.queries:
        return found
    # queries that only this attention split, perhaps after padding
    whole = PartitionSpec(_axes(place.batch), None, _axes(place.heads))
    found = arrive(place.mesh, place.axes, found, whole)
    return jax.tree.map(lambda x: x[:, :number], found)


def _method(place: Placement) -> Callable[..., AttentionState]:
    axes = place.sequence
    if not axes:
        return lambda names, settings, operands: attend(names, settings, operands)
    if place.method == "ring":
        return functools.partial(ring, axes=axes, rotate="auto", sharded=place.queries)
    if place.method == "ulysses":
        return functools.partial(ulysses, axes=axes)
    if place.queries:
        return functools.partial(tree_of_shards, axes=axes, merge=place.merge)
    return functools.partial(tree, axes=axes, merge=place.merge, topology=place.topology)


def _axes(axes: Axes) -> Axes | None:
    return axes or None


def _pad(x: Array | None, axis: int, size: int, missing: int, fill: Any = 0) -> Any:
    if x is None or x.shape[axis] != size:  # absent, or broadcast
        return x
    widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill)


def _pad_keys(operands: Operands, devices: int) -> Operands:
    columns = operands.key.shape[1]
    missing = -columns % devices
    if missing == 0:
        return operands
    queries, keys = operands.query_positions, operands.key_positions
    if queries is None or keys is None:
        queries = jnp.zeros((1, operands.query.shape[1]), jnp.int32)
        keys = jnp.zeros((1, columns), jnp.int32)

    def pad(x: Array | None, axis: int, fill: Any = 0) -> Any:
        return _pad(x, axis, columns, missing, fill)

    return operands._replace(
        key=pad(operands.key, 1),
        value=pad(operands.value, 1),
        bias=pad(operands.bias, 3),
        mask=pad(operands.mask, 3, False),
        query_positions=queries,
        key_positions=pad(keys, 1, -1),
        key_segments=pad(operands.key_segments, 1),
    )


def _pad_queries(operands: Operands, devices: int) -> Operands:
    rows = operands.query.shape[1]
    missing = -rows % devices
    if missing == 0:
        return operands

    def pad(x: Array | None, axis: int, fill: Any = 0) -> Any:
        return _pad(x, axis, rows, missing, fill)

    return operands._replace(
        query=pad(operands.query, 1),
        bias=pad(operands.bias, 2),
        mask=pad(operands.mask, 2, False),
        query_positions=pad(operands.query_positions, 1, -1),
        query_segments=pad(operands.query_segments, 1),
    )


def _specs(operands: Operands, place: Placement) -> Operands:
    """Operands whose leaves are the specs of the arrays in their place."""
    batch, keys, heads = (_axes(axes) for axes in (place.batch, place.sequence, place.heads))
    queries = keys if place.queries else None

    def spec(x: Array | None, *axes: Axes | None) -> Any:
        if x is None:
            return PartitionSpec()
        # an axis of size one is broadcast, not split
        kept = (part if size > 1 else None for size, part in zip(x.shape, axes, strict=True))
        return PartitionSpec(*kept)

    scores = batch, heads, None, keys
    if place.method == "ulysses":
        scores = batch, place.heads + place.sequence, None, None
    elif place.method == "ring":
        if what_rotates("auto", operands, place.queries) == "keys":
            scores = batch, heads, queries, None
    return Operands(
        query=spec(operands.query, batch, queries, heads, None),
        key=spec(operands.key, batch, keys, heads, None),
        value=spec(operands.value, batch, keys, heads, None),
        bias=spec(operands.bias, *scores),
        mask=spec(operands.mask, *scores),
        query_positions=spec(operands.query_positions, batch, queries),
        key_positions=spec(operands.key_positions, batch, keys),
        query_segments=spec(operands.query_segments, batch, queries),
        key_segments=spec(operands.key_segments, batch, keys),
    )


def _reshard(operands: Operands, specs: Operands, place: Placement) -> Operands:
    def put(x: Array | None, spec: Any) -> Any:
        return arrive(place.mesh, place.axes, x, spec)

    return Operands(*map(put, operands, specs))
