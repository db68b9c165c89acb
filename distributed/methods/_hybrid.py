"""Ulysses and the ring together: heads exchanged along the fast axis, keys around the slow ones."""

import functools
from typing import Unpack

from jax import lax
from jaxtyping import Array, Bool, Float

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    KernelOptions,
    Operands,
)
from energy_attn.kernels.masks import AbstractMask

from ..spec._arguments import Scores, check_axes, check_travel
from ._parts import attend_parts
from ._ulysses import exchanged_scores, ulysses


def hybrid_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    source: Float[Array, "*B T N Hv"] | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | AbstractMask | None = None,
    sink: Float[Array, "..."] | None = None,
    axis_name: tuple[str, ...],
    narrow_gradients: bool = False,
    bidirectional: bool = False,
    **options: Unpack[KernelOptions],
) -> AttentionState:
    r"""Attention over a sequence sharded along two mesh axes or more, inside `jax.shard_map`.

    Along the last axis, of $f$ devices, heads are exchanged for sequence, as
    [`ulysses_attention`][energy_attn.distributed.ulysses_attention] does: each device has the sequence of
    all $f$, and $N/f$ of the heads. Keys of these heads then go around the $p/f$ devices of the other
    axes, as in [`ring_attention`][energy_attn.distributed.ring_attention]. So there are
    $p/f - 1$ hops in place of $p - 1$, each over the slow network with what
    one device of a ring holds, and $f$ has to fit the heads, not $p$. The derivatives are those of the two.

    Positions are global: with `is_causal`, a window or ragged rows give `key_positions` and
    `query_positions`, as the defaults count from the shard's first. They are gathered.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`, this device's part; `T` is equal on all.
        key: `[B, S, K, H]`, this device's part. Where $f$ does not divide $K$, keys are sent in copies as
            in `ulysses_attention`: $\mathrm{lcm}(K, f)$ has to divide $N$.
        value: `[B, S, K, Hv]`, likewise.
        source: `[B, T, N, Hv]`, likewise.
        bias: for this device's `N/f` heads, the queries of the last axis's devices and all keys, in the
            order of the devices; broadcastable to `[B, N/f, f T, p S]`.
        mask: boolean, likewise; or a rule of
            [`masks`][energy_attn.kernels.masks.AbstractMask], of global positions.
        sink: $b$, `[N]` or `[B, N]` of all heads: the score of one more outcome, whose value is zero,
            $F = \log(e^{F_{keys}} + e^b)$, merged once, after the fold; None: there is none.
        axis_name: the mesh axes, slow ones first, along which the sequence is sharded.
        narrow_gradients: as for `ring_attention`, of the keys that go around.
        bidirectional: likewise.
        **options: as for [`local_attention`][energy_attn.kernels.local_attention].

    Returns:
        The state of this device's queries over all keys.

    Raises:
        TypeError: as `local_attention`.
        ValueError: as `local_attention`; an axis is not bound, or there is only one; positions are
            compared but not given; or the devices of the last axis cannot share the heads out.

    Source: unified sequence parallelism, USP (arXiv 2405.07719).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.distributed import hybrid_attention, make_mesh
        >>> axes, n = ("node", "device"), jax.device_count()
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2 * n, n, 4))
        >>> sharded = jax.P(None, axes)
        >>> with jax.set_mesh(make_mesh((n // 2 or 1, min(n, 2)), axes)):
        ...     f = jax.shard_map(
        ...         lambda q, k, v: hybrid_attention(q, k, v, axis_name=axes).out,
        ...         in_specs=sharded, out_specs=sharded,
        ...     )
        ...     out = f(q, k, v)
        >>> bool(jnp.allclose(out, jax.nn.dot_product_attention(q, k, v), atol=1e-5))
        True
    """
    axes = check_axes(axis_name)
    if len(axes) < 2:
        raise ValueError(
            f"axis_name: wanted two or more mesh axes, slow ones first, got {axis_name!r}; "
            "over one, there are ulysses_attention and ring_attention"
        )
    around, exchanged = axes[:-1], axes[-1:]
    travel = check_travel(narrow_gradients, bidirectional)

    def scores(operands: Operands) -> Scores:
        sizes = lax.axis_size(exchanged), lax.axis_size(around)
        return exchanged_scores(operands, "hybrid", *sizes)

    arrays = query, key, value, source, bias, mask
    run = functools.partial(ulysses, axes=exchanged, around=around, travel=travel)
    return attend_parts(run, arrays, options, sink, queries=True, scores=scores)
