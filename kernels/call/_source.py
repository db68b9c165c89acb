"""The source as extra width of query and key."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from ._eight_bits import dequantized
from ._operands import Operands, Settings
from ._state import lse_dtype


def with_source(
    settings: Settings, operands: Operands, source: Array | None
) -> tuple[Settings, Operands]:
    r"""A call whose scores are those at a source `[B, T, N, Hv]`, None being zero.

    $$\mathrm{scale}\; q \cdot k + \zeta \cdot v = [\mathrm{scale}\; q, \zeta] \cdot [k, v]$$

    in the dtype of the scores. Eight bits are dequantized.
    """
    if source is None:
        return settings, operands
    operands = dequantized(operands)
    query, key, value = operands.qkv
    dtype, width = lse_dtype(query.dtype, source.dtype), settings.scored_width or query.shape[-1]
    source, value = _as_split(source, query), _as_split(value, key)
    query = jnp.concatenate([query.astype(dtype) * settings.scale, source.astype(dtype)], -1)
    key = jnp.concatenate([key.astype(dtype), value.astype(dtype)], -1)
    settings = settings._replace(scale=1.0)
    if settings.score is not None:
        settings = settings._replace(score=settings.score.within(width))
    return settings, operands._replace(query=query, key=key)


def _as_split(x: Array, like: Array) -> Array:
    """`x` with all axes but the last sharded over explicit mesh axes as those of `like`."""
    sharding: Any = jax.typeof(like).sharding
    parts = sharding.spec[: like.ndim - 1]
    if tuple(jax.typeof(x).sharding.spec[: like.ndim - 1]) == tuple(parts):
        return x
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*parts)))
