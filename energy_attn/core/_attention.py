"""Attention as the gradient of the free energy."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Bool, Float, Int

from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.internal import check_flag

from ._free_energy import attention_and_energy, prepare


def attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, "..."] | None = None,
    key_value_seq_lengths: Int[Array, "..."] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_positions: Int[Array, "..."] | None = None,
    key_positions: Int[Array, "..."] | None = None,
    query_segment_ids: Int[Array, "..."] | None = None,
    key_segment_ids: Int[Array, "..."] | None = None,
    implementation: str | Sequence[str] | None = None,
    parallel: SequenceParallel | None = None,
    return_energy: bool = False,
    return_residual: bool = False,
) -> Any:
    r"""Attention: the gradient of the free energy in the source, at zero.

    $$\mathrm{out} = \nabla_\zeta F(\zeta)\big|_{\zeta = 0} = \sum_a P_a v_a, \qquad
      P = \mathrm{softmax}(\mathrm{scale}\; q \cdot k + b)$$

    A drop-in replacement for `jax.nn.dot_product_attention`, whose arguments mean the same here. In
    addition, value may have another width than key, queries and keys may have positions, and the
    energy can be returned.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`; float16, bfloat16, float32 or float64.
        key: `[B, S, K, H]` or `[S, K, H]`; `K` divides `N` (grouped heads).
        value: `[B, S, K, Hv]` or `[S, K, Hv]`.
        bias: added to the scaled scores; of four axes, each 1 or that of `[B, N, T, S]`.
        mask: boolean, shaped like `bias`; True where a key takes part.
        scale: the factor of $q \cdot k$; None is $1/\sqrt{H}$.
        is_causal: whether to hide keys whose position is after the query's.
        query_seq_lengths: `[B]` integers; queries from this index on are absent.
        key_value_seq_lengths: `[B]` integers; keys from this index on are absent.
        local_window_size: `(left, right)` or one int: how far from a query its keys may lie.
        query_positions: `[B, T]` integers, global positions; negative means absent.
        key_positions: `[B, S]` integers likewise.
        query_segment_ids: `[B, T]` integers: a query sees only the keys of its own segment.
        key_segment_ids: `[B, S]` integers likewise, given together with the queries'.
        implementation: a name of [`implementations`][energy_attn.kernels.implementations], or
            `"xla"` for any that XLA alone runs; `"cudnn"` is one of the names.
        parallel: how keys are sharded over the current mesh; see
            [`free_energy`][energy_attn.free_energy].
        return_energy: whether to return `(out, energy)`.
        return_residual: as in `jax.nn`: whether to return `(out, residual)`, where the residual is
            the energies rounded to value's dtype. It is differentiable; on JAX's own XLA path its
            gradient is zero.

    Returns:
        `out` `[B, T, N, Hv]` in value's dtype; with `return_energy`, also the energies
        `[B, T, N]` in nats, float32 (float64 for float64). A fully masked row has `out = 0` and
        energy minus infinity (`jax.nn` returns the mean of the values there, and a large negative
        residual).

    Raises:
        TypeError: an argument is not an array or has the wrong dtype.
        ValueError: shapes that do not match, values out of range, unknown names, both
            `return_energy` and `return_residual`.
        NotImplementedError: the named implementation declines the call.

    Source: Tree Attention (arXiv 2408.04093), equations 6 to 10.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 4))
        >>> out, energy = ea.attention(q, k, v, is_causal=True, return_energy=True)
        >>> energy.shape
        (1, 5, 2)
        >>> bool(jnp.allclose(out, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5))
        True
    """
    flags = {"return_energy": return_energy, "return_residual": return_residual}
    if all([check_flag(name, flag) for name, flag in flags.items()]):
        raise ValueError("return_residual: wanted either it or return_energy, got both")
    call, arrays = prepare(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        query_positions=query_positions,
        key_positions=key_positions,
        query_segment_ids=query_segment_ids,
        key_segment_ids=key_segment_ids,
        implementation=implementation,
        parallel=parallel,
    )
    out, energy = attention_and_energy(call, arrays)
    if return_residual:
        return out, energy.astype(out.dtype)
    return (out, energy) if return_energy else out
