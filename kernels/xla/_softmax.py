"""The softmax of a row of scores and its free energy, written once."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..call._state import safe_shift


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
    shift = shift_of(scores, axis)
    weights = jnp.exp(scores - shift)
    return Softmax(weights, *normaliser(weights.sum(axis, keepdims=True), shift, axis))


def shift_of(scores: Float[Array, "..."], axis: int) -> Array:
    """What is taken from scores before the exponential: their maximum over an axis, kept with size 1."""
    return safe_shift(lax.stop_gradient(scores.max(axis, keepdims=True, initial=-jnp.inf)))


def normaliser(total: Array, shift: Array, axis: int) -> tuple[Array, Array]:
    """`total` and `lse` of a `Softmax`, from the sum of its weights."""
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, shift + jnp.log(total))
    return total, lse.squeeze(axis)
