"""Tree attention: local kernels, then one associative reduction over the mesh."""

import functools
from collections.abc import Sequence
from typing import Unpack

import jax
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
    check_flag,
    with_wide_out,
)
from energy_attn.kernels.masks import AbstractMask

from .. import cost
from ..merge._packing import joined
from ..merge._scatter import exchange
from ..merge._strategies import STRATEGIES, MergeOption, check_merge
from ..spec._arguments import (
    Axes,
    AxisName,
    check_axes,
    rounded,
    scores_shape,
)
from ..spec._parallel import check_topology
from ._merge import choose_merge, fold_across
from ._parts import attend_parts


def tree_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    source: Float[Array, "*B T N Hv"] | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | AbstractMask | None = None,
    sink: Float[Array, "..."] | None = None,
    axis_name: AxisName,
    merge: MergeOption = "auto",
    queries_sharded: bool = False,
    topology: cost.Topology | None = None,
    **options: Unpack[KernelOptions],
) -> AttentionState:
    r"""Attention over keys sharded along mesh axes, by one reduction, inside `jax.shard_map`.

    $$F(\zeta) = \log \sum_i e^{F_i(\zeta)}, \qquad
      F_i(\zeta) = \log \sum_{a \in \text{shard } i} \exp(\mathrm{scale}\; q\cdot k_a + \zeta\cdot v_a)$$

    Each device computes the state of its own keys, then the states are folded. Queries that are
    equal on all devices ([`merge_across`][energy_attn.distributed.merge_across]): $O(B T N H)$ bytes,
    whatever the number of keys; in any derivative `key` and `value` stay local. In reverse mode the
    query's gradient is one `psum`; the tangent of forward mode is one all-reduce of
    $B T N (H + 1)$ numbers, whatever the merge. Queries of which each device has a part: they are gathered, and the
    states of all, $B T N (H + 1)$ numbers, are reduced and scattered, so that each device has those
    of its own queries. Per device $\frac{p-1}{p} B T N (2H + 1)$ numbers cross the links, where a
    ring passes $\frac{p-1}{p} B S K \cdot 2H$: as many if every head has its own keys ($K = N$)
    and more if heads share them. States travel in `lse`'s dtype, and are rounded once.

    Positions are global: with `is_causal`, a window or ragged rows give this shard's
    `key_positions` and the `query_positions`, as the defaults count from the shard's first key.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`, equal on all devices of the axes, or this device's.
        key: `[B, S, K, H]`, this device's shard; `S` may be 0 and may differ in what is present.
        value: `[B, S, K, Hv]`, this device's shard.
        source: `[B, T, N, Hv]`, as `query`.
        bias: for all queries and this device's keys, broadcastable to `[B, N, T, S]`.
        mask: boolean, likewise; or a rule of
            [`masks`][energy_attn.kernels.masks.AbstractMask], of global positions.
        sink: $b$, `[N]` or `[B, N]`: the score of one more outcome, whose value is zero,
            $F = \log(e^{F_{keys}} + e^b)$, merged once, after the fold; None: there is none.
        axis_name: the mesh axis, or several, slow ones first, along which keys are sharded.
        merge: how states are folded; see [`merge_across`][energy_attn.distributed.merge_across].
            Where queries are sharded, `"allreduce"` is a pmax of `lse` and a reduce-scatter of
            sums, and every other strategy one all-to-all of states.
        queries_sharded: whether `query` and what belongs to it are this device's part.
        topology: of the axes, for `merge="auto"`.
        **options: as for [`local_attention`][energy_attn.kernels.local_attention].

    Returns:
        The state over all keys: of all queries, equal on all devices, or of this device's.

    Raises:
        TypeError: as `local_attention`.
        ValueError: as `local_attention` and `merge_across`; or positions are compared but not given.

    Source: Tree Attention (arXiv 2408.04093), Algorithm 3.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.distributed import make_mesh, tree_attention
        >>> n = jax.device_count()
        >>> q, k = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 3 * n, 2, 4))
        >>> sharded = jax.P(None, "device")
        >>> with jax.set_mesh(make_mesh((n,), ("device",))):
        ...     f = jax.shard_map(
        ...         lambda q, k: tree_attention(q, k, k, axis_name="device"),
        ...         in_specs=(jax.P(), sharded), out_specs=jax.P(),
        ...     )
        ...     bool(jnp.allclose(f(q, k).out, 1))
        True
    """
    axes = check_axes(axis_name)
    check_merge(merge, len(axes))
    check_topology(topology, len(axes))
    sharded = check_flag("queries_sharded", queries_sharded)
    devices = lax.axis_size(axes) if sharded else 1
    return attend_parts(
        functools.partial(tree_of_shards, axes=axes, merge=merge)
        if sharded
        else functools.partial(tree, axes=axes, merge=merge, topology=topology),
        (query, key, value, source, bias, mask),
        options,
        sink,
        queries=sharded,
        scores=lambda operands: scores_shape(operands, query_parts=devices),
    )


def tree(
    names: Sequence[Candidate],
    settings: Settings,
    operands: Operands,
    axes: Axes,
    merge: str,
    topology: cost.Topology | None,
) -> AttentionState:
    """The state of queries that are equal on all devices. Raises as `attend` does."""
    state = attend(names, with_wide_out(settings), operands)
    state = fold_across(choose_merge(merge, state, axes, topology), axes, state)
    return rounded(state, operands, settings)


def tree_of_shards(
    names: Sequence[Candidate],
    settings: Settings,
    operands: Operands,
    axes: Axes,
    merge: str,
) -> AttentionState:
    """The state of this device's queries; bias and mask are for all of them.

    Raises as `attend` does.
    """
    devices, query_len = lax.axis_size(axes), operands.query.shape[1]
    state = attend(names, with_wide_out(settings), with_all_queries(operands, axes))

    def by_device(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], devices, query_len, *x.shape[2:]), 1, 0)

    scatter = exchange if merge == "auto" else STRATEGIES[merge].scatter
    state = scatter(AttentionState(*map(by_device, state)), axes)
    return rounded(state, operands, settings)


def with_all_queries(operands: Operands, axes: Axes) -> Operands:
    """Operands with the queries of all devices, end to end, and their positions and segments."""
    mine = operands.query, operands.query_positions, operands.query_segments
    query, positions, segments = jax.tree.map(lambda x: joined(x, axes, 1), mine)
    return operands._replace(query=query, query_positions=positions, query_segments=segments)
