"""Attention in the form that Flax's layers call."""

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from energy_attn.kernels.internal import BoundScore, RowOptions, checks, jaxprs, split_score
from energy_attn.kernels.scores import ScoreIndices

from ..core._module import FreeEnergy, attention_with_dropout, energy_of
from ..functional._free_energy import ModuleOptions


def attention_fn(
    energy: FreeEnergy | None = None, **options: Unpack[ModuleOptions]
) -> "AttentionFn":
    r"""Attention for the layers of Flax: the gradient of a free energy in the source, at zero.

    $$\mathrm{out} = \nabla_\zeta F(\zeta)\big|_{\zeta = 0}$$

    for `attention_fn=` of `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadDotProductAttention`, instead of
    their `dot_product_attention`.

    Args:
        energy: a [`FreeEnergy`][energy_attn.FreeEnergy]; None makes one from the options.
        **options: the fields of the energy, such as `is_causal=True`, `local_window_size=`, `mask=`, `score=`, `sink=`,
            `implementation=` or `parallel=`.

    Returns:
        A module with the signature of `flax.nnx.dot_product_attention`. If it has arrays, pass it to a layer of NNX as
        `nnx.data(attention_fn(sink=...))`. The arrays are no `nnx.Param`s: a layer's gradients and optimiser do not
        change them.

    Raises:
        TypeError: `energy` is not a `FreeEnergy`; an unknown option.
        ValueError: both an `energy` and options.

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
    return AttentionFn(energy_of(energy, options))


class AttentionFn(eqx.Module):
    """The result of [`attention_fn`][energy_attn.flax.attention_fn], which Flax's layers call.

    Attributes:
        energy: the free energy whose gradient is attention.
    """

    energy: FreeEnergy

    def __call__(
        self,
        query: Float[Array, "*#B T N H"],
        key: Float[Array, "*#B S K H"],
        value: Float[Array, "*#B S K Hv"],
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
        """Computes attention with the arguments of `dot_product_attention` in `flax.nnx` and `flax.linen`.

        Fully masked rows are zero, where Flax returns the mean of the values.

        Positions count from 0. A call with one query and several keys is a decoding step: the query's position is the
        last key that the mask shows to any row, as in Flax's caches.

        Args:
            query: `[*B, T, N, H]`, with any number of batch axes.
            key: `[*B, S, K, H]`; `K` divides `N`.
            value: `[*B, S, K, Hv]`.
            bias: added to the scaled scores; broadcasts to `[*B, N, T, S]`.
            mask: boolean or numeric, broadcasts to `[*B, N, T, S]`; False or zero hides a key.
            broadcast_dropout: whether all batch entries and heads drop the same weights.
            dropout_rng: the key for dropout; it drops the same weights as Flax.
            dropout_rate: the probability that a weight is dropped.
            deterministic: whether to turn dropout off.
            dtype: the dtype of the computation; None: the promoted dtype of the arrays.
            precision: ignored: products are as exact as their dtype allows.
            module: must be None: no matrix of weights is stored (`sow_weights=`).
            promote_dtype: maps `(query, key, value)` and `dtype=` to arrays of one dtype; None: JAX's promotion.
            is_causal: whether to hide keys after the query, in addition to the energy's masks.
            force_fp32_for_softmax: ignored: energies are always in float32 or wider.
            einsum_dot_general: must be None.
            qk_attn_weights_einsum: must be None.
            attn_weights_value_einsum: must be None.

        Raises:
            TypeError: an argument is not an array or has the wrong dtype.
            ValueError: shapes that do not match; dropout without `dropout_rng`; a `dropout_rate` that is not a
                probability; a `module` or an einsum that is not None; an energy that reads query positions, unless
                there are as many queries as keys, or one query and a mask; a concrete mask with negative
                numbers, which is a bias.
        """
        del precision, force_fp32_for_softmax
        _check_unsupported(
            module=module,
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        for name, x in (("query", query), ("key", key), ("value", value)):
            if jnp.iscomplexobj(checks.check_array(name, x)):
                checks.check_floating(name, x)  # promotion would drop the imaginary parts
        arrays = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
        query, key, value = (promote_dtype or _promoted)(arrays, dtype=dtype)
        energy = self.energy
        if mask is not None:
            mask = checks.as_visible("mask", mask)
        chance = (
            1.0 if deterministic else 1.0 - checks.check_finite_number("dropout_rate", dropout_rate)
        )
        if not 0 <= chance <= 1:
            raise ValueError(f"dropout_rate: wanted a probability, got {dropout_rate}")
        positions = _query_positions(energy, is_causal, mask, query.shape[-3], key.shape[-3])
        rows: RowOptions = {"query_positions": positions}
        if is_causal and not energy.is_causal:
            energy = dataclasses.replace(energy, is_causal=True)
        if chance == 1:
            return energy.attention(query, key, value, bias=bias, mask=mask, **rows)
        if dropout_rng is None:
            raise ValueError("dropout_rng: wanted a key where weights are dropped, got None")
        *lead, query_len, heads, _ = query.shape
        sizes = [1] * len(query.shape[:-2]) if broadcast_dropout else [*lead, heads]
        keep = jax.random.bernoulli(dropout_rng, chance, (*sizes, query_len, key.shape[-3]))
        arrays = query, key, value
        return attention_with_dropout(energy, *arrays, bias, mask, keep, chance, rows)[0]


def _check_unsupported(module: object, **einsums: object) -> None:
    if module is not None:
        raise ValueError(
            "module: wanted None (sow_weights=False), as no matrix of weights is stored; energy_attn.record "
            f"observes a model; got {checks.received(module)}"
        )
    for name, x in einsums.items():
        if x is not None:
            raise ValueError(f"{name}: wanted None, got {checks.received(x)}")


def _promoted(arrays: tuple[Array, ...], dtype: DTypeLike | None) -> list[Array]:
    if dtype is None:
        dtype = jnp.result_type(*arrays)
        dtype = dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32
    return [x.astype(dtype) for x in arrays]


def _query_positions(
    energy: FreeEnergy,
    is_causal: bool,
    mask: Bool[Array, "..."] | None,
    query_len: int,
    key_len: int,
) -> Int[Array, "1 T"] | None:
    """Returns the positions of the queries of a call; None counts from 0.

    A decoding layer calls with one query, all slots of its cache as keys, and a mask whose last visible slot
    is the query's own.

    Raises `ValueError` if positions are read (by the energy, or by `is_causal` for one query) but unknown.
    """
    if query_len == key_len or not ((is_causal and query_len == 1) or _reads_queries(energy)):
        return None
    if query_len != 1 or mask is None or mask.shape[-1] != key_len:
        raise ValueError(
            "query: wanted as many queries as keys, or one query and a cache's mask, for an energy that reads "
            f"positions (FreeEnergy.attention takes query_positions=); got {query_len} and {key_len}"
        )
    visible = mask.any(tuple(range(mask.ndim - 1)))
    slots = jnp.arange(key_len, dtype=jnp.int32)
    return jnp.max(jnp.where(visible, slots, 0), initial=0).reshape(1, 1)


def _reads_queries(energy: FreeEnergy) -> bool:
    if energy.is_causal or energy.local_window_size is not None:
        return True
    if energy.mask is not None:
        leaves, tree = jax.tree.flatten(energy.mask)
        entries = zip(map(jnp.asarray, leaves), energy.mask.ranks, strict=True)
        one = jax.tree.unflatten(tree, [x[0] if x.ndim > rank else x for x, rank in entries])
        number = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        if jaxprs.reads_first(one.visible, number, number):
            return True
    structure, arrays = split_score(energy.score)
    if structure is None or not structure.uses_positions:
        return False
    bound = BoundScore(structure, tuple(map(jnp.asarray, arrays)))
    index = jnp.zeros((1,) * 4, jnp.int32)

    def scores(query: Array, raw: Array) -> Any:
        return bound(raw, ScoreIndices(index, index, query, index))

    return jaxprs.reads_first(scores, index, jnp.zeros(index.shape, jnp.float32))
