"""Attention as the gradient of the free energy."""

from typing import Literal, Unpack, overload

from jaxtyping import Array, Bool, Float

from energy_attn.kernels.internal import check_options, checks
from energy_attn.kernels.masks import AbstractMask

from ._free_energy import AttentionOptions, attention_and_energy, prepare


@overload
def attention(
    query: Float[Array, "*#B T N H"],
    key: Float[Array, "*#B S K H"],
    value: Float[Array, "*#B S K Hv"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | AbstractMask | None = None,
    *,
    return_energy: Literal[False] = False,
    return_residual: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Float[Array, "*B T N Hv"]: ...


@overload
def attention(
    query: Float[Array, "*#B T N H"],
    key: Float[Array, "*#B S K H"],
    value: Float[Array, "*#B S K Hv"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | AbstractMask | None = None,
    *,
    return_energy: Literal[True],
    return_residual: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]: ...


@overload
def attention(
    query: Float[Array, "*#B T N H"],
    key: Float[Array, "*#B S K H"],
    value: Float[Array, "*#B S K Hv"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | AbstractMask | None = None,
    *,
    return_energy: Literal[False] = False,
    return_residual: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]: ...


def attention(
    query: Float[Array, "*#B T N H"],
    key: Float[Array, "*#B S K H"],
    value: Float[Array, "*#B S K Hv"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | AbstractMask | None = None,
    *,
    return_energy: bool = False,
    return_residual: bool = False,
    **options: Unpack[AttentionOptions],
) -> Float[Array, "*B T N Hv"] | tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    r"""Attention: the gradient of the free energy in the source, at zero.

    $$\mathrm{out} = \nabla_\zeta F(\zeta)\big|_{\zeta = 0} = \sum_a P_a v_a, \qquad
      P = \mathrm{softmax}(\mathrm{scale}\; q \cdot k + b)$$

    A drop-in replacement for `jax.nn.dot_product_attention`, whose arguments mean the same here.

    Args:
        query: `[*B, T, N, H]` with any number of batch axes, also none; float16, bfloat16, float32 or float64.
        key: `[*B, S, K, H]`; `K` divides `N` (grouped heads). Batch axes of size 1 broadcast among the three arrays.
        value: `[*B, S, K, Hv]`.
        bias: added to the scaled scores; broadcastable to `[B, N, T, S]`, with all four axes.
        mask: a mask of [`masks`][energy_attn.kernels.masks.AbstractMask], as `Causal() | Prefix(n)`; or
            boolean, shaped like `bias`, True where a key takes part.
        return_energy: whether to return `(out, energy)`.
        return_residual: as in `jax.nn`: whether to return `(out, residual)`, where the residual is
            the energies rounded to value's dtype. It is differentiable; on JAX's own XLA path its
            gradient is zero.
        **options: the keys of `AttentionOptions`.

    Returns:
        `out` `[B, T, N, Hv]` in value's dtype; with `return_energy`, also the energies
        `[B, T, N]` in nats, float32 (float64 for float64). A fully masked row has `out = 0` and
        energy minus infinity (`jax.nn` returns the mean of the values there, and a large negative
        residual).

    Raises:
        TypeError: an argument is not an array or has the wrong dtype, or an unknown option.
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
    check_options(options, AttentionOptions, "bias", "mask", "return_energy", "return_residual")
    return_energy = checks.check_flag("return_energy", return_energy)
    if checks.check_flag("return_residual", return_residual) and return_energy:
        raise ValueError("return_residual: wanted either it or return_energy, got both")
    call, operands = prepare(query, key, value, bias, mask, name="attention", **options)
    out, energy = attention_and_energy((call,), (operands,))
    if return_residual:
        return out, energy.astype(out.dtype)
    return (out, energy) if return_energy else out
