"""Ulysses: heads exchanged for sequence, and back."""

import functools
from collections.abc import Sequence
from typing import Unpack

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    Candidate,
    KernelOptions,
    Operands,
    Settings,
    apply_widened,
    attend,
)
from energy_attn.kernels.masks import AbstractMask

from ..cost._shape import key_copies
from ..merge._packing import moved, transfer
from ..spec._arguments import (
    ONE_WAY,
    Axes,
    AxisName,
    Scores,
    Travel,
    check_axes,
    scores_shape,
)
from ..spec._plan import check_heads
from ._hops import whole
from ._parts import attend_parts
from ._ring import ring


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
    are heads enough. Where the devices do not divide the heads of keys, each of these is sent in as many
    copies as make them $\mathrm{lcm}(K, p)$, which has to divide $N$.

    Positions are global: with `is_causal`, a window or ragged rows give `key_positions` and
    `query_positions`, as the defaults count from the shard's first. They are gathered.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`, this device's part; `T` is equal on all.
        key: `[B, S, K, H]`, this device's part.
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
            given; or the devices cannot share the heads out.

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
        return exchanged_scores(operands, "ulysses", devices)

    arrays = query, key, value, source, bias, mask
    run = functools.partial(ulysses, axes=axes)
    return attend_parts(run, arrays, options, sink, queries=True, scores=scores)


def exchanged_scores(operands: Operands, method: str, exchanged: int, around: int = 1) -> Scores:
    """The shape of a device's bias and mask where so many devices exchange heads and pass keys around.

    Raises as `check_heads`.
    """
    check_heads(operands.query.shape[2], operands.key.shape[2], exchanged, method)
    batch, heads, query_len, key_len = scores_shape(operands, exchanged, exchanged * around)
    return batch, heads // exchanged, query_len, key_len


def ulysses(
    names: Sequence[Candidate],
    settings: Settings,
    operands: Operands,
    axes: Axes,
    around: Axes = (),
    travel: Travel = ONE_WAY,
) -> AttentionState:
    """The state of this device's queries, of which keys go around a ring over the axes `around`.

    Bias and mask are for its heads, the queries of its `axes`, and all keys. Positions and segments
    of keys are those of all devices, those of queries of all on its `axes`; or they are its own.
    `travel` is of the ring.

    Raises as `attend` does.
    """

    def exchange(x: Array) -> Array:
        return lax.all_to_all(x, axes, 2, 1, tiled=True)

    to_heads = functools.partial(moved, exchange)
    query_len, number = operands.query.shape[1:3]
    key_len, kv_heads = operands.key.shape[1:3]
    copies = key_copies(number, kv_heads, lax.axis_size(axes)) or 1  # None is refused before

    def keys_to_heads(x: Array) -> Array:
        # the derivative of copies is a sum
        return to_heads(x if copies == 1 else apply_widened(lambda x: jnp.repeat(x, copies, 2), x))

    heads = operands.head_indices
    if settings.score is not None:
        heads = jnp.arange(number, dtype=jnp.int32) if heads is None else heads
        mine = number // lax.axis_size(axes)
        heads = lax.dynamic_slice_in_dim(heads, lax.axis_index(axes) * mine, mine)
    here = operands._replace(
        head_indices=heads,
        query=to_heads(operands.query),
        key=keys_to_heads(operands.key),
        value=keys_to_heads(operands.value),
        query_positions=whole(operands.query_positions, query_len, axes),
        key_positions=whole(operands.key_positions, key_len, around + axes),
        query_segments=whole(operands.query_segments, query_len, axes),
        key_segments=whole(operands.key_segments, key_len, around + axes),
    )
    if around:
        state = ring(tuple(names), settings, here, around, "keys", sharded=True, travel=travel)
    else:
        state = attend(names, settings, here)
    return transfer(lambda x: lax.all_to_all(x, axes, 1, 2, tiled=True), state)
