"""Penalties on energies and entropies, for training."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from energy_attn.kernels.internal import checks, holds_keys

from ..functional._citation import cite
from ..functional._softmax import included


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


def _mean_square(x: Array, rows: Array) -> Array:
    total = (jnp.where(rows, x, 0.0) ** 2).sum()
    return total / jnp.maximum(rows.sum(dtype=total.dtype), 1.0)
