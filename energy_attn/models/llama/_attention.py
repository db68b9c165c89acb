"""The projections around attention."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from ._config import LlamaConfig
from ._layers import Linear, RMSNorm, norm_of
from ._rope import rotate


class LlamaAttention(eqx.Module):
    """The four projections around attention; the heads share keys in groups."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    sinks: Float[Array, " heads"] | None
    head_dim: int = eqx.field(static=True)

    def __init__(self, config: LlamaConfig, dtype: DTypeLike, *, key: PRNGKeyArray):
        q, k, v, o = jax.random.split(key, 4)
        width, self.head_dim = config.hidden_size, config.head_dim
        inner = config.num_attention_heads * config.head_dim
        shared = config.num_key_value_heads * config.head_dim
        linear = partial(Linear, dtype=dtype, bias=config.attention_bias)
        self.q_proj = linear(width, inner, key=q)
        self.k_proj = linear(width, shared, key=k)
        self.v_proj = linear(width, shared, key=v)
        bias = config.attention_bias if config.output_bias is None else config.output_bias
        self.o_proj = linear(inner, width, bias=bias, key=o)
        widths = (inner, shared) if config.qk_norm_over_heads else (config.head_dim,) * 2
        self.sinks = (
            jnp.zeros(config.num_attention_heads, dtype) if config.attention_sinks else None
        )
        self.q_norm, self.k_norm = (
            norm_of(config, x, dtype) if config.qk_norm else None for x in widths
        )

    def project(
        self, x: Float[Array, "batch time width"], rope: tuple[Array, Array] | None
    ) -> tuple:
        """Queries and keys turned to their positions, unless `rope` is None, and values, each `[B, T, heads, H]`."""
        q, k, v = (
            proj(x).reshape(*x.shape[:2], proj.weight.shape[0] // self.head_dim, self.head_dim)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (_normed(*pair) for pair in ((q, self.q_norm), (k, self.k_norm)))
        return (q, k, v) if rope is None else (rotate(q, *rope), rotate(k, *rope), v)


def _normed(heads: Array, norm: RMSNorm | None) -> Array:
    """Heads `[B, T, heads, H]`, each normed by itself, or all of them together where the norm is so wide."""
    if norm is None:
        return heads
    if norm.weight.shape[0] == heads.shape[-1]:
        return norm(heads)
    return norm(lax.collapse(heads, 2)).reshape(heads.shape)
