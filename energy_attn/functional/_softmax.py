"""Softmax that is safe for fully masked rows, shifted energies, and penalties on energies and entropies."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from energy_attn.kernels.internal import checks, holds_keys, safe_shift, softmax

from ._citation import cite


class ShiftedEnergy(NamedTuple):
    """`F' = F - shift`, and the shift that must be added to report `F`."""

    energy: Float[Array, "..."]
    shift: Float[Array, "..."]


def safe_softmax(
    scores: Float[Array, "..."],
    *,
    where: Bool[Array, "..."] | None = None,
    axis: int = -1,
) -> Float[Array, "..."]:
    r"""The softmax, with zeros in fully masked rows.

    $$P_a = \frac{\partial F}{\partial s_a} = e^{s_a - F}, \qquad F = \log \sum_a e^{s_a}$$

    A fully masked row has $F = -\infty$; its probabilities and gradients are 0, where
    `jax.nn.softmax` returns NaN. Differentiable to any order, in both modes.

    Args:
        scores: of any shape and floating dtype; minus infinity hides a key. The arithmetic is in
            float32 or wider.
        where: boolean, broadcastable to `scores`; False hides a key.
        axis: the axis of the keys.

    Returns:
        Probabilities of the shape and dtype of `scores`.

    Raises:
        TypeError: `scores` is not a floating array, `where` not a boolean one or `axis` not an
            integer.
        ValueError: `axis` is out of range, or `where` does not broadcast.

    Source: Tree Attention (arXiv 2408.04093), Appendix 11.

    Examples:
        >>> import jax.numpy as jnp
        >>> import energy_attn as ea
        >>> ea.safe_softmax(jnp.array([[0.0, 0.0], [-jnp.inf, -jnp.inf]])).tolist()
        [[0.5, 0.5], [0.0, 0.0]]
    """
    rows = _rows(scores, where, axis)
    weights, total, _ = softmax(rows)
    return jnp.moveaxis(weights / total, -1, axis).astype(scores.dtype)


def shifted_energy(
    scores: Float[Array, "..."],
    shift: Float[Array, "..."] | None = None,
    *,
    where: Bool[Array, "..."] | None = None,
    axis: int = -1,
) -> ShiftedEnergy:
    r"""The energy of shifted scores, and the shift.

    $$F' = \log \sum_a e^{s_a - m}, \qquad F = F' + m$$

    Three facts that are easy to get wrong:

    1. For any **constant** $m$ the gradient is the gradient of $F$.
    2. $F'$ is not the energy: $m$ must be added back.
    3. If $m$ depends on the differentiated argument, as $m = \max_a s_a$ does, $F'$ has another
       gradient: in the source it is attention minus the value of the largest score. The default
       shift of this function is therefore held constant.

    Args:
        scores: as for [`safe_softmax`][energy_attn.safe_softmax], with its errors, as `where` and `axis`.
        shift: $m$, floating, of the shape of `scores` less `axis`; None takes the maximum, held constant
            (0 in a fully masked row).

    Returns:
        `(energy, shift)`, both of the shape of `scores` less `axis`, in float32 (float64).

    Source: Tree Attention (arXiv 2408.04093), Appendix 11; its statement that the gradient is the
    same holds only for a constant $m$.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.functional import shifted_energy
        >>> scores = jnp.array([1.0, 3.0])
        >>> energy, shift = shifted_energy(scores)
        >>> bool(jnp.allclose(energy + shift, jax.nn.logsumexp(scores)))
        True
    """
    rows = _rows(scores, where, axis)
    if shift is None:
        constant = lax.stop_gradient(rows.max(-1, initial=-jnp.inf))
        applied = safe_shift(constant)
    else:
        applied = checks.check_floating("shift", shift).astype(rows.dtype)
        if applied.shape != rows.shape[:-1]:
            raise ValueError(
                f"shift: wanted the shape of scores less axis, {rows.shape[:-1]}, "
                f"got {checks.received(shift)}"
            )
    return ShiftedEnergy(softmax(rows - applied[..., None]).lse, applied)


def lse_penalty(
    energy: Float[Array, "..."], *, where: Bool[Array, "..."] | None = None
) -> Float[Array, ""]:
    r"""The z-loss: the mean square of the free energies, a penalty on the drift of scores.

    $$L = \frac{1}{|R|} \sum_{i \in R} F_i^2$$

    over the rows $R$ that see a key ($F > -\infty$) and that `where` includes. An energy that is NaN makes
    the penalty NaN.

    Args:
        energy: in nats, as [`free_energy`][energy_attn.free_energy] and
            `attention(..., return_energy=True)` return them, of any shape.
        where: boolean, broadcastable to `energy`; False leaves a row out (padding).

    Returns:
        A scalar in nats squared, in the dtype of `energy`; 0 if no row is included.

    Raises:
        TypeError: `energy` is not a floating array or `where` not a boolean one.
        ValueError: `where` does not broadcast.

    Source: PaLM (Chowdhery et al., arXiv 2204.02311), section 5, for the logits of the output.

    Examples:
        >>> import jax.numpy as jnp
        >>> import energy_attn as ea
        >>> float(ea.lse_penalty(jnp.array([1.0, 3.0, -jnp.inf])))
        5.0
    """
    cite("zloss")
    energy = checks.check_floating("energy", energy)
    return _mean_square(energy, included(where, energy.shape) & holds_keys(energy))


def entropy_penalty(
    entropy: Float[Array, "..."],
    *,
    where: Bool[Array, "..."] | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Float[Array, ""]:
    r"""The mean square of the distances of entropies from an interval.

    $$L = \frac{1}{|R|} \sum_{i \in R} \max(H_{low} - H_i,\ 0,\ H_i - H_{high})^2$$

    A lower bound keeps heads from collapsing onto single keys, an upper one from averaging over all.

    Args:
        entropy: in nats, as [`Gibbs.entropy`][energy_attn.Gibbs.entropy] returns it, of any shape.
        where: boolean, broadcastable to `entropy`; False leaves a row out. Fully masked rows have
            entropy 0; leave them out with `energy != -jnp.inf`.
        low: the lower bound in nats, or None.
        high: the upper bound in nats, or None.

    Returns:
        A scalar in nats squared, in the dtype of `entropy`; 0 if no row is included.

    Raises:
        TypeError: `entropy` is not a floating array, `where` not a boolean one or a bound not a
            number.
        ValueError: `where` does not broadcast, both bounds are None, or `low` is above `high`.

    Source: Zhai et al. (arXiv 2303.06296), on the collapse that a lower bound prevents.

    Examples:
        >>> import jax.numpy as jnp
        >>> import energy_attn as ea
        >>> float(ea.entropy_penalty(jnp.array([0.5, 2.0]), low=1.0))
        0.125
    """
    cite("entropy")
    entropy = checks.check_floating("entropy", entropy)
    if low is None and high is None:
        raise ValueError("low: wanted a bound in nats for low, high or both, got None for both")
    distance: Any = 0.0
    if low is not None:
        checks.check_finite_number("low", low)
        distance = jnp.maximum(low - entropy, 0.0)
    if high is not None:
        checks.check_finite_number("high", high)
        if low is not None and low > high:
            raise ValueError(f"low: wanted at most high = {high}, got {low}")
        distance = distance + jnp.maximum(entropy - high, 0.0)
    return _mean_square(distance, included(where, entropy.shape))


def _rows(scores: Array, where: Array | None, axis: int) -> Array:
    scores = checks.check_floating("scores", scores)
    axis = checks.check_axis("axis", axis, scores.ndim, "scores")
    rows = scores.astype(jnp.float64 if scores.dtype == jnp.float64 else jnp.float32)
    if where is not None:
        rows = jnp.where(included(where, scores.shape), rows, -jnp.inf)
    return jnp.moveaxis(rows, axis, -1)


def included(where: Array | None, shape: tuple[int, ...]) -> Array:
    """The argument `where=`, checked and broadcast to a shape; None includes everything."""
    if where is None:
        return jnp.ones(shape, bool)
    checks.check_broadcastable("where", checks.check_boolean("where", where), shape, leading=False)
    return jnp.broadcast_to(where, shape)


def _mean_square(x: Array, rows: Array) -> Array:
    total = (jnp.where(rows, x, 0.0) ** 2).sum()
    return total / jnp.maximum(rows.sum(dtype=total.dtype), 1.0)
