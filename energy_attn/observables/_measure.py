"""The observables of a Gibbs measure, as methods."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, overload

import jax.numpy as jnp
from jaxtyping import Array, Float

from energy_attn.kernels.internal import checks, outer, precision, reductions

from ..functional._free_energy import Calls, Parts, both_computed, state_at
from ._at_source import (
    centred_parts,
    check_row_vectors,
    covariance_at,
    covariance_product,
    largest_scores,
    mean_over_keys,
)
from ._entropy import (
    AttentionStatistics,
    ScoreMoments,
    attention_statistics,
    entropy_of,
    mean_score,
    renyi,
    score_statistics,
)
from ._of_keys import AbstractWeights

# The work doubles with each order.
_HIGHEST_ORDER = 8


class AbstractMeasure(AbstractWeights):
    r"""The measure $P_a = e^{s_a - F}$ of each row over its keys, and its moments.

    Every method except `weights` is computed block by block, without the matrix of weights, and
    merged over the mesh of the keys. The arithmetic is in float32, or float64 for float64 arrays. All but
    `sample` are differentiable. A fully masked row yields zeros (index -1 from `sample`).

    Scores include the bias, the `score` and the source of a tilted measure. A sink is one more outcome of the
    measure, of value zero and score $b$: it is part of every mean, of the entropy and of the hull of the values. In a
    union each part has its own. A sink of plus infinity has all the weight; in the observables its score is the largest
    finite number.
    """

    @overload
    def covariance(self, tangent: None = None) -> Float[Array, "*B T N Hv Hv"]: ...
    @overload
    def covariance(self, tangent: Float[Array, "*B T N Hv"]) -> Float[Array, "*B T N Hv"]: ...
    def covariance(self, tangent: Float[Array, "*B T N Hv"] | None = None) -> Float[Array, "..."]:
        r"""The covariance of the values under the attention weights, or its product with a tangent.

        $$\nabla^2 F = \mathrm{Cov}_P(v) = \sum_a P_a\, (v_a - \mathrm{out})(v_a - \mathrm{out})^T$$

        The matrix takes $O(T N H_v^2)$ numbers in memory, and is merged over a mesh in one reduction, as a
        [`CovarianceState`][energy_attn.kernels.CovarianceState]. Its product with a tangent costs
        one flash pass in addition to attention.

        Args:
            tangent: $u$, `[B, T, N, Hv]`, one for each query and head; None returns the matrix.

        Returns:
            `[B, T, N, Hv, Hv]`, or $\nabla^2 F\, u$, `[B, T, N, Hv]`, in the square of value's unit.

        Raises:
            TypeError: `tangent` is not a floating array.
            ValueError: `tangent` has another shape.

        Source: Tree Attention (arXiv 2408.04093), equation 11, second order.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> q, k, v, u = jax.random.normal(jax.random.key(0), (4, 5, 2, 4))
            >>> F = ea.FreeEnergy(is_causal=True).at(q, k, v)
            >>> F.covariance().shape, F.covariance(u).shape
            ((5, 2, 4, 4), (5, 2, 4))
            >>> along = jnp.einsum("tnij,tnj->tni", F.covariance(), u)
            >>> bool(jnp.allclose(along, F.covariance(u), atol=1e-5))
            True
        """
        calls, parts = self._prepared()
        if tangent is None:
            return covariance_at(calls, None, parts).covariance
        tangent = check_row_vectors("tangent", tangent, calls, parts)
        return covariance_product(calls, None, parts, tangent)[1]

    def cumulant(self, tangents: Sequence[Float[Array, "*B T N Hv"]]) -> Float[Array, "*B T N"]:
        r"""The joint cumulant of the values along tangents: a directional derivative of the energy.

        $$\kappa(u_1, \dots, u_n) = \frac{\partial^n F(\sum_i t_i u_i)}
          {\partial t_1 \cdots \partial t_n}\Big|_{t = 0}, \qquad x_i = u_i \cdot v$$

        Order 1 is the mean of $x_1$ and order 2 the covariance of $x_1$ and $x_2$, each at the cost
        of a flash pass. From order 3 on it is a sum of products of central moments $\mu$,

        $$\kappa = \sum_{\pi} (-1)^{|\pi| - 1} (|\pi| - 1)! \prod_{b \in \pi} \mu_b,$$

        over the partitions $\pi$ of the tangents into parts of at least two: $2^n$ products for a block of keys.

        Args:
            tangents: the directions $u_i$, one to eight arrays `[B, T, N, Hv]`, which may be repeated.

        Returns:
            `[B, T, N]`.

        Raises:
            TypeError: `tangents` is not a sequence of floating arrays.
            ValueError: shapes that do not match, no tangents or more than eight.

        Source: Tree Attention (arXiv 2408.04093), equation 11, for $\log Z$ in place of $Z$.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> q, k, v, u = jax.random.normal(jax.random.key(0), (4, 5, 2, 4))
            >>> F = ea.FreeEnergy().at(q, k, v)
            >>> variance = F.cumulant([u, u])
            >>> bool(jnp.allclose(variance, (u * F.covariance(u)).sum(-1), atol=1e-5))
            True
            >>> F.cumulant([u, u, u]).shape  # the third central moment: skewness
            (5, 2)
        """
        calls, parts = self._prepared()
        directions = _check_tangents(tangents, calls, parts)
        if len(directions) == 1:
            return (_mean(calls, parts) * directions[0]).sum(-1)
        if len(directions) == 2:
            product = covariance_product(calls, None, parts, directions[0])[1]
            return (product * directions[1]).sum(-1)
        parts, _ = centred_parts(parts)
        mean = state_at(calls, None, parts).out
        # a repeated tangent has the same moments
        kinds = [next(j for j, y in enumerate(tangents) if y is x) for x in tangents]
        numbers = range(len(directions))
        groups = {
            group: tuple(kinds[i] for i in group)
            for size in range(2, len(directions) + 1)
            for group in itertools.combinations(numbers, size)
        }
        distinct = tuple(dict.fromkeys(groups.values()))
        term = _CentredProducts(distinct)
        result = mean_over_keys(calls, None, parts, term, len(distinct), mean, *directions).out
        moments = {group: result[..., distinct.index(kind)] for group, kind in groups.items()}
        terms = [
            (-1) ** (len(blocks) - 1)
            * math.factorial(len(blocks) - 1)
            * functools.reduce(jnp.multiply, (moments[block] for block in blocks))
            for blocks in _partitions(tuple(numbers))
        ]
        return functools.reduce(jnp.add, terms)

    def moment(self, tangents: Sequence[Float[Array, "*B T N Hv"]]) -> Float[Array, "*B T N"]:
        r"""The joint moment of the values along tangents: a derivative of the partition function.

        $$\mathbb{E}_P\Big[\prod_i u_i \cdot v\Big]
          = \frac{1}{Z} \frac{\partial^n Z(\sum_i t_i u_i)}
          {\partial t_1 \cdots \partial t_n}\Big|_{t = 0}, \qquad Z = e^F$$

        Arguments, result and errors are those of [`cumulant`][energy_attn.Gibbs.cumulant].

        Source: Tree Attention (arXiv 2408.04093), equations 11 and 12.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> q, k, v, u = jax.random.normal(jax.random.key(0), (4, 5, 2, 4))
            >>> F = ea.FreeEnergy().at(q, k, v)
            >>> variance = F.moment([u, u]) - F.moment([u]) ** 2
            >>> bool(jnp.allclose(variance, F.cumulant([u, u]), atol=1e-5))
            True
        """
        calls, parts = self._prepared()
        directions = _check_tangents(tangents, calls, parts)
        if len(directions) == 1:
            return (_mean(calls, parts) * directions[0]).sum(-1)
        term = _CentredProducts((tuple(range(len(directions))),))
        origin = jnp.zeros_like(directions[0])
        return mean_over_keys(calls, None, parts, term, 1, origin, *directions).out[..., 0]

    def entropy(self) -> Float[Array, "*B T N"]:
        r"""The entropy of each attention row.

        $$H = -\sum_a P_a \log P_a = F - \mathbb{E}_P[s]
            = F - \beta\, \frac{\partial F}{\partial\beta}, \qquad s \to \beta s$$

        The scores are linear in the keys, $\mathbb{E}_P[s] = \mathrm{scale}\; q \cdot
        \mathbb{E}_P[k]$, so one flash pass with the keys in place of the values yields both terms.
        (A `bias` takes a second pass.) $e^H$ is the effective number of keys.

        Returns:
            `[B, T, N]` in nats, from 0 to the logarithm of the number of keys (and sinks). Its rounding grows as
            $\epsilon \lvert F \rvert$.

        Source: Tree Attention (arXiv 2408.04093), equation 15 as a thermodynamic potential.

        Examples:
            >>> import jax
            >>> import energy_attn as ea
            >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
            >>> F = ea.FreeEnergy().at(0 * q, k, v)
            >>> float(F.entropy()[0, 0])  # five keys of equal weight: log 5
            1.609...
        """
        mean, lse = mean_score(*self._prepared())
        return entropy_of(mean, lse)

    def renyi(self, order: float) -> Float[Array, "*B T N"]:
        r"""Rényi's entropy of each attention row.

        $$H_\alpha = \frac{1}{1 - \alpha} \log \sum_a P_a^\alpha
            = \frac{F_\alpha - \alpha F}{1 - \alpha}, \qquad F_\alpha = \log \sum_a e^{\alpha s_a}$$

        which falls with $\alpha$: the logarithm of the number of keys at 0, the
        [`entropy`][energy_attn.Gibbs.entropy] at 1, minus the logarithm of the sum of squared weights at 2, and
        $F - \max_a s_a$, minus the logarithm of the largest weight, at infinity. Two walks over the keys, each of one
        product.

        Args:
            order: $\alpha \ge 0$, a real number or `math.inf`.

        Returns:
            `[B, T, N]` in nats, from 0 to the logarithm of the number of keys (and sinks). Close to order 1 its
            rounding grows as $\epsilon / \lvert 1 - \alpha \rvert$.

        Raises:
            TypeError: `order` is not a real number.
            ValueError: `order` is negative or NaN.

        Source: A. Rényi, On Measures of Entropy and Information (1961), equation 1.21.

        Examples:
            >>> import jax
            >>> import energy_attn as ea
            >>> F = ea.FreeEnergy().at(*jax.random.normal(jax.random.key(0), (3, 5, 2, 4)))
            >>> bool((F.renyi(2) < F.entropy()).all()), float(F.renyi(0)[0, 0])  # log 5
            (True, 1.609...)
        """
        return renyi(*self._prepared(), order)

    def statistics(self) -> AttentionStatistics:
        r"""Attention, energy, entropy, mean and largest score of each row, in one kernel pass.

        $$\mathrm{out} = \mathbb{E}_P[v], \qquad F, \qquad H = F - \mathbb{E}_P[s], \qquad
          \mathbb{E}_P[s] = \mathrm{scale}\; q \cdot \mathbb{E}_P[k]$$

        The values of the pass are $[v, k]$: three products where attention alone has two. With a `bias` or a
        `score` the mean takes a second walk over the keys, of one product. The largest score is that of
        [`score_max`][energy_attn.Gibbs.score_max], without the sink.

        Returns:
            A named tuple `(out, energy, entropy, mean_score, score_max)` in float32 (float64): attention
            `[B, T, N, Hv]`, and the energy, the entropy of the weights, the mean and the largest of the scores,
            `[B, T, N]` in nats. A fully masked row has an energy and a largest score of minus infinity, and zeros.

        Raises:
            NotImplementedError: the named implementation declines the wider values.

        Source: Tree Attention (arXiv 2408.04093), equation 15 as a thermodynamic potential.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> F = ea.FreeEnergy(is_causal=True).at(*jax.random.normal(jax.random.key(0), (3, 5, 2, 4)))
            >>> out, energy, entropy, mean, largest = F.statistics()
            >>> bool(jnp.allclose(entropy, F.entropy(), atol=1e-5)), out.shape
            (True, (5, 2, 4))
        """
        keys = len(self._prepared_keys()[0])
        return attention_statistics(*self._prepared(), keys)

    def score_max(self) -> Float[Array, "*B T N"]:
        r"""The largest score of each row.

        $$\max_a s_a, \qquad s_a = \mathrm{scale}\; q \cdot k_a + b_a$$

        over the keys that the row sees: scaled, with score (as a soft cap), bias and source, masked, without the sink.
        It is the last running maximum of the kernel's online softmax. Under `jit` the same pass computes attention, and
        in a recording the model's own; `blockwise` keeps it, and other kernels take a walk over the keys in XLA, as
        meshes do. For QK-clip (MuonClip), which scales the weights of a head down where its scores grow:
        `F.score_max().max((0, 1))` is the largest of each head.

        The derivative is a subgradient, by one walk: the gradient of one of the largest scores, or on a mesh the mean
        of one for each device that holds a largest score.

        Returns:
            `[B, T, N]` in nats; minus infinity for a fully masked row.

        Source: Kimi K2 (arXiv 2507.20534), section 2.1, for QK-clip.

        Examples:
            >>> import jax.numpy as jnp
            >>> import energy_attn as ea
            >>> q, k = jnp.full((1, 1, 1), 3.0), jnp.array([0.5, 2.0]).reshape(2, 1, 1)
            >>> float(ea.FreeEnergy().at(q, k, k).score_max()[0, 0])
            6.0
        """
        return largest_scores(*self._prepared_keys(promote=False))

    def score_moments(self) -> ScoreMoments:
        r"""Mean and variance of the scores of each row: minus its internal energy, and its heat capacity.

        $$\mathbb{E}_P[s] = \frac{\partial F}{\partial\beta}, \qquad
          \mathrm{Var}_P(s) = \frac{\partial^2 F}{\partial\beta^2}, \qquad s \to \beta s,\ \beta = 1$$

        Two flash passes.

        Returns:
            A named tuple `(mean, variance)`, `[B, T, N]` in nats and in nats squared.

        Source: Tree Attention (arXiv 2408.04093), equation 15 as a thermodynamic potential.

        Examples:
            >>> import jax
            >>> import energy_attn as ea
            >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
            >>> mean, variance = ea.FreeEnergy().at(q, k, v).score_moments()
            >>> mean.shape, bool((variance > 0).all())
            ((5, 2), True)
        """
        return score_statistics(*self._prepared(), width=1).scores

    def temperature_sensitivity(self) -> Float[Array, "*B T N Hv"]:
        r"""The derivative of attention in the inverse temperature: the covariance of scores and values.

        $$\frac{\partial}{\partial\beta} \nabla F = \mathrm{Cov}_P(s, v)
          = \sum_a P_a (s_a - \mathbb{E}_P[s])\, v_a, \qquad s \to \beta s,\ \beta = 1$$

        Two flash passes.

        Returns:
            `[B, T, N, Hv]`, value's unit times nats.

        Source: Tree Attention (arXiv 2408.04093), equation 15 as a thermodynamic potential.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
            >>> at = lambda beta: ea.attention(q, k, v, scale=beta / 2)  # 1 / sqrt(4) is one half
            >>> difference = (at(1.01) - at(0.99)) / 0.02
            >>> found = ea.FreeEnergy().at(q, k, v).temperature_sensitivity()
            >>> bool(jnp.allclose(found, difference, atol=1e-4))
            True
        """
        return score_statistics(*self._prepared()).cross_covariance


def _mean(calls: Calls, parts: Parts) -> Array:
    # one pass with attention and the energies
    return both_computed(*state_at(calls, None, parts))[0]


def _check_tangents(tangents: object, calls: Calls, parts: Parts) -> list[Array]:
    if not isinstance(tangents, Sequence):
        raise TypeError(f"tangents: wanted a sequence of arrays, got {checks.received(tangents)}")
    if not 1 <= len(tangents) <= _HIGHEST_ORDER:
        raise ValueError(
            f"tangents: wanted from one to {_HIGHEST_ORDER} arrays, got {len(tangents)}"
        )
    return [check_row_vectors(f"tangents[{i}]", x, calls, parts) for i, x in enumerate(tangents)]


class _CentredProducts(NamedTuple):
    """A block term: means of products of the numbers $u_i \\cdot (v - \\mathrm{mean})$, one per group."""

    groups: tuple[tuple[int, ...], ...]

    def __call__(self, block: reductions.ScoreBlock, mean: Array, *tangents: Array) -> Array:
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
    result: list[list[tuple[int, ...]]] = []
    for size in range(1, len(others) + 1):
        for mates in itertools.combinations(others, size):
            rest = tuple(x for x in others if x not in mates)
            result += [[(first, *mates), *parts] for parts in _partitions(rest)]
    return result
