"""Ring attention: keys, or queries with their states, pass every device once."""

import math
from typing import Any, Unpack

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from energy_attn.kernels import AttentionState, merge
from energy_attn.kernels.internal import (
    Candidate,
    KernelOptions,
    Operands,
    Settings,
    attend,
    check_choice,
    check_flag,
    check_sink,
    empty_like,
    lse_dtype,
    vary_together,
    with_wide_out,
)
from energy_attn.kernels.masks import AbstractMask

from ..merge._packing import transfer
from ..spec._arguments import (
    Axes,
    AxisName,
    Scores,
    check_axes,
    check_local,
    rounded,
    scores_shape,
    unbatched,
)
from ._hops import hop, origin, part
from ._merge import fold_across
from ._ring_keys import keys_around
from ._sink import attend_with_sink

ROTATED = ("keys", "queries", "auto")
Names = tuple[Candidate, ...]


def ring_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    source: Float[Array, "*B T N Hv"] | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | AbstractMask | None = None,
    sink: Float[Array, "..."] | None = None,
    axis_name: AxisName,
    rotate: str = "auto",
    queries_sharded: bool = True,
    **options: Unpack[KernelOptions],
) -> AttentionState:
    r"""Attention over keys sharded along mesh axes, passed around a ring, inside `jax.shard_map`.

    $$\mathrm{state} = \mathrm{state}_{i} \oplus \mathrm{state}_{i-1} \oplus \dots
      \oplus \mathrm{state}_{i-p+1}$$

    with $\oplus$ the [`merge`][energy_attn.kernels.merge] of states and the shards of keys numbered
    by device, counted modulo $p$. `rotate="keys"`: each device keeps its queries and passes the
    keys and values that it holds to the next one, $p - 1$ times. No transfer needs the result of
    the computation in the same step; compiled for TPU v6e, the transfers of a step are scheduled
    around its computation. The derivative goes around once more: in forward mode with the directions
    of keys and values, in reverse mode with gradients that travel with their keys in `lse`'s dtype.
    Memory is $O(T + S)$ per device in all, and in second derivatives by forward over reverse, which
    send twice what the gradient does; reverse over either mode keeps the keys of all devices on
    each, $O(T + p S)$. `rotate="queries"`: keys
    stay, and queries go around with their states and come home, $p$ times; or, where all devices
    have the same queries, only the states, $p - 1$ times. That is little where queries are few.

    Positions are global: with `is_causal`, a window or ragged rows give `key_positions` and
    `query_positions`, as the defaults count from the shard's first.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`, this device's, or equal on all devices.
        key: `[B, S, K, H]`, this device's shard.
        value: `[B, S, K, Hv]`, this device's shard.
        source: `[B, T, N, Hv]`, as `query`.
        bias: broadcastable to `[B, N, T, p S]`, for this device's queries and all keys in the
            order of the devices; if queries rotate, to `[B, N, p T, S]`, for all queries and this
            device's keys.
        mask: boolean, likewise; or a rule of
            [`masks`][energy_attn.kernels.masks.AbstractMask], of global positions.
        sink: $b$, `[N]` or `[B, N]`: the score of one more outcome, whose value is zero,
            $F = \log(e^{F_{keys}} + e^b)$, merged once, after the fold; None: there is none.
        axis_name: the mesh axis, or several, slow ones first: the ring goes through all of them.
        rotate: `"keys"`, `"queries"`, or `"auto"`: whichever is fewer bytes where queries are
            sharded, else queries, so that all devices find the same to the last bit.
        queries_sharded: whether `query` and what belongs to it are this device's part.
        **options: as for [`local_attention`][energy_attn.kernels.local_attention].

    Returns:
        The state of this device's queries over all keys.

    Raises:
        TypeError: as `local_attention`.
        ValueError: as `local_attention`; an axis is not bound; positions are compared but not
            given; or `rotate` is none of these.

    Source: Ring Attention (arXiv 2310.01889); for queries that rotate, Context Parallelism for
    Scalable Million-Token Inference (arXiv 2411.01783).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.distributed import make_mesh, ring_attention
        >>> n = jax.device_count()
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2 * n, 2, 4))
        >>> sharded = jax.P(None, "device")
        >>> with jax.set_mesh(make_mesh((n,), ("device",))):
        ...     f = jax.shard_map(
        ...         lambda q, k, v: ring_attention(q, k, v, axis_name="device").out,
        ...         in_specs=sharded, out_specs=sharded,
        ...     )
        ...     out = f(q, k, v)
        >>> bool(jnp.allclose(out, jax.nn.dot_product_attention(q, k, v), atol=1e-5))
        True
    """
    axes = check_axes(axis_name)
    check_choice("rotate", rotate, ROTATED)
    sharded = check_flag("queries_sharded", queries_sharded)

    def scores(operands: Operands) -> Scores:
        if what_rotates(rotate, operands, sharded) == "keys":
            return scores_shape(operands, key_parts=lax.axis_size(axes))
        return scores_shape(operands, query_parts=lax.axis_size(axes) if sharded else 1)

    arrays = query, key, value, source, bias, mask
    names, call = check_local(arrays, options, queries=sharded, scores=scores)
    sink = check_sink(sink, query)

    def run(settings: Settings) -> AttentionState:
        return ring(names, settings, call.operands, axes, rotate, sharded)

    state = attend_with_sink(run, call, sink)
    return state if call.batched else unbatched(state)


def what_rotates(rotate: str, operands: Operands, sharded: bool) -> str:
    """What goes around the ring, `"keys"` or `"queries"`.

    `operands` are one device's, or, where queries are sharded, those of all together.
    """
    if rotate != "auto":
        return rotate
    if not sharded:  # around with the keys, each device would fold them in another order
        return "queries"
    query, key, value = operands[:3]
    state = (value.shape[-1] + 1) * lse_dtype(value.dtype).itemsize
    queries = query.nbytes + math.prod(query.shape[:-1]) * state
    return "keys" if key.nbytes + value.nbytes <= queries else "queries"


def ring(
    names: Names,
    settings: Settings,
    operands: Operands,
    axes: Axes,
    rotate: str,
    sharded: bool,
) -> AttentionState:
    """The state of this device's queries, or of those that all have. Raises as `attend` does."""
    operands = vary_together(operands, axes)
    if what_rotates(rotate, operands, sharded) == "queries":
        if sharded:
            return _queries_around(names, settings, axes, operands)
        state = fold_across("ring", axes, attend(names, with_wide_out(settings), operands))
        return rounded(state, operands, settings)
    return keys_around(names, settings, axes, operands)


def _queries_around(
    names: Names, settings: Settings, axes: Axes, operands: Operands
) -> AttentionState:
    query_len = operands.query.shape[1]

    def step(carry: tuple[AttentionState, tuple[Any, ...]], i: Array) -> Any:
        state, (query, positions, segments) = carry
        following = hop((query, positions, segments), axes)
        place = origin(i, axes)
        here = operands._replace(
            query=query,
            query_positions=positions,
            query_segments=segments,
            bias=part(operands.bias, 2, place, query_len),
            mask=part(operands.mask, 2, place, query_len),
        )
        state = merge(state, attend(names, with_wide_out(settings), here))
        return (transfer(lambda x: hop(x, axes), state), following), None

    visitors = operands.query, operands.query_positions, operands.query_segments
    steps = jnp.arange(lax.axis_size(axes), dtype=jnp.int32)
    (state, _), _ = lax.scan(step, (empty_like(with_wide_out(settings), operands), visitors), steps)
    return rounded(state, operands, settings)
