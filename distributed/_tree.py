"""Tree attention: local kernels, then one associative reduction over the mesh."""

from typing import Any

from jaxtyping import Array, Float

from energy_attn.kernels import AttentionState, local_attention
from energy_attn.kernels._errors import check_flag

from ._merge import AxisName, check_axes, merge_across


def tree_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    source: Float[Array, "*B T N Hv"] | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Any = None,
    *,
    axis_name: AxisName,
    **options: Any,
) -> AttentionState:
    r"""Attention of replicated queries over keys sharded along mesh axes, inside `jax.shard_map`.

    $$F(\zeta) = \log \sum_i e^{F_i(\zeta)}, \qquad
      F_i(\zeta) = \log \sum_{a \in \text{shard } i} \exp(\mathrm{scale}\; q\cdot k_a + \zeta\cdot v_a)$$

    Each device computes the state of its own keys, then
    [`merge_across`][energy_attn.distributed.merge_across] folds the states: two collectives of
    $O(B T N H)$ bytes, whatever the number of keys. In the derivative `key` and `value` stay local
    and the query's gradient is one `psum`.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`, equal on all devices of the axes.
        key: `[B, S, K, H]`, this device's shard; `S` may be 0 and may differ in what is present.
        value: `[B, S, K, Hv]`, this device's shard.
        source: `[B, T, N, Hv]`, equal on all devices.
        bias: for this device's keys, broadcastable to `[B, N, T, S]`.
        mask: boolean, likewise.
        axis_name: the mesh axis, or several, along which keys are sharded.
        **options: as for [`local_attention`][energy_attn.kernels.local_attention]. Positions are
            global: with `is_causal`, a window or ragged rows give this shard's `key_positions`
            (and `query_positions`), as the defaults count from the shard's first key.

    Returns:
        The state over all keys, equal on all devices of the axes.

    Raises:
        TypeError: as `local_attention`.
        ValueError: as `local_attention`; or an axis is not bound; or positions are compared but
            `key_positions` is not given.

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
    compares = check_flag("is_causal", options.get("is_causal", False)) or any(
        options.get(name) is not None for name in ("local_window_size", "key_value_seq_lengths")
    )
    if compares and options.get("key_positions") is None:
        raise ValueError(
            "key_positions: wanted the global positions of this device's keys, as is_causal, "
            "local_window_size or key_value_seq_lengths compare them; got None"
        )
    return merge_across(local_attention(query, key, value, source, bias, mask, **options), axes)
