"""`local_attention`: the state of the keys on one device."""

from typing import Unpack

import jax
from jaxtyping import Array, Bool, Float

from .._checks import check_taylor
from ..call._arguments import check_call
from ..call._options import KernelOptions, check_options
from ..call._state import AttentionState
from ..masks._abstract import AbstractMask
from ._registry import attend, candidates, differentiated_by_jax


def local_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    source: Float[Array, "*B T N Hv"] | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | AbstractMask | None = None,
    **options: Unpack[KernelOptions],
) -> AttentionState:
    r"""The state `(out, lse)` of an attention over the keys given: one kernel pass.

    $$F(\zeta) = \log \sum_a \exp(\mathrm{scale}\; q\cdot k_a + b_a + \zeta\cdot v_a), \qquad
      \mathrm{lse} = F(\zeta), \quad \mathrm{out} = \nabla F(\zeta) = \sum_a P_a v_a$$

    with the sum over the keys that the query sees. Both outputs are differentiable in query, key,
    value, source and bias. [`merge`][energy_attn.kernels.merge] joins states of disjoint keys.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`; float16, bfloat16, float32 or float64.
        key: `[B, S, K, H]` or `[S, K, H]`, of query's dtype. `K` divides `N`: query head `n` reads
            key head `n // (N / K)`, and no key is repeated in memory. `S` may be 0.
        value: `[B, S, K, Hv]` or `[S, K, Hv]`; `Hv` may differ from `H`.
        source: the source $\zeta$, `[B, T, N, Hv]`; None means zero and costs nothing.
        bias: added to the scaled scores; four axes (leading ones may be left out), each of size 1
            or that of `[B, N, T, S]`.
        mask: a mask of [`masks`][energy_attn.kernels.masks.AbstractMask], as `Causal() | Prefix(n)`; or
            boolean, shaped like `bias`, True where a key takes part.
        **options: the keys of `KernelOptions`, which says what each does.

    Returns:
        `out` `[B, T, N, Hv]` in value's dtype, and `lse` `[B, T, N]` in float32 (float64 for
        float64), in nats. Fully masked rows have `out = 0`, `lse = -inf` and zero gradients.

    Raises:
        TypeError: an argument is not an array or has another dtype, or an unknown option.
        ValueError: shapes do not fit, values are out of range, or a name is unknown.
        NotImplementedError: the implementation named declines the call (if several are named, an
            `ExceptionGroup` of their reasons).

    Source: Tree Attention (arXiv 2408.04093), equations 6 and 15; FlashAttention-2
    (arXiv 2307.08691) for the blockwise passes.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.kernels import local_attention, merge
        >>> q, k, v = (jax.random.normal(key, (1, 6, 2, 4)) for key in jax.random.split(jax.random.key(0), 3))
        >>> whole = local_attention(q, k, v)
        >>> halves = merge(local_attention(q, k[:, :3], v[:, :3]), local_attention(q, k[:, 3:], v[:, 3:]))
        >>> bool(jnp.allclose(whole.out, halves.out, atol=1e-6))
        True
    """
    names = candidates(options.get("implementation"), options.get("reproducible", False))
    check_options(options, KernelOptions, "source", "bias", "mask")
    call = check_call(query, key, value, source, bias, mask, **options)
    if not differentiated_by_jax(names):
        check_taylor(call.operands)
    state = attend(names, call.settings, call.operands)
    return state if call.batched else jax.tree.map(lambda x: x[0], state)
