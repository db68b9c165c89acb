"""The parts of a Llama layer: linear maps, norm, MLP, projections."""

from collections.abc import Callable
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
from energy_attn.kernels.scores import SoftCap

from ._config import LlamaConfig
from ._rope import rotate


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
        """The map, in the dtype of `x`."""
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
        """The tokens' rows, times the scale."""
        rows = self._rows(tokens)
        return rows if self.scale == 1 else rows * jnp.asarray(self.scale, rows.dtype)

    def _rows(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch width"]:
        vocab = self.weight.shape[0]
        # negative indices would count from the end
        index = jnp.where((tokens < 0) | (tokens >= vocab), vocab, tokens)
        rows = self.weight.at[index]
        split = tuple(jax.typeof(index).sharding.spec)
        if not any(split):
            return rows.get(mode="fill")
        # explicit sharding: JAX asks for the sharding of the rows of split tokens
        mesh, width = jax.typeof(index).sharding.mesh, jax.typeof(self.weight).sharding.spec[1:]
        sharding = NamedSharding(mesh, PartitionSpec(*split, *width))
        return rows.get(mode="fill", out_sharding=sharding)


class RMSNorm(eqx.Module):
    r"""$y = w \circ x / \sqrt{\mathrm{mean}(x^2) + \epsilon}$, computed in float32 or wider.

    With `offset` the factor is $1 + w$, and the product is of float32 as well.

    Source: Zhang and Sennrich (arXiv 1910.07467), equation 4.
    """

    weight: Float[Array, " width"]
    eps: float = eqx.field(static=True)
    offset: bool = eqx.field(static=True)

    def __init__(self, width: int, eps: float, dtype: DTypeLike, offset: bool = False):
        self.weight = jnp.zeros(width, dtype) if offset else jnp.ones(width, dtype)
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Each vector brought to mean square 1, then scaled."""
        promoted = x.astype(lse_dtype(x.dtype))
        promoted *= lax.rsqrt(jnp.mean(promoted * promoted, -1, keepdims=True) + self.eps)
        weight = jnp.expand_dims(self.weight, range(x.ndim - 1))
        if self.offset:
            return (promoted * (1 + weight.astype(promoted.dtype))).astype(x.dtype)
        return promoted.astype(x.dtype) * weight


class LlamaMLP(eqx.Module):
    r"""SwiGLU: $W_{down}(\mathrm{silu}(W_{gate} x) \circ W_{up} x)$; or GEGLU, with another activation.

    Source: Shazeer (arXiv 2002.05202), equation 6.
    """

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    activation: str = eqx.field(static=True)

    def __init__(self, config: LlamaConfig, dtype: DTypeLike, *, key: PRNGKeyArray):
        self.activation = config.hidden_act
        gate, up, down = jax.random.split(key, 3)
        width, inner = config.hidden_size, config.intermediate_size
        linear = partial(Linear, dtype=dtype, bias=config.mlp_bias)
        self.gate_proj = linear(width, inner, key=gate)
        self.up_proj = linear(width, inner, key=up)
        self.down_proj = linear(inner, width, key=down)

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """The MLP's contribution to the residual stream."""
        gate = self.gate_proj(x)
        gate = jax.nn.silu(gate) if self.activation == "silu" else jax.nn.gelu(gate)
        return self.down_proj(gate * self.up_proj(x))


class LlamaAttention(eqx.Module):
    """The four projections around attention; the heads share keys in groups."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: "RMSNorm | None"
    k_norm: "RMSNorm | None"
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
        self.q_norm, self.k_norm = (
            RMSNorm(x, config.rms_norm_eps, dtype, config.unit_offset) if config.qk_norm else None
            for x in widths
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


class LlamaLayer(eqx.Module):
    """Attention and MLP, each after a norm and added to the residual stream; with `post_norms`, normed before that.

    `post_attention_layernorm` is the norm before the MLP, unless there are such norms: these are Hugging Face's names.
    """

    input_layernorm: RMSNorm | None
    self_attn: LlamaAttention
    post_attention_layernorm: RMSNorm
    pre_feedforward_layernorm: RMSNorm | None
    post_feedforward_layernorm: RMSNorm | None
    mlp: LlamaMLP
    options: tuple[tuple[str, Any], ...] = eqx.field(static=True)  # of its attention
    rope: int | None = eqx.field(static=True)  # which rotary embedding it has

    def __init__(self, config: LlamaConfig, index: int, dtype: DTypeLike, *, key: PRNGKeyArray):
        window, cap = config.window(index), config.attn_logit_softcapping
        options: dict[str, Any] = {}
        if config.query_pre_attn_scalar is not None:
            options["scale"] = config.query_pre_attn_scalar**-0.5
        if window is not None:
            options["local_window_size"] = window - 1, 0
        if cap is not None:
            options["score"] = SoftCap(cap)
        self.options = tuple(options.items())
        local = window is not None and config.rope_local_base_freq is not None
        self.rope = int(local) if config.rotates(index) else None
        attend, mlp = jax.random.split(key)
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps, dtype, config.unit_offset)
        before, after = config.pre_norms, config.post_norms
        self.input_layernorm = norm() if before else None
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm() if before and after else None
        self.post_feedforward_layernorm = norm() if after else None
        self.self_attn = LlamaAttention(config, dtype, key=attend)
        self.mlp = LlamaMLP(config, dtype, key=mlp)

    def __call__(
        self,
        x: Float[Array, "batch time width"],
        ropes: tuple[tuple[Array, Array], ...],
        see: Callable[..., tuple[Array, Any]],
    ) -> tuple[Float[Array, "batch time width"], Any]:
        """The stream after the layer, and the second result of `see(query, key, value, **options)`."""
        rope = None if self.rope is None else ropes[self.rope]
        heads = self.self_attn.project(_of(self.input_layernorm, x), rope)
        out, extra = see(*heads, **dict(self.options))
        out = self.self_attn.o_proj(lax.collapse(out, 2))
        before, after = self.post_attention_layernorm, self.post_feedforward_layernorm
        if after is not None:
            out, before = self.post_attention_layernorm(out), self.pre_feedforward_layernorm
        x = x + out
        return x + _of(after, self.mlp(_of(before, x))), extra


def _of(norm: RMSNorm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


def dot(x: Array, weight: Array) -> Array:
    """`x` times the transpose of `weight` `(out, in)`, in float32 or wider."""
    axes = ((x.ndim - 1,), (1,)), ((), ())
    return lax.dot_general(x, weight, axes, preferred_element_type=lse_dtype(x.dtype))
