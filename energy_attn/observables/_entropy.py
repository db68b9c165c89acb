"""The scores under the attention weights: entropy, mean, variance, and covariance with the values."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from energy_attn.kernels.internal import ScoreBlock, holds_keys, outer, precision, product

from ..core._free_energy import Arrays, Prepared, attend_checked, check_at
from ._at_source import (
    covariance_product,
    expectation_at,
    prepare_widened,
    prepare_with_source,
    state_at,
)


class ScoreMoments(NamedTuple):
    """Mean and variance of the scores of a row under its attention weights, both `[B, T, N]`.

    Attributes:
        mean: in nats.
        variance: in nats squared.

    Examples:
        >>> import jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k = jnp.ones((1, 1, 1)), jnp.array([0.0, 2.0]).reshape(2, 1, 1)
        >>> mean, variance = ea.score_moments(0 * q, k, k)  # all scores are zero
        >>> mean.item(), variance.item()
        (0.0, 0.0)
    """

    mean: Float[Array, "*B T N"]
    variance: Float[Array, "*B T N"]


def entropy(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    source: Float[Array, "*B T N Hv"] | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    **options: Any,
) -> Float[Array, "*B T N"]:
    r"""The entropy of each attention row, without the matrix of weights.

    $$H = -\sum_a P_a \log P_a = F - \mathbb{E}_P[s] = F - \beta\, \frac{\partial F}{\partial\beta},
      \qquad s \to \beta s$$

    The scores are linear in the keys, $\mathbb{E}_P[s] = \mathrm{scale}\; q \cdot \mathbb{E}_P[k]$, so
    one flash pass with the keys in place of the values yields both terms. (A `bias` takes a
    second pass.) $e^H$ is the effective number of keys. Differentiable in reverse mode.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`, any floating dtype.
        key: `[B, S, K, H]` or `[S, K, H]`; `K` divides `N`.
        value: `[B, S, K, Hv]` or `[S, K, Hv]`; used only with a source.
        source: $\zeta$, `[B, T, N, Hv]`, for the entropy of $P_\zeta$; None is zero.
        bias: added to the scaled scores, as in [`free_energy`][energy_attn.free_energy].
        mask: boolean, likewise.
        **options: as for [`free_energy`][energy_attn.free_energy].

    Returns:
        `[B, T, N]` in nats, from 0 to the logarithm of the number of keys; float32, or float64.
        Zero for a fully masked row.

    Raises:
        TypeError: an argument is not an array or has the wrong dtype, or an unknown option.
        ValueError: shapes that do not match, values out of range.

    Source: Tree Attention (arXiv 2408.04093), equation 15 as a thermodynamic potential.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> float(ea.entropy(0 * q, k, v)[0, 0])  # five keys of equal weight: log 5
        1.609...
    """
    call, source, arrays = prepare_with_source(query, key, value, source, bias, mask, **options)
    mean, lse = _mean_score(call, source, arrays)
    return entropy_of(mean, lse)


def score_moments(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    **options: Any,
) -> ScoreMoments:
    r"""Mean and variance of the scores of each row: minus its internal energy, and its heat capacity.

    $$\mathbb{E}_P[s] = \frac{\partial F}{\partial\beta}, \qquad
      \mathrm{Var}_P(s) = \frac{\partial^2 F}{\partial\beta^2}, \qquad s \to \beta s,\ \beta = 1$$

    Two flash passes; differentiable in reverse mode.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`, any floating dtype.
        key: `[B, S, K, H]` or `[S, K, H]`; `K` divides `N`.
        value: `[B, S, K, Hv]` or `[S, K, Hv]`; unused.
        bias: part of the scores, as in [`free_energy`][energy_attn.free_energy].
        mask: boolean, likewise.
        **options: as for [`free_energy`][energy_attn.free_energy].

    Returns:
        `(mean, variance)`, `[B, T, N]` each, in nats and their square; float32, or float64. Zero for
        a fully masked row.

    Raises:
        TypeError: an argument is not an array or has the wrong dtype, or an unknown option.
        ValueError: shapes that do not match, values out of range.

    Source: Tree Attention (arXiv 2408.04093), equation 15 as a thermodynamic potential.

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> mean, variance = ea.score_moments(q, k, v)
        >>> mean.shape, bool((variance > 0).all())
        ((5, 2), True)
    """
    call, arrays = prepare_widened(query, key, value, bias, mask, **options)
    return _score_statistics(call, arrays, arrays.value[..., :1]).scores


def temperature_sensitivity(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    **options: Any,
) -> Float[Array, "*B T N Hv"]:
    r"""The derivative of attention in the inverse temperature: the covariance of scores and values.

    $$\frac{\partial}{\partial\beta} \nabla F = \mathrm{Cov}_P(s, v)
      = \sum_a P_a (s_a - \mathbb{E}_P[s])\, v_a, \qquad s \to \beta s,\ \beta = 1$$

    Two flash passes; differentiable in reverse mode.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`, any floating dtype.
        key: `[B, S, K, H]` or `[S, K, H]`; `K` divides `N`.
        value: `[B, S, K, Hv]` or `[S, K, Hv]`.
        bias: part of the scores, as in [`free_energy`][energy_attn.free_energy].
        mask: boolean, likewise.
        **options: as for [`free_energy`][energy_attn.free_energy].

    Returns:
        `[B, T, N, Hv]`, value's unit times nats; float32, or float64. Zero for a fully
        masked row.

    Raises:
        TypeError: an argument is not an array or has the wrong dtype, or an unknown option.
        ValueError: shapes that do not match, values out of range.

    Source: Tree Attention (arXiv 2408.04093), equation 15 as a thermodynamic potential.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> at = lambda beta: ea.attention(q, k, v, scale=beta / 2)  # 1 / sqrt(4) is one half
        >>> difference = (at(1.01) - at(0.99)) / 0.02
        >>> bool(jnp.allclose(ea.temperature_sensitivity(q, k, v), difference, atol=1e-4))
        True
    """
    call, arrays = prepare_widened(query, key, value, bias, mask, **options)
    return _score_statistics(call, arrays, arrays.value).cross_covariance


class RowObservables(NamedTuple):
    """The quantities of an energy report, for each row."""

    energy: Float[Array, "*B T N"]
    entropy: Float[Array, "*B T N"]
    heat_capacity: Float[Array, "*B T N"]
    variance: Float[Array, "*B T N"]  # tr Σ
    out: Float[Array, "*B T N Hv"]


def row_observables(call: Prepared, arrays: Arrays) -> RowObservables:
    """Energy, entropy, heat capacity and trace of the covariance of each row, and attention.

    About three flash passes. Raises as the kernels do.
    """
    found = _score_statistics(call, arrays, arrays.value)
    trace = expectation_at(call, None, arrays, _squared_distance_term, 1, found.out).out[..., 0]
    return RowObservables(
        found.lse,
        entropy_of(found.scores.mean, found.lse),
        found.scores.variance,
        jnp.maximum(trace, 0.0),
        found.out,
    )


def entropy_of(mean: Array, lse: Array) -> Array:
    """The entropy from the mean of the scores and the energy; 0 for a fully masked row."""
    seen = holds_keys(lse)
    # a difference of two large numbers, which only rounding makes negative
    return jnp.where(seen, jnp.maximum(jnp.where(seen, lse, 0.0) - mean, 0.0), 0.0)


def _mean_score(call: Prepared, source: Array | None, arrays: Arrays) -> tuple[Array, Array]:
    if arrays.bias is not None:
        found = expectation_at(call, source, arrays, _score_term, 1)
        return found.out[..., 0], found.lse
    given = check_at(call, source, arrays)
    operands = given.operands
    out, lse = attend_checked(call, given._replace(operands=operands._replace(value=operands.key)))
    query = operands.query if given.batched else operands.query[0]
    return given.settings.scale * (query * out).sum(-1), lse


class _ScoreStatistics(NamedTuple):
    scores: ScoreMoments
    out: Array  # E[v]
    cross_covariance: Array  # Cov(s, v)
    lse: Array


def _score_statistics(call: Prepared, arrays: Arrays, value: Array) -> _ScoreStatistics:
    if arrays.bias is not None:
        return _biased_score_statistics(call, arrays._replace(value=value))
    # With values v' = [k, v] the score is u·v' for u = [scale q, 0], and Cov(v') u contains both
    # Cov(k) scale q and Cov(v, s).
    given = check_at(call, None, arrays)
    query = given.operands.query if given.batched else given.operands.query[0]
    along, width = query * given.settings.scale, query.shape[-1]
    joined = arrays._replace(value=jnp.concatenate([arrays.key, value], -1))
    tangent = jnp.pad(along, [(0, 0)] * (along.ndim - 1) + [(0, value.shape[-1])])
    state, found = covariance_product(call, None, joined, tangent)
    mean = (along * state.out[..., :width]).sum(-1)
    variance = jnp.maximum((along * found[..., :width]).sum(-1), 0.0)
    scores = ScoreMoments(mean, variance)
    return _ScoreStatistics(scores, state.out[..., width:], found[..., width:], state.lse)


def _biased_score_statistics(call: Prepared, arrays: Arrays) -> _ScoreStatistics:
    mean, lse = _mean_score(call, None, arrays)
    width = arrays.value.shape[-1]
    found = expectation_at(call, None, arrays, _deviation_terms, 1 + width, mean[..., None]).out
    out = state_at(call, None, arrays).out
    return _ScoreStatistics(ScoreMoments(mean, found[..., 0]), out, found[..., 1:], lse)


# Block terms of expectations. A hidden key has the weight 0 and the score minus infinity.
def _finite(block: ScoreBlock) -> Array:
    return jnp.where(jnp.isneginf(block.scores), 0.0, block.scores)


def _score_term(block: ScoreBlock) -> Array:
    return (block.weights * _finite(block)).sum(-1, keepdims=True)


def _deviation_terms(block: ScoreBlock, mean: Array) -> Array:
    apart = _finite(block) - mean
    weighted = block.weights * apart
    own = (weighted * apart).sum(-1, keepdims=True)
    return jnp.concatenate([own, product(weighted, block.value, precision(mean.dtype))], -1)


def _squared_distance_term(block: ScoreBlock, mean: Array) -> Array:
    # |v - m|² = |v|² - 2 v·m + |m|², with the block's mean as the origin
    origin = block.value.mean(1, keepdims=True)
    value, mean = block.value - origin, mean - origin
    cross = outer(mean, value, precision(mean.dtype))
    squares = (value**2).sum(-1)[:, None, :] + (mean**2).sum(-1, keepdims=True)
    return (block.weights * (squares - 2 * cross)).sum(-1, keepdims=True)
