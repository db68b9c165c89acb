"""The free energy as what Flax's layers call for attention."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Shaped

from energy_attn.kernels.internal import (
    RowOptions,
    as_visible,
    check_array,
    check_finite_number,
    check_floating,
    check_options,
    received,
)

from ..core._dropout import attention_with_dropout
from ..core._module import FreeEnergy
from ..functional._options import ModuleOptions
from ._positions import query_positions


def attention_fn(
    energy: FreeEnergy | None = None, **options: Unpack[ModuleOptions]
) -> "AttentionFn":
    r"""Attention for the layers of Flax: the gradient of a free energy in the source, at zero.

    $$\mathrm{out} = \nabla_\zeta F(\zeta)\big|_{\zeta = 0}$$

    for `attention_fn=` of `flax.nnx.MultiHeadAttention` and of `flax.linen.MultiHeadDotProductAttention`, in the
    place of their `dot_product_attention`.

    Args:
        energy: any [`FreeEnergy`][energy_attn.FreeEnergy]; None: one of the options.
        **options: its fields, as `is_causal=True`, `local_window_size=`, `mask=`, `score=`, `sink=`,
            `implementation=` or `parallel=`.

    Returns:
        An [`AttentionFn`][energy_attn.flax.AttentionFn]. NNX stores one without arrays as a static attribute; one
        with arrays, as `sink=`, is given to a layer as `nnx.data(attention_fn(sink=...))`. They are arrays, not
        `nnx.Param`s: optimizers and gradients of a layer's parameters leave them as they are.

    Raises:
        TypeError: `energy` is not a `FreeEnergy`; an unknown option.
        ValueError: options beside an `energy`.

    Source: Tree Attention (arXiv 2408.04093), equations 6 to 10.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> attend = ea.flax.attention_fn(is_causal=True)
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 7, 5, 2, 4))  # two batch axes
        >>> attend(q, k, v).shape
        (2, 7, 5, 2, 4)

        In a model: `nnx.MultiHeadAttention(8, 64, attention_fn=attend, decode=False, rngs=nnx.Rngs(0))`.
    """
    check_options(options, ModuleOptions)
    if energy is None:
        return AttentionFn(FreeEnergy(**options))
    if not isinstance(energy, FreeEnergy):
        raise TypeError(f"energy: wanted a FreeEnergy or None, got {received(energy)}")
    if options:
        raise ValueError(f"{next(iter(options))}: wanted it in the energy, got both")
    return AttentionFn(energy)


class AttentionFn(eqx.Module):
    """What [`attention_fn`][energy_attn.flax.attention_fn] returns, called by Flax's layers.

    Attributes:
        energy: of which attention is the gradient.

    Examples:
        >>> import jax.numpy as jnp
        >>> import energy_attn as ea
        >>> x = jnp.ones((3, 2, 4))
        >>> ea.flax.AttentionFn(ea.FreeEnergy())(x, x, x, mask=jnp.eye(3)).shape  # ones and zeros
        (3, 2, 4)
    """

    energy: FreeEnergy

    def __call__(
        self,
        query: Float[Array, "*B T N H"],
        key: Float[Array, "*B S K H"],
        value: Float[Array, "*B S K Hv"],
        *,
        bias: Float[Array, "..."] | None = None,
        mask: Shaped[Array, "..."] | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: PRNGKeyArray | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: object = None,
        module: object = None,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: object = None,
        qk_attn_weights_einsum: object = None,
        attn_weights_value_einsum: object = None,
    ) -> Float[Array, "*B T N Hv"]:
        """Attention, as `flax.nnx.dot_product_attention` and `flax.linen.dot_product_attention` have it.

        Fully masked rows are zero (Flax has the mean of the values there).

        Positions count from 0. One query with several keys is a step of a layer that decodes: its position is the
        last key that the mask shows to any row, as Flax's caches have it.

        Args:
            query: `[*B, T, N, H]`, with any number of batch axes.
            key: `[*B, S, K, H]`; `K` divides `N`.
            value: `[*B, S, K, Hv]`.
            bias: added to the scaled scores; broadcasts to `[*B, N, T, S]`.
            mask: likewise, boolean or numbers, as Flax makes masks: zero where a key takes no part.
            broadcast_dropout: whether all batch entries and heads drop the same weights.
            dropout_rng: of the weights that are dropped, the same ones as in Flax.
            dropout_rate: the probability that a weight is dropped.
            deterministic: whether none is.
            dtype: of the computation; None: that of the arrays, promoted.
            precision: not read: products are as exact as their dtype allows.
            module: None: there are no weights to store (`sow_weights=`).
            promote_dtype: of `(query, key, value)` and `dtype=`; None: JAX's promotion.
            is_causal: whether to hide keys after the query, if the energy does not.
            force_fp32_for_softmax: not read: energies always have 32 bits.
            einsum_dot_general: None, as the kernels multiply.
            qk_attn_weights_einsum: None likewise.
            attn_weights_value_einsum: None likewise.

        Raises:
            TypeError: an argument is not an array or has the wrong dtype.
            ValueError: shapes that do not match; no `dropout_rng` where weights are dropped; a `dropout_rate` that is
                not a probability; a `module` or a product that is not None; an energy that reads the positions of
                queries, which are not as many as the keys, nor one with a mask; a mask of scores to add, with
                negative numbers, where it is known.
        """
        del precision, force_fp32_for_softmax
        if module is not None:
            raise ValueError(
                "module: wanted None (sow_weights=False), as no matrix of weights is made; energy_attn.record "
                f"observes a model; got {received(module)}"
            )
        for name, given in (
            ("einsum_dot_general", einsum_dot_general),
            ("qk_attn_weights_einsum", qk_attn_weights_einsum),
            ("attn_weights_value_einsum", attn_weights_value_einsum),
        ):
            if given is not None:
                raise ValueError(
                    f"{name}: wanted None, as the kernels multiply, got {received(given)}"
                )
        given = {"query": query, "key": key, "value": value}
        arrays = tuple(jnp.asarray(_check_real(name, x)) for name, x in given.items())
        query, key, value = (promote_dtype or _promoted)(arrays, dtype=dtype)
        lead, energy = query.shape[:-3], self.energy
        shapes = [x.shape for x in (query, key, value)]
        if query.ndim < 3 or any(x[:-3] != lead or len(x) != query.ndim for x in shapes):
            raise ValueError(
                f"query: wanted [*B, T, N, H], and key and value with the same batch axes, got {shapes}"
            )
        if bias is not None:
            bias = _one_batch_axis("bias", bias, lead)
        if mask is not None:
            mask = _one_batch_axis("mask", as_visible("mask", mask), lead)
        q, k, v = (x.reshape(math.prod(lead), *x.shape[-3:]) for x in (query, key, value))
        chance = 1.0 if deterministic else 1.0 - check_finite_number("dropout_rate", dropout_rate)
        if not 0 <= chance <= 1:
            raise ValueError(f"dropout_rate: wanted a probability, got {dropout_rate}")
        shape = q.shape[0], q.shape[1], k.shape[1]
        rows: RowOptions = {"query_positions": query_positions(energy, is_causal, mask, shape)}
        if is_causal and not energy.is_causal:
            energy = dataclasses.replace(energy, is_causal=True)
        if chance == 1:
            out = energy.attention(q, k, v, bias=bias, mask=mask, **rows)
        else:
            keep = _kept(dropout_rng, chance, broadcast_dropout, query, key)
            keep = _one_batch_axis("dropout", keep, lead)
            out, _ = attention_with_dropout(energy, q, k, v, bias, mask, keep, chance, rows)
        return out.reshape(*lead, *out.shape[1:])


def _check_real(name: str, x: object) -> Array:
    """Returns `x` if it is an array without imaginary parts, which promotion would drop."""
    array = check_array(name, x)
    return check_floating(name, x) if jnp.iscomplexobj(array) else array


def _promoted(arrays: tuple[Array, ...], dtype: DTypeLike | None) -> list[Array]:
    if dtype is None:
        dtype = jnp.result_type(*arrays)
        dtype = dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32
    return [x.astype(dtype) for x in arrays]


def _kept(
    rng: PRNGKeyArray | None, chance: float, broadcast: bool, query: Array, key: Array
) -> Bool[Array, "..."]:
    """The weights that are kept, by Flax's random numbers."""
    if rng is None:
        raise ValueError("dropout_rng: wanted a key where weights are dropped, got None")
    lead, (time, heads) = query.shape[:-3], query.shape[-3:-1]
    rows = (1,) * (len(lead) + 1) if broadcast else (*lead, heads)
    return jax.random.bernoulli(rng, chance, (*rows, time, key.shape[-3]))


def _one_batch_axis(name: str, x: Array, lead: tuple[int, ...]) -> Array:
    """An array that broadcasts to `[*lead, N, T, S]` as one that does so to `[B, N, T, S]`."""
    x = jnp.asarray(check_array(name, x))
    if x.ndim > len(lead) + 3:
        raise ValueError(f"{name}: wanted at most {len(lead) + 3} axes, got shape {x.shape}")
    x = x.reshape((1,) * (len(lead) + 3 - x.ndim) + x.shape)
    rest = x.shape[len(lead) :]
    if all(size == 1 for size in x.shape[: len(lead)]):
        return x.reshape(1, *rest)
    try:
        return jnp.broadcast_to(x, (*lead, *rest)).reshape(math.prod(lead), *rest)
    except ValueError:
        raise ValueError(
            f"{name}: wanted batch axes that broadcast to {lead}, got shape {x.shape}"
        ) from None
