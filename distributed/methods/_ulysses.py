"""Ulysses: heads exchanged for sequence, and back."""

import functools
from collections.abc import Sequence
from typing import Any, Unpack

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    Candidate,
    KernelOptions,
    Operands,
    Settings,
    attend,
    check_sink,
)
from energy_attn.kernels.masks import AbstractMask

from ..merge._packing import joined, moved, transfer
from ..spec._arguments import (
    Axes,
    AxisName,
    Scores,
    check_axes,
    check_local,
    scores_shape,
    unbatched,
)
from ..spec._plan import check_heads
from ._sink import attend_with_sink


def ulysses_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    source: Float[Array, "*B T N Hv"] | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | AbstractMask | None = None,
    sink: Float[Array, "..."] | None = None,
    axis_name: AxisName,
    **options: Unpack[KernelOptions],
) -> AttentionState:
    r"""Attention over a sequence sharded along mesh axes, head by head, inside `jax.shard_map`.

    An all-to-all gives each of the $p$ devices the whole sequence of $N/p$ query heads and $K/p$
    key heads; after attention, another brings the states back. Per device,
    $\frac{p-1}{p^2}$ of queries, keys, values and outputs cross the links: little, as long as there
    are heads enough.

    Positions are global: with `is_causal`, a window or ragged rows give `key_positions` and
    `query_positions`, as the defaults count from the shard's first.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`, this device's part; `T` is equal on all.
        key: `[B, S, K, H]`, this device's part; the number of devices divides `K`.
        value: `[B, S, K, Hv]`, likewise.
        source: `[B, T, N, Hv]`, likewise.
        bias: for this device's `N/p` heads, all queries and all keys, in the order of the devices;
            broadcastable to `[B, N/p, p T, p S]`.
        mask: boolean, likewise; or a rule of
            [`masks`][energy_attn.kernels.masks.AbstractMask], of global positions.
        sink: $b$, `[N]` or `[B, N]` of all heads: the score of one more outcome, whose value is zero,
            $F = \log(e^{F_{keys}} + e^b)$, merged once, after the fold; None: there is none.
        axis_name: the mesh axis, or several, along which the sequence is sharded.
        **options: as for [`local_attention`][energy_attn.kernels.local_attention].

    Returns:
        The state of this device's queries over all keys.

    Raises:
        TypeError: as `local_attention`.
        ValueError: as `local_attention`; an axis is not bound; positions are compared but not
            given; or the devices do not divide the heads of keys.

    Source: DeepSpeed Ulysses (arXiv 2309.14509).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.distributed import make_mesh, ulysses_attention
        >>> n = jax.device_count()
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2 * n, n, 4))
        >>> sharded = jax.P(None, "device")
        >>> with jax.set_mesh(make_mesh((n,), ("device",))):
        ...     f = jax.shard_map(
        ...         lambda q, k, v: ulysses_attention(q, k, v, axis_name="device").out,
        ...         in_specs=sharded, out_specs=sharded,
        ...     )
        ...     out = f(q, k, v)
        >>> bool(jnp.allclose(out, jax.nn.dot_product_attention(q, k, v), atol=1e-5))
        True
    """
    axes = check_axes(axis_name)
    devices = lax.axis_size(axes)

    def scores(operands: Operands) -> Scores:
        check_heads("key", operands.key.shape[2], devices)
        batch, heads, query_len, key_len = scores_shape(
            operands, query_parts=devices, key_parts=devices
        )
        return batch, heads // devices, query_len, key_len

    arrays = query, key, value, source, bias, mask
    names, call = check_local(arrays, options, queries=True, scores=scores)
    sink = check_sink(sink, query)

    def run(settings: Settings) -> AttentionState:
        return ulysses(names, settings, call.operands, axes)

    state = attend_with_sink(run, call, sink)
    return state if call.batched else unbatched(state)


def ulysses(
    names: Sequence[Candidate], settings: Settings, operands: Operands, axes: Axes
) -> AttentionState:
    """The state of this device's queries; bias and mask are for its heads and all positions.

    Raises as `attend` does.
    """

    def exchange(x: Array) -> Array:
        return lax.all_to_all(x, axes, 2, 1, tiled=True)

    to_heads = functools.partial(moved, exchange)

    def whole(x: Array | None) -> Any:
        return None if x is None else joined(x, axes, 1)

    heads = operands.head_indices
    if settings.score is not None:
        number = operands.query.shape[2]
        heads = jnp.arange(number, dtype=jnp.int32) if heads is None else heads
        mine = number // lax.axis_size(axes)
        heads = lax.dynamic_slice_in_dim(heads, lax.axis_index(axes) * mine, mine)
    here = operands._replace(
        head_indices=heads,
        query=to_heads(operands.query),
        key=to_heads(operands.key),
        value=to_heads(operands.value),
        query_positions=whole(operands.query_positions),
        key_positions=whole(operands.key_positions),
        query_segments=whole(operands.query_segments),
        key_segments=whole(operands.key_segments),
    )
    state = attend(names, settings, here)
    return transfer(lambda x: lax.all_to_all(x, axes, 1, 2, tiled=True), state)
