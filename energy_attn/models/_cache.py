"""The cache of a Llama decoder, and how it is written where its slots lie."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from ..distributed import SequenceParallel


class LlamaCache(NamedTuple):
    """The keys and values of what was read so far, for each layer.

    Attributes:
        key: after the rotary embedding. The slots may be sharded.
        value: of the same shape.
        positions: int32, the position that each slot holds; -1 where it holds none.
        length: int32, the number of slots written; the next token goes there.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from energy_attn.models import Llama, LlamaConfig
        >>> config = LlamaConfig(256, 32, 64, num_hidden_layers=2, num_attention_heads=4)
        >>> cache = Llama(config, key=jax.random.key(0)).empty_cache(batch=1, slots=16)
        >>> cache.key.shape
        (2, 1, 16, 4, 8)
    """

    key: Float[Array, "layers batch slots kv_heads width"]
    value: Float[Array, "layers batch slots kv_heads width"]
    positions: Int[Array, "batch slots"]
    length: Int[Array, ""]


def slots_at(axis: int, parallel: SequenceParallel) -> P:
    """How an array is laid out whose slots lie along `axis`. Raises nothing."""
    return P(*[None] * axis, parallel.axes)


def append(buffer: Array, new: Array, index: tuple, parallel: SequenceParallel | None) -> Array:
    """Writes `new` into `buffer` from `index` on, which counts leading axes, slots last.

    The slots may be spread over devices: each writes those that lie there. Left to itself, XLA
    gathers the whole buffer as soon as two slots are written. Raises nothing.
    """
    axis = len(index) - 1
    index = tuple(jnp.asarray(i, jnp.int32) for i in index)
    rest = (jnp.zeros((), jnp.int32),) * (buffer.ndim - len(index))
    if parallel is None:
        return lax.dynamic_update_slice(buffer, new, index + rest)

    def write(buffer: Array, new: Array, *index: Array) -> Array:
        have, time = buffer.shape[axis], new.shape[axis]
        start = index[-1] - lax.axis_index(parallel.axes) * have  # counted from the first slot here
        size = min(have, time)
        first = jnp.clip(start, 0, have - size)
        taken = first - start + jnp.arange(size, dtype=jnp.int32)
        mine = jnp.take(new, taken, axis, mode="clip")
        at = (*index[:-1], first, *rest)
        old = lax.dynamic_slice(buffer, at, mine.shape)
        here = jnp.expand_dims((taken >= 0) & (taken < time), range(1, new.ndim - axis))
        here = jnp.broadcast_to(here, mine.shape)
        return lax.dynamic_update_slice(buffer, jnp.where(here, mine, old), at)

    spec = slots_at(axis, parallel)
    return jax.shard_map(
        write,
        in_specs=(spec, P(), *[P()] * len(index)),
        out_specs=spec,
        axis_names=set(parallel.axes),
    )(buffer, new, *index)
