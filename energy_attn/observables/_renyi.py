"""Rényi's entropies: a second free energy, at another temperature."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels.internal import check_finite_number, holds_keys, received

from ..functional._free_energy import Calls, Parts, state_at
from ._at_source import HashablePartial, score_maximum_at, sum_over_keys
from ._entropy import entropy_of, mean_score


def renyi(calls: Calls, parts: Parts, order: float) -> Array:
    """See `AbstractMeasure.renyi`."""
    order = _checked(order)
    if order == 1:
        return entropy_of(*mean_score(calls, parts))
    largest = score_maximum_at(calls, parts)
    seen = holds_keys(largest)
    largest = jnp.where(seen, largest, 0.0)
    energy = jnp.where(seen, state_at(calls, None, parts).lse, 0.0)
    if math.isinf(order):
        found = energy - largest
    else:
        # F of scores times the order; it does not depend on the score that is taken from all
        largest = lax.stop_gradient(largest)
        power = HashablePartial(_powers, (order,))
        total = sum_over_keys(calls, None, parts, power, 1, largest[..., None])[..., 0]
        other = order * largest + jnp.log(jnp.where(seen, total, 1.0))
        found = (other - order * energy) / (1 - order)
    # a difference of two large numbers, which only rounding makes negative
    return jnp.where(seen, jnp.maximum(found, 0.0), 0.0)


def _checked(order: object) -> float:
    infinite = isinstance(order, float) and order == math.inf
    number = math.inf if infinite else check_finite_number("order", order)
    if number < 0:
        raise ValueError(f"order: wanted at least 0, got {received(order)}")
    return number


def _powers(order: float, scores: Array, value: Array, largest: Array) -> Array:
    del value
    hidden = jnp.isneginf(scores)
    apart = jnp.where(hidden, 0.0, scores) - largest
    return jnp.where(hidden, 0.0, jnp.exp(order * apart)).sum(-1, keepdims=True)
