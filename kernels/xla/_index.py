"""The index of a block, and entries of arrays of blocks."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def numbers(count: int) -> Array:
    """The numbers of blocks or heads, for a loop. Unsigned: of others JAX writes out what it means to be negative."""
    return jnp.arange(count, dtype=jnp.uint32)


def entry(x: Array, *at: Array) -> Array:
    """`x[at]`, for such numbers."""
    rest = x.shape[len(at) :]
    corner = *at, *(jnp.zeros_like(at[0]) for _ in rest)
    return lax.dynamic_slice(x, corner, (*(1 for _ in at), *rest)).reshape(rest)


class Index(NamedTuple):
    """The indices of a block: key head, block of queries, block of keys."""

    head: Array
    query: Array
    key: Array


def add_at(total: Array, block: Array, *at: Array) -> Array:
    """`total` with `block` added to its entry of these indices."""
    corner = *at, *(jnp.zeros_like(at[0]) for _ in block.shape)
    sizes = (*(1 for _ in at), *block.shape)
    old = lax.dynamic_slice(total, corner, sizes)
    return lax.dynamic_update_slice(total, old + block.reshape(sizes), corner)
