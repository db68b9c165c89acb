"""The parts of a decoder: linear maps, embedding, norm, MLP."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from energy_attn.kernels.internal import lse_dtype

from ._config import LlamaConfig


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

    With `offset` the factor is $1 + w$. With it, or if the norm `is_wide`, the product is of float32 as well.

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
