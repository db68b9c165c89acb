"""The softmax of a row of scores and its free energy."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..call._state import exp_from, holds_keys, safe_shift


class Softmax(NamedTuple):
    """The pieces of a softmax over an axis, which `total` keeps with size 1.

    Attributes:
        weights: `exp(scores - shift)`, not normalised.
        total: their sum; 1 for a fully masked row.
        lse: the free energy, without that axis; minus infinity for a fully masked row.
    """

    weights: Float[Array, "..."]
    total: Float[Array, "..."]
    lse: Float[Array, "..."]


def softmax(scores: Float[Array, "..."], axis: int = -1) -> Softmax:
    r"""The softmax over an axis, where scores of minus infinity hide keys.

    The maximum $m$ is held constant: $F = m + \log\sum e^{s - m}$ does not depend on it, so the
    derivatives of these lines, of any order and in both modes, are those of $F$. A fully masked row
    has $m = 0$ and a total of 1, and so is finite, derivatives included. A NaN or an overflow among
    the scores makes the whole row NaN.
    """
    maximum = lax.stop_gradient(scores.max(axis, keepdims=True, initial=-jnp.inf))
    weights = exp_from(scores, safe_shift(maximum))
    total, lse, _ = normalised(weights.sum(axis, keepdims=True), maximum)
    return Softmax(weights, total, lse.squeeze(axis))


def normalised(
    total: Array, maximum: Array, log: Callable[[Array], Array] = jnp.log
) -> tuple[Array, Array, Array]:
    """`total` and `lse` of a `Softmax`, from the sum of its weights and the largest score.

    Also returns the rounding error of `lse`, `F - lse`, as a constant for derivatives.
    """
    has_keys = holds_keys(maximum)
    total = jnp.where(has_keys, total, 1.0)
    # the weights are finite even if a score is not
    total = jnp.where(maximum == jnp.inf, jnp.nan, total)
    energy = log(total)
    lse = jnp.where(has_keys, maximum + energy, -jnp.inf)
    rounding = jnp.where(has_keys, (maximum - lse) + energy, 0.0)
    return total, lse, lax.stop_gradient(rounding)
