"""Sparse attention: the gradient of a maximum that Tsallis' entropy regularises, instead of Shannon's."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    CallPolicy,
    autodiff,
    checks,
    holds_keys,
    precision,
    product,
    safe_shift,
    unfused,
)

from ..functional._citation import cite
from ..functional._free_energy import Calls, Parts, Source, directional, unmoved
from ..observables._at_source import (
    HashablePartial,
    promoted,
    score_maximum_at,
    sinks_as_keys,
    sum_over_keys,
)

_MOST_STEPS = 200


@dataclasses.dataclass(frozen=True)
class Tsallis:
    r"""Tsallis' entropy, which makes attention sparse: $\alpha$-entmax in the place of softmax.

    $$F(\zeta) = \max_{p \ge 0,\, \sum p = 1} \Big\{ \sum_a p_a (s_a + \zeta \cdot v_a) + H_\alpha(p) \Big\},
      \qquad H_\alpha(p) = \frac{1}{\alpha (\alpha - 1)} \sum_a (p_a - p_a^\alpha)$$

    Attention is still $\nabla_\zeta F$, the mean of the values under the maximiser

    $$p_a = \big[(\alpha - 1)\, s_a - \tau\big]_+^{1/(\alpha - 1)}$$

    which is exactly zero for keys with low scores. As $\alpha \to 1$ this is the free energy; 2 is sparsemax. The
    threshold $\tau$ is the root of $\sum_a p_a = 1$, found by Newton's method from the left, which never overshoots. A
    step sums two numbers per row over the keys, also over a mesh. Derivatives of any order are those of the root.

    For [`FreeEnergy(regulariser=)`][energy_attn.FreeEnergy], its call and its `attention`; `at` raises.

    Attributes:
        alpha: $\alpha$, above 1 and up to 2.

    Raises:
        TypeError: no number.
        ValueError: a number that is not above 1 and up to 2.

    Source: Sparse sequence-to-sequence models (arXiv 1905.05702), equations 9 to 11; Adaptively sparse
    transformers (arXiv 1909.00015).

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> energy = ea.FreeEnergy(regulariser=ea.Tsallis(1.5))
        >>> out = jax.grad(lambda z: energy(q, k, v, source=z).sum())(jnp.zeros(q.shape))
        >>> bool(jnp.allclose(energy.attention(q, k, v), out, atol=1e-5))
        True
    """

    alpha: float = 1.5

    def __post_init__(self) -> None:
        alpha = checks.check_finite_number("alpha", self.alpha)
        if not 1 < alpha <= 2:
            raise ValueError(f"alpha: wanted a number above 1 and up to 2, got {alpha}")


def tsallis_state(
    regulariser: Tsallis, calls: Calls, source: Source, parts: Parts
) -> AttentionState:
    for call in calls:
        if "blockwise" not in call.policy.kernels:
            raise NotImplementedError(
                "implementation: wanted 'blockwise' or None with a regulariser, got "
                f"{call.policy.kernels}"
            )
        if call.plan is not None and call.plan.local:
            raise NotImplementedError(
                "regulariser: wanted None inside a jax.shard_map over the axes of parallel, "
                f"got {regulariser}"
            )
    cite("entmax")
    dtype = parts[0].value.dtype
    calls, parts = sinks_as_keys(calls, promoted(parts))
    # the threshold is computed by XLA's operations, whatever implementation the call names
    calls = tuple(x._replace(policy=CallPolicy(("blockwise",))) for x in calls)
    args = parts, None if source is None else jnp.asarray(source)
    threshold = autodiff.function_call(_FindThreshold(regulariser, calls), args)
    width = parts[0].value.shape[-1]
    term = HashablePartial(_moments, (regulariser.alpha,))
    result = _sums(term, width + 2, calls, args, threshold)
    seen, alpha = holds_keys(threshold.largest), regulariser.alpha
    # the sum of the weights is 1 up to rounding; without a weight, as where a score is NaN, this is NaN
    out = result[..., :-2] / jnp.where(seen[..., None], result[..., -1:], 1.0)
    # F = max s + (t + 1/α) / (α - 1) + Σ [(α - 1) s - τ]₊^{α / (α - 1)} / α
    excess = (threshold.below + 1 / alpha) / (alpha - 1) + result[..., -2] / alpha
    energy = threshold.largest + jnp.where(seen, excess, 0.0)
    return AttentionState(jnp.where(seen[..., None], out, 0.0).astype(dtype), energy)


class _Threshold(NamedTuple):
    r"""The terms of $\tau = (\alpha - 1) \max_a s_a + t$ of each row, whose sum would lose accuracy."""

    largest: Array  # $\max_a s_a$, held constant in derivatives; -inf in a fully masked row
    below: Array  # $t$, from -1 to 0, with the derivatives of $\tau$


@dataclasses.dataclass(frozen=True)
class _FindThreshold(autodiff.AbstractFunction):
    r"""The root $\tau$ of $\sum_a p_a = 1$ in each row."""

    regulariser: Tsallis
    calls: Calls

    def apply(self, args: tuple[Parts, Array | None]) -> _Threshold:
        parts, source = args
        largest = score_maximum_at(self.calls, parts, source)
        seen = holds_keys(largest)
        least = 8 * float(jnp.finfo(largest.dtype).eps)

        def goes_on(carry: tuple[Array, Array, Array]) -> Array:
            step, _, change = carry
            return (step < _MOST_STEPS) & (change > least).any()

        def newton(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            step, below, _ = carry
            mass, slope = self.sums(args, _Threshold(largest, below))
            change = jnp.where(seen, (mass - 1) / jnp.where(slope > 0, slope, 1.0), 0.0)
            return step + 1, below + change, change

        first = jnp.full_like(largest, -1.0)
        start = jnp.zeros((), jnp.int32), first, jnp.full_like(largest, jnp.inf)
        return _Threshold(largest, lax.while_loop(goes_on, newton, newton(start))[1])

    def jvp(self, primals: Any, tangents: Any) -> tuple[_Threshold, _Threshold]:
        threshold: _Threshold = autodiff.function_call(self, primals)

        def mass(args: Any) -> tuple[Array, Array]:
            return self.sums(args, threshold)

        result = directional(mass, primals, tangents)
        if result is None:
            return threshold, unmoved(threshold)
        (_, slope), (change, _) = result
        below = jnp.where(slope > 0, change / jnp.where(slope > 0, slope, 1.0), 0.0)
        return threshold, unmoved(threshold)._replace(below=below)

    def sums(self, args: tuple[Parts, Array | None], threshold: _Threshold) -> tuple[Array, Array]:
        r"""$\sum_a p_a$ and its slope $-d/d\tau$, $\frac{1}{\alpha - 1} \sum_a p_a^{2 - \alpha}$."""
        term = HashablePartial(_mass_and_slope, (self.regulariser.alpha,))
        result = _sums(term, 2, self.calls, args, threshold)
        return result[..., 0], result[..., 1]


def _sums(
    term: HashablePartial,
    width: int,
    calls: Calls,
    args: tuple[Parts, Array | None],
    threshold: _Threshold,
) -> Array:
    parts, source = args
    rows = (x[..., None] for x in threshold)
    return sum_over_keys(calls, source, parts, term, width, *rows)


# Block terms, from scores `[B, rows, keys]`, values `[B, keys, W]` and the terms of thresholds `[B, rows, 1]`.
def _powers(alpha: float, scores: Array, threshold: _Threshold, *exponents: float) -> list[Array]:
    r"""Powers of $[(\alpha - 1) s_a - \tau]_+$; zero outside of the support, with zero derivatives."""
    hidden = jnp.isneginf(scores)
    gaps = unfused(jnp.where(hidden, 0.0, scores)) - safe_shift(threshold.largest)
    excess = (alpha - 1) * gaps - threshold.below
    outside = hidden | (excess <= 0)  # NaN counts as inside
    safe = jnp.where(outside, 1.0, excess)

    def power(exponent: float) -> Array:
        whole = exponent == int(exponent)
        return safe ** (int(exponent) if whole else exponent)

    return [jnp.where(outside, 0.0, power(x)) for x in exponents]


def _mass_and_slope(alpha: float, scores: Array, value: Array, *threshold: Array) -> Array:
    del value
    exponent = 1 / (alpha - 1)
    weights, slope = _powers(alpha, scores, _Threshold(*threshold), exponent, exponent - 1)
    return jnp.stack([weights.sum(-1), exponent * slope.sum(-1)], -1)


def _moments(alpha: float, scores: Array, value: Array, *threshold: Array) -> Array:
    exponent = 1 / (alpha - 1)
    weights, powers = _powers(alpha, scores, _Threshold(*threshold), exponent, exponent + 1)
    values = product(weights, value, precision(value.dtype))
    sums = jnp.stack([powers.sum(-1), weights.sum(-1)], -1)
    return jnp.concatenate([values, sums], -1)
