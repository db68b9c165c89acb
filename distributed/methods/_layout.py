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

    Under a causal mask the last part of a sequence has the most work. In the order `"zigzag"` device $i$ of
    $p$ holds the $i$-th of $2p$ pieces from the front and the $i$-th from the back. In the order
    `"striped"` it holds every $p$-th token from the $i$-th on. Both give all devices equal work. Bring queries, keys,
    values and other arrays along the sequence into the same order. Attention with
    the same `parallel` knows the positions, and its results are in that order too.

    Args:
        x: any array with a sequence along `axis`.
        parallel: the axes and the layout; the name of a layout means the default axes.
        axis: the axis of the sequence.

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
    # types of explicit axes change by a reshard, automatic axes inside jit by a constraint
    spec = PartitionSpec(*[None] * axis, parallel.axes)
    if is_explicit(jax.sharding.get_abstract_mesh(), parallel.axes):
        return jax.reshard(jnp.asarray(x), spec)
    if isinstance(x, jax.core.Tracer):
        return split_along(x, axis, parallel)
    return jax.device_put(x, spec)


def unshard_sequence(
    x: Shaped[Array, "..."], parallel: SequenceParallel | str, *, axis: int = 1
) -> Shaped[Array, "..."]:
    """Brings an array in the order of a layout back into the order of the sequence.

    Arguments and errors are those of [`shard_sequence`][energy_attn.distributed.shard_sequence]. Returns the array in
    the order of the sequence, with a sharding that JAX chooses.

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
    """The tokens of a sequence that this device of a `jax.shard_map` holds, int32 `[1, size]`."""
    devices, device = lax.axis_size(axes), lax.axis_index(axes)
    place = jnp.arange(size, dtype=jnp.int32)[None]
    if layout == "contiguous":
        return device * size + place
    if layout == "striped":
        return device + place * devices
    if size % 2:  # a shard in the order "zigzag" has two pieces
        raise ValueError(f"layout: wanted parts of even length for 'zigzag', got {size}")
    piece = size // 2
    back = (2 * devices - 1 - device) * piece
    return jnp.where(place < piece, device * piece + place, back + place - piece)


def place_by(
    parallel: SequenceParallel, plan: ShardingPlan | None, arrays: arguments.CheckedArrays
) -> arguments.PlaceFn:
    """A function that adds the positions of a layout to tokens, if positions are read or tokens are absent."""
    # as many queries as keys are in the order of the layout, otherwise in the order of the text
    query_len, key_len = arrays.query.shape[1], arrays.key.shape[1]
    layout, alike = parallel.layout, query_len == key_len
    local = plan if plan is not None and plan.local else None

    def place(tokens: Tokens, reads: bool) -> Tokens:
        have_positions = tokens.query_positions is not None, tokens.key_positions is not None
        reads = reads or any(have_positions) or tokens.query_lengths is not None
        if not reads or all(have_positions) or (layout == "contiguous" and local is None):
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
        # tokens from the length on are absent, at any place of the layout
        if tokens.query_positions is None:
            queries = shortened(queries, tokens.query_lengths)
            tokens = tokens._replace(query_positions=queries, query_lengths=None)
        if tokens.key_positions is None:
            keys = shortened(keys, tokens.key_lengths)
            tokens = tokens._replace(key_positions=keys, key_lengths=None)
        return tokens

    return place
