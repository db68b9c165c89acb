"""The gradients of an attention, one key head at a time: a step of the backward of a ring of keys."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..call._operands import Operands, Settings, differentiated, is_static
from ._as_written import as_written
from ._blockwise import (
    NOTHING_IN_FLIGHT,
    InFlight,
    RowCotangents,
    after_products,
    backward_unrounded,
)

# Heads are computed one by one if queries in the dtype of the scores take more bytes than this: blocks of rows
# and keys and their gradients take several times as much.
LEAST = 16 << 20


def backward_by_head(
    d_query: Array | None,
    operands: Operands,
    settings: Settings,
    rows: RowCotangents,
    in_flight: InFlight = NOTHING_IN_FLIGHT,
) -> tuple[Operands, InFlight]:
    """`backward_unrounded`, with `d_query` (None: zero) added to the cotangent of the queries.

    Large calls are computed one key head at a time.
    """
    heads, kv_heads = operands.query.shape[2], operands.key.shape[2]
    query = operands.query
    large = is_static(*query.shape) and query.size * rows.lse.dtype.itemsize > LEAST
    if kv_heads == 1 or not large:
        cotangents, in_flight = backward_unrounded(operands, settings, rows, in_flight)
        query = cotangents.query if d_query is None else cotangents.query + d_query
        return cotangents._replace(query=query), in_flight
    indices = operands.indices
    if settings.score is not None and indices.heads is None:
        indices = indices._replace(heads=jnp.arange(heads, dtype=jnp.int32))
        operands = operands._replace(indices=indices)

    def add(head: Array, sums: Operands) -> Operands:
        head_rows = RowCotangents(*(_cut(x, 2, head, kv_heads) for x in rows))
        added, _ = backward_unrounded(_of_head(operands, head), settings, head_rows)
        return sums._replace(
            query=_added(sums.query, added.query, 2, head),
            key=_added(sums.key, added.key, 2, head),
            value=_added(sums.value, added.value, 2, head),
            bias=_added(sums.bias, added.bias, 1, head),
            score_arrays=jax.tree.map(jnp.add, sums.score_arrays, added.score_arrays),
        )

    sums = jax.tree.map(
        lambda x: lax.full_like(x, 0.0, dtype=rows.lse.dtype), differentiated(operands)
    )
    if d_query is not None:
        sums = sums._replace(query=d_query)
    cotangents = lax.fori_loop(0, kv_heads, add, sums)
    (query, key, value), in_flight = after_products(cotangents.qkv, in_flight)
    return cotangents._replace(query=query, key=key, value=value), in_flight


def _of_head(operands: Operands, head: Array) -> Operands:
    count, indices = operands.key.shape[2], operands.indices
    return operands._replace(
        query=_cut(operands.query, 2, head, count),
        key=_cut(operands.key, 2, head, count),
        value=_cut(operands.value, 2, head, count),
        bias=_cut(operands.bias, 1, head, count),
        mask=_cut(operands.mask, 1, head, count),
        indices=indices._replace(heads=_cut(indices.heads, 0, head, count)),
    )


def _cut(x: Any, axis: int, number: Array, count: int) -> Any:
    """One of `count` parts of an array along an axis; all of it where it broadcasts."""
    if x is None or x.shape[axis] == 1:
        return x
    size = x.shape[axis] // count
    part = lax.dynamic_slice_in_dim(x, number * size, size, axis)
    return as_written(part) if x.ndim == 4 else part


def _added(sums: Any, part: Any, axis: int, number: Array) -> Any:
    """Adds the `number`-th part along an axis, or the whole array if it has no such axis."""
    if sums is None or sums.shape == part.shape:
        return sums if sums is None else sums + part
    size = part.shape[axis]
    old = lax.dynamic_slice_in_dim(sums, number * size, size, axis)
    return lax.dynamic_update_slice_in_dim(sums, old + part, number * size, axis)
