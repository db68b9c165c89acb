"""Cumulants and moments of the values under the attention weights: derivatives of the energy."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from energy_attn.kernels.internal import ScoreBlock, outer, precision, received

from ..core._free_energy import Arrays
from ._at_source import (
    centred,
    check_row_vectors,
    covariance_at,
    covariance_product,
    expectation_at,
    prepare_with_source,
    state_at,
)

# The work doubles with each order.
_HIGHEST_ORDER = 8


def covariance(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    tangent: Float[Array, "*B T N Hv"] | None = None,
    source: Float[Array, "*B T N Hv"] | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    **options: Any,
) -> Float[Array, "..."]:
    r"""The covariance of the values under the attention weights, or its product with a tangent.

    $$\nabla^2 F(\zeta) = \mathrm{Cov}_{P_\zeta}(v)
      = \sum_a P_{\zeta,a}\, (v_a - \mathrm{out})(v_a - \mathrm{out})^T, \qquad
      P_\zeta \propto e^{s + \zeta \cdot v}$$

    The matrix is summed block by block, with $O(T N H_v^2)$ numbers in memory, and is merged over
    a mesh by the law of total covariance in one reduction, as a
    [`CovarianceState`][energy_attn.kernels.CovarianceState]. Its product with a tangent costs one
    flash pass in addition to attention. Both are differentiable in reverse mode.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`, any floating dtype.
        key: `[B, S, K, H]` or `[S, K, H]`; `K` divides `N`.
        value: `[B, S, K, Hv]` or `[S, K, Hv]`.
        tangent: $u$, `[B, T, N, Hv]`, one for each query and head; None returns the matrix.
        source: $\zeta$, `[B, T, N, Hv]`; None is zero.
        bias: added to the scaled scores, as in [`free_energy`][energy_attn.free_energy].
        mask: boolean, likewise.
        **options: as for [`free_energy`][energy_attn.free_energy], `parallel` and
            `implementation` included.

    Returns:
        `[B, T, N, Hv, Hv]`, or $\nabla^2 F\, u$, `[B, T, N, Hv]`, in the square of value's unit;
        float32, or float64 for float64 arrays. Zero for a fully masked row.

    Raises:
        TypeError: an argument is not an array or has the wrong dtype, or an unknown option.
        ValueError: shapes that do not match, values out of range.

    Source: Tree Attention (arXiv 2408.04093), equation 11, second order.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v, u = jax.random.normal(jax.random.key(0), (4, 5, 2, 4))
        >>> matrix = ea.covariance(q, k, v, is_causal=True)
        >>> along = ea.covariance(q, k, v, tangent=u, is_causal=True)
        >>> matrix.shape, along.shape
        ((5, 2, 4, 4), (5, 2, 4))
        >>> bool(jnp.allclose(jnp.einsum("tnij,tnj->tni", matrix, u), along, atol=1e-5))
        True
    """
    call, source, arrays = prepare_with_source(query, key, value, source, bias, mask, **options)
    if tangent is None:
        return covariance_at(call, source, arrays).covariance
    return covariance_product(call, source, arrays, check_row_vectors("tangent", tangent, arrays))[
        1
    ]


def cumulant(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    tangents: Sequence[Float[Array, "*B T N Hv"]],
    source: Float[Array, "*B T N Hv"] | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    **options: Any,
) -> Float[Array, "*B T N"]:
    r"""The joint cumulant of the values along tangents: a directional derivative of the energy.

    $$\kappa(u_1, \dots, u_n) = \frac{\partial^n F(\zeta + \sum_i t_i u_i)}
      {\partial t_1 \cdots \partial t_n}\Big|_{t = 0}, \qquad x_i = u_i \cdot v$$

    Order 1 is the mean of $x_1$ and order 2 the covariance of $x_1$ and $x_2$, each at the cost of a
    flash pass. From order 3 on it is a sum of products of central moments $\mu$,

    $$\kappa = \sum_{\pi} (-1)^{|\pi| - 1} (|\pi| - 1)! \prod_{b \in \pi} \mu_b,$$

    over the partitions $\pi$ of the tangents into parts of at least two. The moments are summed
    block by block in $2^n$ products. Differentiable in reverse mode.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`, any floating dtype.
        key: `[B, S, K, H]` or `[S, K, H]`; `K` divides `N`.
        value: `[B, S, K, Hv]` or `[S, K, Hv]`.
        tangents: the directions $u_i$, one to eight arrays `[B, T, N, Hv]`. An array may be
            repeated.
        source: $\zeta$, `[B, T, N, Hv]`; None is zero.
        bias: added to the scaled scores, as in [`free_energy`][energy_attn.free_energy].
        mask: boolean, likewise.
        **options: as for [`free_energy`][energy_attn.free_energy].

    Returns:
        `[B, T, N]`, in the product of the units of the $x_i$; float32, or float64. Zero for a
        fully masked row.

    Raises:
        TypeError: an argument is not an array or has the wrong dtype, or an unknown option.
        ValueError: shapes that do not match, no tangents or more than eight.

    Source: Tree Attention (arXiv 2408.04093), equation 11, for $\log Z$ in place of $Z$.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v, u = jax.random.normal(jax.random.key(0), (4, 5, 2, 4))
        >>> variance = ea.cumulant(q, k, v, tangents=(u, u))
        >>> bool(jnp.allclose(variance, (u * ea.covariance(q, k, v, tangent=u)).sum(-1), atol=1e-5))
        True
        >>> ea.cumulant(q, k, v, tangents=(u, u, u)).shape  # the third central moment: skewness
        (5, 2)
    """
    call, source, arrays = prepare_with_source(query, key, value, source, bias, mask, **options)
    directions = _check_tangents(tangents, arrays)
    if len(directions) == 1:
        return (state_at(call, source, arrays).out * directions[0]).sum(-1)
    if len(directions) == 2:
        return (covariance_product(call, source, arrays, directions[0])[1] * directions[1]).sum(-1)
    arrays, _ = centred(arrays)
    mean = state_at(call, source, arrays).out
    # a repeated tangent has the same moments
    kinds = [next(j for j, y in enumerate(tangents) if y is x) for x in tangents]
    numbers = range(len(directions))
    groups = {
        group: tuple(kinds[i] for i in group)
        for size in range(2, len(directions) + 1)
        for group in itertools.combinations(numbers, size)
    }
    wanted = tuple(dict.fromkeys(groups.values()))
    term = _CentredProducts(wanted)
    found = expectation_at(call, source, arrays, term, len(wanted), mean, *directions).out
    moments = {group: found[..., wanted.index(kind)] for group, kind in groups.items()}
    terms = [
        (-1) ** (len(parts) - 1)
        * math.factorial(len(parts) - 1)
        * functools.reduce(jnp.multiply, (moments[part] for part in parts))
        for parts in _partitions(tuple(numbers))
    ]
    return functools.reduce(jnp.add, terms)


def moment(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    tangents: Sequence[Float[Array, "*B T N Hv"]],
    source: Float[Array, "*B T N Hv"] | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    **options: Any,
) -> Float[Array, "*B T N"]:
    r"""The joint moment of the values along tangents: a derivative of the partition function.

    $$\mathbb{E}_{P_\zeta}\Big[\prod_i u_i \cdot v\Big]
      = \frac{1}{Z(\zeta)} \frac{\partial^n Z(\zeta + \sum_i t_i u_i)}
      {\partial t_1 \cdots \partial t_n}\Big|_{t = 0}, \qquad Z = e^F$$

    Summed block by block and merged over a mesh as attention is. Differentiable in reverse mode.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`, any floating dtype.
        key: `[B, S, K, H]` or `[S, K, H]`; `K` divides `N`.
        value: `[B, S, K, Hv]` or `[S, K, Hv]`.
        tangents: the directions $u_i$, one to eight arrays `[B, T, N, Hv]`.
        source: $\zeta$, `[B, T, N, Hv]`; None is zero.
        bias: added to the scaled scores, as in [`free_energy`][energy_attn.free_energy].
        mask: boolean, likewise.
        **options: as for [`free_energy`][energy_attn.free_energy].

    Returns:
        `[B, T, N]`, float32 or float64. Zero for a fully masked row.

    Raises:
        TypeError: an argument is not an array or has the wrong dtype, or an unknown option.
        ValueError: shapes that do not match, no tangents or more than eight.

    Source: Tree Attention (arXiv 2408.04093), equations 11 and 12.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v, u = jax.random.normal(jax.random.key(0), (4, 5, 2, 4))
        >>> first, second = ea.moment(q, k, v, tangents=[u]), ea.moment(q, k, v, tangents=[u, u])
        >>> bool(jnp.allclose(second - first**2, ea.cumulant(q, k, v, tangents=[u, u]), atol=1e-5))
        True
    """
    call, source, arrays = prepare_with_source(query, key, value, source, bias, mask, **options)
    directions = _check_tangents(tangents, arrays)
    if len(directions) == 1:
        return (state_at(call, source, arrays).out * directions[0]).sum(-1)
    term = _CentredProducts((tuple(range(len(directions))),))
    origin = jnp.zeros_like(directions[0])
    return expectation_at(call, source, arrays, term, 1, origin, *directions).out[..., 0]


def _check_tangents(tangents: Any, arrays: Arrays) -> list[Array]:
    if not isinstance(tangents, Sequence):
        raise TypeError(f"tangents: wanted a sequence of arrays, got {received(tangents)}")
    if not 1 <= len(tangents) <= _HIGHEST_ORDER:
        raise ValueError(
            f"tangents: wanted from one to {_HIGHEST_ORDER} arrays, got {len(tangents)}"
        )
    return [check_row_vectors(f"tangents[{i}]", x, arrays) for i, x in enumerate(tangents)]


class _CentredProducts(NamedTuple):
    """A block term: means of products of the numbers $u_i \\cdot (v - \\mathrm{mean})$, one per group."""

    groups: tuple[tuple[int, ...], ...]

    def __call__(self, block: ScoreBlock, mean: Array, *tangents: Array) -> Array:
        value, exact = block.value, precision(block.value.dtype)
        used = {i: tangents[i] for group in self.groups for i in group}
        along = {
            i: outer(u, value, exact) - (u * mean).sum(-1, keepdims=True) for i, u in used.items()
        }

        def product(group: tuple[int, ...]) -> Array:
            factors = (along[i] for i in group)
            return functools.reduce(jnp.multiply, factors, block.weights).sum(-1)

        return jnp.stack([product(group) for group in self.groups], -1)


def _partitions(items: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """All partitions into groups of at least two."""
    if not items:
        return [[]]
    first, *others = items
    found: list[list[tuple[int, ...]]] = []
    for size in range(1, len(others) + 1):
        for mates in itertools.combinations(others, size):
            rest = tuple(x for x in others if x not in mates)
            found += [[(first, *mates), *parts] for parts in _partitions(rest)]
    return found
