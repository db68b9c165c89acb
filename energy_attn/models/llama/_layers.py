"""The parts of a decoder: linear maps, embedding, norm, MLP, and the projections around attention."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from energy_attn.kernels.internal import lse_dtype

from ._config import LlamaConfig
from ._rope import YarnRope, rotate
from ._variant import LatentConfig


class Linear(eqx.Module):
    r"""$y = W x + b$, accumulated in float32 or wider; `bias` may be None."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"] | None

    def __init__(
        self, inputs: int, outputs: int, dtype: DTypeLike, *, bias: bool = False, key: PRNGKeyArray
    ):
        # Hugging Face's initializer_range
        self.weight = 0.02 * jax.random.normal(key, (outputs, inputs), dtype)
        self.bias = jnp.zeros(outputs, dtype) if bias else None

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        y = dot(x, self.weight)
        if self.bias is not None:
            y += jnp.expand_dims(self.bias.astype(y.dtype), range(x.ndim - 1))
        return y.astype(x.dtype)


class Embedding(eqx.Module):
    """A row of `weight` for each token; NaN for a token outside the vocabulary."""

    weight: Float[Array, "vocab width"]
    scale: float = eqx.field(static=True)

    def __init__(
        self, vocab: int, width: int, dtype: DTypeLike, *, scale: float = 1.0, key: PRNGKeyArray
    ):
        self.weight = 0.02 * jax.random.normal(key, (vocab, width), dtype)
        self.scale = scale

    def __call__(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch width"]:
        vocab = self.weight.shape[0]
        # negative indices would count from the end
        index = jnp.where((tokens < 0) | (tokens >= vocab), vocab, tokens)
        options: dict[str, Any] = {}
        if any(split := tuple(jax.typeof(index).sharding.spec)):
            # explicit sharding: JAX asks for the sharding of the rows of split tokens
            mesh, width = jax.typeof(index).sharding.mesh, jax.typeof(self.weight).sharding.spec[1:]
            options["out_sharding"] = NamedSharding(mesh, PartitionSpec(*split, *width))
        rows = self.weight.at[index].get(mode="fill", **options)
        return rows if self.scale == 1 else rows * jnp.asarray(self.scale, rows.dtype)


class RMSNorm(eqx.Module):
    r"""$y = w \circ x / \sqrt{\mathrm{mean}(x^2) + \epsilon}$, computed in float32 or wider.

    With `offset`, the factor is $1 + w$. With `offset` or `is_wide`, the product with the factor is in float32 too.

    Source: Zhang and Sennrich (arXiv 1910.07467), equation 4.
    """

    weight: Float[Array, " width"]
    eps: float = eqx.field(static=True)
    offset: bool = eqx.field(static=True)
    is_wide: bool = eqx.field(static=True)

    def __init__(
        self, width: int, eps: float, dtype: DTypeLike, offset: bool = False, is_wide: bool = False
    ):
        self.weight = jnp.zeros(width, dtype) if offset else jnp.ones(width, dtype)
        self.eps, self.offset, self.is_wide = eps, offset, is_wide

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        promoted = x.astype(lse_dtype(x.dtype))
        promoted *= lax.rsqrt(jnp.mean(promoted * promoted, -1, keepdims=True) + self.eps)
        weight = jnp.expand_dims(self.weight, range(x.ndim - 1))
        if self.offset or self.is_wide:
            factor = weight.astype(promoted.dtype)
            return (promoted * (1 + factor if self.offset else factor)).astype(x.dtype)
        return promoted.astype(x.dtype) * weight


def norm_of(config: LlamaConfig, width: int, dtype: DTypeLike) -> RMSNorm:
    return RMSNorm(width, config.rms_norm_eps, dtype, config.unit_offset, config.wide_norms)


class LlamaMLP(eqx.Module):
    r"""SwiGLU: $W_{down}(\mathrm{silu}(W_{gate} x) \circ W_{up} x)$; or GEGLU, with another activation.

    Source: Shazeer (arXiv 2002.05202), equation 6.
    """

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    activation: str = eqx.field(static=True)

    def __init__(
        self, config: LlamaConfig, dtype: DTypeLike, inner: int | None = None, *, key: PRNGKeyArray
    ):
        self.activation = config.hidden_act
        gate, up, down = jax.random.split(key, 3)
        width, inner = config.hidden_size, config.intermediate_size if inner is None else inner
        linear = partial(Linear, dtype=dtype, bias=config.mlp_bias)
        self.gate_proj = linear(width, inner, key=gate)
        self.up_proj = linear(width, inner, key=up)
        self.down_proj = linear(inner, width, key=down)

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        gate = self.gate_proj(x)
        return self.down_proj(activated(self.activation, gate) * self.up_proj(x))


def activated(name: str, x: Array) -> Array:
    return jax.nn.silu(x) if name == "silu" else jax.nn.gelu(x)


def dot(x: Array, weight: Array) -> Array:
    """`x` times the transpose of `weight` `(out, in)`, in float32 or wider."""
    axes = ((x.ndim - 1,), (1,)), ((), ())
    return lax.dot_general(x, weight, axes, preferred_element_type=lse_dtype(x.dtype))


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
        """Queries and keys, rotated unless `rope` is None, and values, each `[B, T, heads, H]`."""
        q, k, v = (
            proj(x).reshape(*x.shape[:2], proj.weight.shape[0] // self.head_dim, self.head_dim)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (_normed(*pair) for pair in ((q, self.q_norm), (k, self.k_norm)))
        return (q, k, v) if rope is None else (rotate(q, *rope), rotate(k, *rope), v)


def _normed(heads: Array, norm: RMSNorm | None) -> Array:
    """Norms heads `[B, T, heads, H]`, one by one or all together, by the width of the norm."""
    if norm is None:
        return heads
    if norm.weight.shape[0] == heads.shape[-1]:
        return norm(heads)
    return norm(lax.collapse(heads, 2)).reshape(heads.shape)


_EPS = 1e-6  # of the norms of latent vectors, also where other norms have another


class LatentAttention(eqx.Module):
    """The projections of multi-head latent attention, with separate keys and values for each head.

    Source: DeepSeek-V2 (arXiv 2405.04434), equations 9 to 19.
    """

    q_proj: Linear | None
    q_a_proj: Linear | None
    q_a_layernorm: RMSNorm | None
    q_b_proj: Linear | None
    kv_a_proj_with_mqa: Linear
    kv_a_layernorm: RMSNorm
    kv_b_proj: Linear
    o_proj: Linear
    sinks: None
    heads: int = eqx.field(static=True)
    config: LatentConfig = eqx.field(static=True)

    def __init__(self, config: LlamaConfig, dtype: DTypeLike, *, key: PRNGKeyArray):
        assert config.latent is not None
        self.config, self.heads, self.sinks = config.latent, config.num_attention_heads, None
        latent, width, bias = self.config, config.hidden_size, config.attention_bias
        qa, qb, kva, kvb, o = jax.random.split(key, 5)
        linear, norm = partial(Linear, dtype=dtype), partial(RMSNorm, eps=_EPS, dtype=dtype)
        rank, inner = latent.q_lora_rank, self.heads * latent.head_dim
        self.q_proj = linear(width, inner, key=qb) if rank is None else None
        self.q_a_proj = None if rank is None else linear(width, rank, bias=bias, key=qa)
        self.q_a_layernorm = None if rank is None else norm(rank)
        self.q_b_proj = None if rank is None else linear(rank, inner, key=qb)
        joint = latent.kv_lora_rank + latent.qk_rope_head_dim
        self.kv_a_proj_with_mqa = linear(width, joint, bias=bias, key=kva)
        self.kv_a_layernorm = norm(latent.kv_lora_rank)
        each = latent.qk_nope_head_dim + latent.v_head_dim
        self.kv_b_proj = linear(latent.kv_lora_rank, self.heads * each, key=kvb)
        self.o_proj = linear(self.heads * latent.v_head_dim, width, bias=bias, key=o)

    def project(
        self, x: Float[Array, "batch time width"], rope: tuple[Array, Array] | None
    ) -> tuple[
        Float[Array, "batch time heads qk"],
        Float[Array, "batch time heads qk"],
        Float[Array, "batch time heads v"],
    ]:
        c = self.config
        q = self._queries(x).reshape(*x.shape[:2], self.heads, c.head_dim)
        joint = self.kv_a_proj_with_mqa(x)
        latent = self.kv_a_layernorm(joint[..., : c.kv_lora_rank])
        each = self.kv_b_proj(latent).reshape(*x.shape[:2], self.heads, -1)
        k, v = jnp.split(each, [c.qk_nope_head_dim], -1)
        shared = self._rotated(joint[:, :, None, c.kv_lora_rank :], rope)
        shared = jnp.broadcast_to(shared, (*k.shape[:3], c.qk_rope_head_dim))
        plain, rotated = jnp.split(q, [c.qk_nope_head_dim], -1)
        q = jnp.concatenate([plain, self._rotated(rotated, rope)], -1)
        return q, jnp.concatenate([k, shared], -1), v

    def _queries(self, x: Array) -> Array:
        if self.q_a_proj is None or self.q_a_layernorm is None or self.q_b_proj is None:
            assert self.q_proj is not None
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def _rotated(self, x: Array, rope: tuple[Array, Array] | None) -> Array:
        if self.config.rope_interleave:  # pairs of neighbours become halves, in queries and keys
            x = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
        return x if rope is None else rotate(x, *rope)


def attention_scale(config: LlamaConfig) -> float | None:
    """The factor of scores; None: the default, one over the square root of the width of a head."""
    if config.query_pre_attn_scalar is not None:
        return config.query_pre_attn_scalar**-0.5
    scaling = config.rope_scaling
    if config.latent is None or not isinstance(scaling, YarnRope) or not scaling.mscale_all_dim:
        return None
    return config.head_dim**-0.5 * scaling.magnitude(scaling.mscale_all_dim) ** 2
