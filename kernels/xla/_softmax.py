"""The softmax of a row of scores and its free energy, written once."""

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


def normalised(total: Array, maximum: Array) -> tuple[Array, Array, Array]:
    """`total` and `lse` of a `Softmax`, from the sum of its weights and the largest score; and what `lse` lost.

    That is the rest of the energy, `F - lse`, which no derivative is taken of.
    """
    some = holds_keys(maximum)
    total = jnp.where(some, total, 1.0)
    total = jnp.where(
        maximum == jnp.inf, jnp.nan, total
    )  # of products that are finite, weights are
    energy = jnp.log(total)
    lse = jnp.where(some, maximum + energy, -jnp.inf)
    rest = jnp.where(some, (maximum - lse) + energy, 0.0)
    return total, lse, lax.stop_gradient(rest)
