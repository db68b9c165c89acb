"""The logits of a block of words, `[words, tokens]`, with soft cap and temperature."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from energy_attn.kernels.internal import autodiff, lse_dtype, precision

from ._blocks import Block


class Rows(NamedTuple):
    """Arrays of tokens: hidden states in the dtype of the sums; scale and temperature of the logits, None for 1."""

    hidden: Float[Array, "T D"]
    scale: Float[Array, " T"] | None
    temperature: Float[Array, " T"] | None


class Words(NamedTuple):
    """Arrays of words: rows of the output matrix, and None or their biases and whether they are allowed."""

    weight: Float[Array, "V D"]
    bias: Float[Array, " V"] | None
    mask: Bool[Array, " V"] | None


class Scores(NamedTuple):
    """Logits that are there already, in place of the arrays of words."""

    values: Float[Array, "V T"]


class Layer(NamedTuple):
    """The static options of an output layer: the soft cap, and the dtype of matrix products."""

    soft_cap: float | None
    dtype: jnp.dtype


def logits(
    layer: Layer, rows: Rows, words: Words | Scores, block: Block
) -> Float[Array, "words T"]:
    r"""$s_{at} = c \tanh((\alpha_t\, w_a \cdot h_t + b_a) / c) / \tau_t$; minus infinity for a word that is hidden.

    Words that an earlier block has are hidden, too.
    """
    if isinstance(words, Scores):
        result = words.values
    else:
        # words come first: XLA:CPU computes sums over the first axis in vector instructions
        result = _product("nd,td->nt", layer.dtype, words.weight, rows.hidden)
        bias, mask = (None if x is None else x[:, None] for x in (words.bias, words.mask))
        result = _capped(layer, rows, result, bias, mask)
    return result if block.is_new is None else jnp.where(block.is_new[:, None], result, -jnp.inf)


def logits_at(
    layer: Layer, rows: Rows, words: Words | Scores, index: Int[Array, "k T"]
) -> Float[Array, "k T"]:
    """The logits of `k` words of each token, in the place of their rows of the output matrix; 0 where there is none."""
    is_here = (index >= 0) & (index < len(words[0]))
    at = jnp.where(is_here, index, 0)
    if isinstance(words, Scores):
        return jnp.where(is_here, jnp.take_along_axis(words.values, at, 0), 0.0)
    bias, mask = (None if x is None else x[at] for x in (words.bias, words.mask))
    result = _product("ktd,td->kt", layer.dtype, words.weight[at], rows.hidden)
    return jnp.where(is_here, _capped(layer, rows, result, bias, mask), 0.0)


def _capped(
    layer: Layer, rows: Rows, result: Array, bias: Array | None, mask: Array | None
) -> Array:
    if rows.scale is not None:
        result = result * rows.scale[None]
    if bias is not None:
        result = result + bias.astype(result.dtype)
    if layer.soft_cap is not None:
        result = layer.soft_cap * jnp.tanh(result / layer.soft_cap)
    if rows.temperature is not None:
        result = result / rows.temperature[None]
    return result if mask is None else jnp.where(mask, result, -jnp.inf)


def _product(spec: str, dtype: jnp.dtype, x: Array, y: Array) -> Array:
    """An einsum whose factors are rounded to `dtype`, and whose sums are in float32 or wider."""
    out = lse_dtype(dtype)
    if dtype == out:
        return jnp.einsum(spec, x.astype(out), y.astype(out), precision=precision(out))
    return autodiff.function_call(_Product(spec, dtype, out), (x, y))


@dataclasses.dataclass(frozen=True)
class _Product(autodiff.AbstractFunction):
    """A product with factors of 16 bits in all derivatives; JAX would multiply cotangents in float32."""

    spec: str
    dtype: jnp.dtype  # of the factors
    out: jnp.dtype

    def apply(self, args: PyTree) -> Array:
        x, y = (x.astype(self.dtype) for x in args)
        return jnp.einsum(self.spec, x, y, preferred_element_type=lse_dtype(self.dtype)).astype(
            self.out
        )

    def jvp(self, primals: PyTree, tangents: PyTree) -> tuple[Array, Any]:
        result = autodiff.function_call(self, primals)
        changes = [
            autodiff.linear_call(_ProductWith(self, i), primals[1 - i], tangent)
            for i, tangent in enumerate(tangents)
            if tangent is not None
        ]
        return result, sum(changes[1:], changes[0])


@dataclasses.dataclass(frozen=True)
class _ProductWith(autodiff.AbstractLinearMap):
    """A product as a map of its factor `place`."""

    product: _Product
    place: int

    def _factors(self, fixed: Array, moving: Array) -> tuple[Array, Array]:
        return (fixed, moving) if self.place else (moving, fixed)

    def apply(self, fixed: PyTree, moving: PyTree) -> Array:
        return self.product.apply(self._factors(fixed, moving))

    def plain(self, fixed: PyTree, moving: PyTree) -> Any:
        return autodiff.function_call(self.product, self._factors(fixed, moving))

    def transpose(self, fixed: PyTree, moving: PyTree, cotangent: PyTree) -> Any:
        factors, result = self.product.spec.split("->")
        own, other = factors.split(",")[:: -1 if self.place else 1]
        product = _Product(f"{result},{other}->{own}", self.product.dtype, moving.dtype)
        return autodiff.function_call(product, (cotangent, fixed))
