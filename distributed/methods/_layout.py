"""Layouts: the order of a sequence over the devices that share it."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

from energy_attn.kernels.internal import Tokens, arguments, checks, shortened

from ._parallel import SequenceParallel, ShardingPlan, is_explicit, sequence_order, split_along


def shard_sequence(
    x: Shaped[Array, "..."], parallel: SequenceParallel | str, *, axis: int = 1
) -> Shaped[Array, "..."]:
    """Brings an array into the order of a layout, sharded along its sequence.

    Under a causal mask the last part of a sequence has the most work. With `"zigzag"` device $i$ of
    $p$ holds the $i$-th of $2p$ pieces from the front and the $i$-th from the back, with
    `"striped"` every $p$-th token from the $i$-th on, and all have equal work. Queries, keys,
    values and other arrays along the sequence are brought into the same order; attention with
    the same `parallel` knows the positions, and its results are in that order too.

    Args:
        x: any array with a sequence along `axis`.
        parallel: whose axes and layout are meant; a layout's name alone means the default axes.
        axis: the sequence's.

    Returns:
        The array in the layout's order, sharded along `axis` over the mesh in force.

    Raises:
        TypeError: `x` is no array, or `parallel` no `SequenceParallel`.
        ValueError: no mesh is in force or it lacks the axes; or the length is no multiple of the
            number of devices (of twice that number for `"zigzag"`). Attention itself takes
            contiguous sequences of any length.

    Source: Striped Attention (arXiv 2311.09431); zigzag, the balanced order of Llama 3's context
    parallelism (arXiv 2407.21783, section 3.3.2).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.distributed import SequenceParallel, make_mesh
        >>> from energy_attn.distributed import shard_sequence, unshard_sequence
        >>> x = jnp.arange(4 * jax.device_count())
        >>> zigzag = SequenceParallel("device", layout="zigzag")
        >>> with jax.set_mesh(make_mesh((jax.device_count(),), ("device",))):
        ...     back = unshard_sequence(shard_sequence(x, zigzag, axis=0), zigzag, axis=0)
        >>> bool((back == x).all())
        True
    """
    x, axis, parallel, order = _in_order(x, axis, parallel)
    x = x if parallel.layout == "contiguous" else jnp.take(x, order, axis, mode="clip")
    spec = PartitionSpec(*[None] * axis, parallel.axes)
    if is_explicit(jax.sharding.get_abstract_mesh(), parallel.axes):
        return jax.reshard(jnp.asarray(x), spec)
    if isinstance(x, jax.core.Tracer):
        return split_along(x, axis, parallel)
    return jax.device_put(x, spec)


def unshard_sequence(
    x: Shaped[Array, "..."], parallel: SequenceParallel | str, *, axis: int = 1
) -> Shaped[Array, "..."]:
    """The inverse of [`shard_sequence`][energy_attn.distributed.shard_sequence]'s order.

    Args:
        x: an array in the order of a layout.
        parallel: as it was sharded.
        axis: the sequence's.

    Returns:
        The array in the order of the sequence; its sharding is left to JAX.

    Raises:
        TypeError: as `shard_sequence`.
        ValueError: as `shard_sequence`.

    Source: see `shard_sequence`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.distributed import SequenceParallel, make_mesh, unshard_sequence
        >>> striped = SequenceParallel("device", layout="striped")
        >>> with jax.set_mesh(make_mesh((1,), ("device",), devices=jax.devices()[:1])):
        ...     unshard_sequence(jnp.arange(3), striped, axis=0).tolist()
        [0, 1, 2]
    """
    x, axis, parallel, order = _in_order(x, axis, parallel)
    if parallel.layout == "contiguous":
        return jnp.asarray(x)
    return jnp.take(x, np.argsort(order).astype(np.int32), axis, mode="clip")


def _in_order(
    x: Array, axis: int, parallel: Any
) -> tuple[Array, int, SequenceParallel, np.ndarray]:
    if isinstance(parallel, str):
        layout: Any = parallel
        parallel = SequenceParallel(layout=layout)
    x = checks.check_array("x", x)
    axis = checks.check_axis("axis", axis, x.ndim, "x")
    return x, axis, parallel, sequence_order(x.shape[axis], parallel, f"x.shape[{axis}]")


def local_positions(layout: str, size: int, axes: tuple[str, ...]) -> Array:
    """The tokens of a sequence that this device of a `jax.shard_map` holds, int32 `[1, size]`.

    Raises `ValueError` for parts of odd length in the order `"zigzag"`, which have two pieces.
    """
    devices, here = lax.axis_size(axes), lax.axis_index(axes)
    place = jnp.arange(size, dtype=jnp.int32)[None]
    if layout == "contiguous":
        return here * size + place
    if layout == "striped":
        return here + place * devices
    if size % 2:
        raise ValueError(f"layout: wanted parts of even length for 'zigzag', got {size}")
    piece = size // 2
    back = (2 * devices - 1 - here) * piece
    return jnp.where(place < piece, here * piece + place, back + place - piece)


def place_by(
    parallel: SequenceParallel, plan: ShardingPlan | None, arrays: arguments.CheckedArrays
) -> arguments.PlaceFn:
    """A function that adds to tokens the positions that the layout implies, if they are read or tokens are absent.

    Queries are in its order if there are as many as keys, else in their own. Given positions stay. It raises as
    `sequence_order`; inside `jax.shard_map`, where arrays are one device's part, as `local_positions`.
    """
    query_len, key_len = arrays.query.shape[1], arrays.key.shape[1]
    layout, alike = parallel.layout, query_len == key_len
    local = plan if plan is not None and plan.local else None

    def place(tokens: Tokens, reads: bool) -> Tokens:
        given = tokens.query_positions is not None, tokens.key_positions is not None
        reads = reads or any(given) or tokens.query_lengths is not None
        if not reads or all(given) or (layout == "contiguous" and local is None):
            return tokens
        if local is not None:
            keys = local_positions(layout, key_len, parallel.axes)
            queries = jnp.arange(query_len, dtype=jnp.int32)[None]
            if local.queries:
                order = layout if alike else "contiguous"
                queries = local_positions(order, query_len, parallel.axes)
        else:
            order = sequence_order(key_len, parallel, "key.shape[1]")
            queries = order if alike else np.arange(query_len, dtype=np.int32)
            keys, queries = jnp.asarray(order[None]), jnp.asarray(queries[None])
        # tokens below the length, wherever they are
        if tokens.query_positions is None:
            queries = shortened(queries, tokens.query_lengths)
            tokens = tokens._replace(query_positions=queries, query_lengths=None)
        if tokens.key_positions is None:
            keys = shortened(keys, tokens.key_lengths)
            tokens = tokens._replace(key_positions=keys, key_lengths=None)
        return tokens

    return place
