"""Attention inside `jax.shard_map`, on one device's shards."""

import functools
from typing import Unpack

from jax import lax
from jaxtyping import Array, Bool, Float

from energy_attn.kernels import AttentionState, Operands, Settings
from energy_attn.kernels.internal import (
    MergedOptions,
    Tokens,
    arguments,
    batches,
    call_policy,
    checks,
    split_mask,
)
from energy_attn.kernels.masks import AbstractMask

from ..merge._abstract import Axes
from ..merge._across import AxisName, check_axes
from ._abstract import AbstractMethod, LocalCall, attend_with_sink, check_heads
from ._choice import method_of_call
from ._parallel import check_method, queries_are_parts


def sharded_attention(
    query: Float[Array, "*#B T N H"],
    key: Float[Array, "*#B S K H"],
    value: Float[Array, "*#B S K Hv"],
    *,
    source: Float[Array, "*B T N Hv"] | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | AbstractMask | None = None,
    axis_name: AxisName,
    method: str | AbstractMethod = "tree",
    queries_sharded: bool | None = None,
    **options: Unpack[MergedOptions],
) -> AttentionState:
    r"""Attention over keys that are sharded along mesh axes, inside `jax.shard_map`.

    $$F(\zeta) = \log \sum_i e^{F_i(\zeta)}, \qquad
      F_i(\zeta) = \log \sum_{a \in \text{shard } i} \exp(\mathrm{scale}\; q\cdot k_a + \zeta\cdot v_a)$$

    | `method` | transfers |
    |---|---|
    | [`Tree`][energy_attn.distributed.methods.Tree] | states, in one reduction, whatever the number of keys |
    | [`Ring`][energy_attn.distributed.methods.Ring] | keys, or queries with their states, around a ring |
    | `Ulysses` | heads for sequence, and back |
    | `Hybrid` | heads along the last axis, and keys around the others |
    | `Gather` | keys, gathered piece by piece |

    Outside of `jax.shard_map`, [`attention`][energy_attn.attention] with `parallel=` does all of this.
    Positions are global: with `is_causal`, a window or ragged rows, pass this device's `key_positions` and
    `query_positions`.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`, this device's shard, or replicated over the axes.
        key: `[B, S, K, H]`, this device's shard.
        value: `[B, S, K, Hv]`, this device's shard.
        source: `[B, T, N, Hv]`, sharded as `query`.
        bias: broadcastable to the part of `[B, N, T, S]` in the description of the method.
        mask: boolean, broadcastable as `bias`; or a mask of
            [`masks`][energy_attn.kernels.masks.AbstractMask], of global positions.
        axis_name: the mesh axis, or several, slow ones first, along which keys are sharded.
        method: a name of this table in lower case, or a method with options.
        queries_sharded: whether `query` and the arrays along it are sharded; None: whether its type varies
            over the axes, and with `check_vma=False` whether there are as many queries as keys. Only
            trees and rings take replicated queries.
        **options: as for [`local_attention`][energy_attn.kernels.local_attention], and `sink`.

    Returns:
        The state over all keys of this device's queries, or of the replicated ones.

    Raises:
        TypeError: as `local_attention`; `method` is neither a name nor a method.
        ValueError: as `local_attention`; an axis is not bound; positions are compared but not given; the
            method does not take replicated queries, these axes or these heads.

    Source: Tree Attention (arXiv 2408.04093), section 5; the methods name their own.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.distributed import make_mesh, methods, sharded_attention
        >>> n = jax.device_count()
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2 * n, 2, 4))
        >>> sharded = jax.P(None, "device")
        >>> with jax.set_mesh(make_mesh((n,), ("device",))):
        ...     f = jax.shard_map(
        ...         lambda q, k, v: sharded_attention(q, k, v, axis_name="device", method="ring").out,
        ...         in_specs=sharded, out_specs=sharded,
        ...     )
        ...     out = f(q, k, v)
        >>> bool(jnp.allclose(out, jax.nn.dot_product_attention(q, k, v), atol=1e-5))
        True
    """
    axes = check_axes(axis_name)
    method = check_method(method)
    method.check_axes(axes)
    for name, x in (("query", query), ("key", key)):
        checks.check_floating(name, x)
    sharded = queries_sharded
    if sharded is None:
        sharded = not method.replicated_queries or queries_are_parts(axes, query, key)
    elif not checks.check_flag("queries_sharded", sharded) and not method.replicated_queries:
        raise ValueError(f"queries_sharded: wanted True or None for {method.name!r}, got False")
    policy = call_policy(options.get("implementation"), options.get("reproducible", False))
    predicate, mask = split_mask(mask)
    place = functools.partial(_check_placed, sharded)
    call = arguments.check_call(query, key, value, source, None, predicate, place=place, **options)
    operands = call.operands.positioned(read=False)
    scores = _scores(method, axes, sharded, operands)
    bias, mask = arguments.check_scores(bias, mask, (*(call.axes or (1,)), *scores))
    operands = operands._replace(bias=bias, mask=mask)
    method = method_of_call(policy, method)

    def run(settings: Settings, operands: Operands) -> AttentionState:
        return method.attend(LocalCall(policy, settings, operands, axes, sharded))

    state = attend_with_sink(run, policy, call.settings, operands)
    return AttentionState(*(batches.restored(x, call.axes) for x in state))


def _check_placed(queries: bool, tokens: Tokens, reads: bool) -> Tokens:
    # positions of a shard do not count from 0
    sharded = {"key_positions": "keys"} | ({"query_positions": "queries"} if queries else {})
    for name, what in sharded.items():
        if reads and getattr(tokens, name) is None:
            raise ValueError(
                f"{name}: wanted the global positions of this device's {what}, as is_causal, "
                f"local_window_size, key_value_seq_lengths, a mask or a score compare them; got None"
            )
    return tokens


def _scores(
    method: AbstractMethod, axes: Axes, sharded: bool, operands: Operands
) -> tuple[int, int, int]:
    """The shape of a device's bias and mask after the batch axes; raises as `check_heads`."""
    query_len, heads = operands.query.shape[1:3]
    key_len, kv_heads = operands.key.shape[1:3]
    if method.exchanged(axes):
        check_heads(method, heads, kv_heads, lax.axis_size(method.exchanged(axes)))
    split = method.split(axes, operands, sharded)
    devices = lax.axis_size(axes)

    def part(size: int, over: Axes) -> int:
        return size // lax.axis_size(over) if over else size

    rows = query_len * devices if sharded else query_len
    return (
        part(heads, split.heads),
        part(rows, split.queries),
        part(key_len * devices, split.keys),
    )
