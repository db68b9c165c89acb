"""The index of a block."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array


def numbers(count: int) -> Array:
    """The numbers of blocks or heads, for a loop. Unsigned: of others JAX writes out what it means to be negative."""
    return jnp.arange(count, dtype=jnp.uint32)


class Index(NamedTuple):
    """The indices of a block: key head, block of queries, block of keys."""

    head: Array
    query: Array
    key: Array
