"""Ring attention: keys, or queries with their states, pass every device once."""

import functools
import math
from typing import Any, Unpack

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    KernelOptions,
    Operands,
    Settings,
    attend,
    attend_onto,
    check_choice,
    check_flag,
    empty_like,
    lse_dtype,
    vary_together,
    with_wide_out,
)
from energy_attn.kernels.masks import AbstractMask

from ..merge._packing import transfer
from ..spec._arguments import (
    ONE_WAY,
    Axes,
    AxisName,
    Scores,
    Travel,
    check_axes,
    check_travel,
    rounded,
    scores_shape,
)
from ._direction import BothWays, OneWay, by_halves, check_both_ways, joined_halves
from ._hops import hop, origin, part, whole
from ._in_turn import Names, attend_in_turn
from ._merge import fold_across
from ._parts import attend_parts
from ._ring_keys import Around

ROTATED = ("keys", "queries", "auto")


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
    narrow_gradients: bool = False,
    bidirectional: bool = False,
    **options: Unpack[KernelOptions],
) -> AttentionState:
    r"""Attention over keys sharded along mesh axes, passed around a ring, inside `jax.shard_map`.

    $$\mathrm{state} = \mathrm{state}_{i} \oplus \mathrm{state}_{i-1} \oplus \dots
      \oplus \mathrm{state}_{i-p+1}$$

    with $\oplus$ the [`merge`][energy_attn.kernels.merge] of states and the shards of keys numbered
    by device, counted modulo $p$. `rotate="keys"`: each device keeps its queries and passes the
    keys and values that it holds to the next one, $p - 1$ times. In programs for TPU v5p and v6e and
    for H200, each transfer starts before the attention of its step and ends after it. The derivative
    goes around once more: in forward mode with the directions of keys and values, in reverse mode
    with gradients that travel with their keys in `lse`'s dtype, likewise beside the products, and
    then make one hop home, with nothing beside it, in the dtypes of keys and values.
    Memory is $O(T + S)$ per device in all, and in second derivatives by forward over reverse, which
    send twice what the gradient does; reverse over either mode keeps the keys of all devices on
    each, $O(T + p S)$. `rotate="queries"`: keys
    stay, and queries go around with their states and come home, $p$ times; or, where all devices
    have the same queries, only the states, $p - 1$ times. That is little where queries are few.

    Positions are global: with `is_causal`, a window or ragged rows give `key_positions` and
    `query_positions`, as the defaults count from the shard's first. Those of what goes around are
    gathered once, with their segments, and do not go around.

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
        narrow_gradients: whether gradients of keys and values travel in the dtypes of these, which for 16
            bits is half of the bytes, rounded in each of $p - 1$ hops; False: in `lse`'s. For keys that
            rotate, by any implementation but `"reference"`.
        bidirectional: whether keys and values of the first half of the heads go around in one direction, those of the
            second half in the other, so that both links of a torus axis (TPU) carry half of the bytes; queries
            and outputs are copied once, to lie by halves. For keys that rotate.
        **options: as for [`local_attention`][energy_attn.kernels.local_attention].

    Returns:
        The state of this device's queries over all keys.

    Raises:
        TypeError: as `local_attention`.
        ValueError: as `local_attention`; an axis is not bound; positions are compared but not
            given; `rotate` is none of these; or, with `bidirectional`, keys with an odd number of heads, or a
            score.

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
    travel = check_travel(narrow_gradients, bidirectional)

    def scores(operands: Operands) -> Scores:
        if what_rotates(rotate, operands, sharded) == "keys":
            return scores_shape(operands, key_parts=lax.axis_size(axes))
        return scores_shape(operands, query_parts=lax.axis_size(axes) if sharded else 1)

    arrays = query, key, value, source, bias, mask
    run = functools.partial(ring, axes=axes, rotate=rotate, sharded=sharded, travel=travel)
    return attend_parts(run, arrays, options, sink, queries=sharded, scores=scores)


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
    travel: Travel = ONE_WAY,
) -> AttentionState:
    """The state of this device's queries, or of those that all have.

    Raises as `attend` does, and as `check_both_ways` where keys go around both ways.
    """
    operands = vary_together(operands, axes)
    if what_rotates(rotate, operands, sharded) == "queries":
        if sharded:
            return _queries_around(names, settings, axes, operands)
        state = fold_across("ring", axes, attend(names, with_wide_out(settings), operands))
        return rounded(state, operands, settings)
    size = operands.key.shape[1]
    if not travel.both_ways:
        turns = Around(axes, size, travel.narrow, OneWay())
        return attend_in_turn(names, settings, turns, operands)
    check_both_ways(settings, operands)
    turns = Around(axes, size, travel.narrow, BothWays(operands.query.shape[0]))
    return joined_halves(attend_in_turn(names, settings, turns, by_halves(operands)))


def _queries_around(
    names: Names, settings: Settings, axes: Axes, operands: Operands
) -> AttentionState:
    query_len, wide = operands.query.shape[1], with_wide_out(settings)
    positions = whole(operands.query_positions, query_len, axes)
    segments = whole(operands.query_segments, query_len, axes)

    def step(carry: tuple[AttentionState, Array], i: Array) -> Any:
        state, query = carry
        place = origin(i, axes)
        here = operands._replace(
            query=query,
            query_positions=part(positions, 1, place, query_len),
            query_segments=part(segments, 1, place, query_len),
            bias=part(operands.bias, 2, place, query_len),
            mask=part(operands.mask, 2, place, query_len),
        )
        state, following = attend_onto(state, names, wide, here, hop(query, axes))
        return (transfer(lambda x: hop(x, axes), state), following), None

    steps = jnp.arange(lax.axis_size(axes), dtype=jnp.int32)
    start = empty_like(wide, operands), operands.query
    (state, _), _ = lax.scan(step, start, steps)
    return rounded(state, operands, settings)
