"""Attention over keys of all devices, gathered piece by piece."""

import functools
from typing import Unpack

from jax import lax
from jaxtyping import Array, Bool, Float

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    KernelOptions,
    Operands,
    Settings,
    vary_together,
)
from energy_attn.kernels.masks import AbstractMask

from ..spec._arguments import (
    Axes,
    AxisName,
    Scores,
    check_axes,
    scores_shape,
)
from ._gather_keys import Pieces
from ._in_turn import Names, attend_in_turn
from ._parts import attend_parts


def gather_attention(
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
    r"""Attention over keys sharded along mesh axes, gathered piece by piece, inside `jax.shard_map`.

    $$\mathrm{state} = \mathrm{state}_{1} \oplus \mathrm{state}_{2} \oplus \dots \oplus \mathrm{state}_{C}$$

    with $\oplus$ the [`merge`][energy_attn.kernels.merge] of states. Queries stay, and keys and values
    are gathered, $C$ pieces of every device's shard one after the other; no gather needs the attention
    over the piece before. $C$ is the largest number up to 8 that divides $S$, so that a device holds its shard and two
    pieces of all keys, a quarter of them for long sequences. The same bytes as a ring's, in $C$ steps
    in place of $p - 1$ hops. The derivative gathers them again: in forward mode with the directions of
    keys and values, in reverse mode gradients are reduced and scattered piece by piece in `lse`'s dtype.
    Reverse over either mode keeps the keys of all devices.

    In programs for H200 a gather starts before the attention over the piece before and ends after it; in
    the backward the scatter of gradients does, and gathers wait. XLA:TPU's gathers are synchronous: on
    v5p and v6e nothing is computed beside them, while the transfers of a ring are hidden.

    Positions are global: with `is_causal`, a window or ragged rows give `key_positions` and
    `query_positions`, as the defaults count from the shard's first. Those of keys are gathered once.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`, this device's.
        key: `[B, S, K, H]`, this device's shard.
        value: `[B, S, K, Hv]`, this device's shard.
        source: `[B, T, N, Hv]`, as `query`.
        bias: broadcastable to `[B, N, T, p S]`, for this device's queries and all keys in the
            order of the devices.
        mask: boolean, likewise; or a rule of
            [`masks`][energy_attn.kernels.masks.AbstractMask], of global positions.
        sink: $b$, `[N]` or `[B, N]`: the score of one more outcome, whose value is zero,
            $F = \log(e^{F_{keys}} + e^b)$, merged once, after the fold; None: there is none.
        axis_name: the mesh axis, or several, slow ones first, along which the sequence is sharded.
        **options: as for [`local_attention`][energy_attn.kernels.local_attention].

    Returns:
        The state of this device's queries over all keys.

    Raises:
        TypeError: as `local_attention`.
        ValueError: as `local_attention`; an axis is not bound; or positions are compared but not
            given.

    Source: context parallelism of Llama 3 (arXiv 2407.21783, section 3.3.2), which gathers all keys at
        once.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.distributed import gather_attention, make_mesh
        >>> n = jax.device_count()
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2 * n, 2, 4))
        >>> sharded = jax.P(None, "device")
        >>> with jax.set_mesh(make_mesh((n,), ("device",))):
        ...     f = jax.shard_map(
        ...         lambda q, k, v: gather_attention(q, k, v, axis_name="device").out,
        ...         in_specs=sharded, out_specs=sharded,
        ...     )
        ...     out = f(q, k, v)
        >>> bool(jnp.allclose(out, jax.nn.dot_product_attention(q, k, v), atol=1e-5))
        True
    """
    axes = check_axes(axis_name)

    def scores(operands: Operands) -> Scores:
        return scores_shape(operands, key_parts=lax.axis_size(axes))

    arrays = query, key, value, source, bias, mask
    run = functools.partial(gather, axes=axes)
    return attend_parts(run, arrays, options, sink, queries=True, scores=scores)


def gather(names: Names, settings: Settings, operands: Operands, axes: Axes) -> AttentionState:
    """The state of this device's queries; bias and mask are for all keys. Raises as `attend` does.

    Positions and segments of keys are those of all devices, or of this one.
    """
    operands = vary_together(operands, axes)
    return attend_in_turn(names, settings, Pieces(axes, operands.key.shape[1]), operands)
