"""A loop of which XLA does not know the length, so that its body is one program however often it runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def each(f: Callable[[Array], Any], count: int, like: Array) -> Any:
    """`f(n)` for each `n` below `count`, stacked: XLA unrolls a loop of a few turns that it can count, and fuses them.

    The results vary over the mesh axes of `jax.shard_map` that `like` varies over.
    """
    struct = jax.eval_shape(f, jnp.int32(0))
    begin = jax.tree.map(lambda x: lax.full_like(like, 0, x.dtype, (count, *x.shape)), struct)

    def add(n: Array, found: Any) -> Any:
        return jax.tree.map(lambda xs, x: lax.dynamic_update_index_in_dim(xs, x, n, 0), found, f(n))

    return lax.fori_loop(jnp.int32(0), lax.optimization_barrier(jnp.int32(count)), add, begin)
