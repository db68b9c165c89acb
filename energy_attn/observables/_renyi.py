"""Rényi's entropies: the difference of two free energies, at two temperatures."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels.internal import check_finite_number, holds_keys, received

from ..functional._free_energy import Calls, Parts
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
    # The scores of both sums are rounded alike, and neither result depends on the score that is taken from all.
    infinite = math.isinf(order)
    shift = largest if infinite else lax.stop_gradient(largest)
    power = HashablePartial(_powers, (1.0 if infinite else order,))
    sums = sum_over_keys(calls, None, parts, power, 2, shift[..., None])
    other, total = jnp.moveaxis(jnp.log(jnp.where(seen[..., None], sums, 1.0)), -1, 0)
    found = total if infinite else (other - order * total) / (1 - order)
    # a difference of two numbers, which only rounding makes negative
    return jnp.where(seen, jnp.maximum(found, 0.0), 0.0)


def _checked(order: object) -> float:
    infinite = isinstance(order, float) and order == math.inf
    number = math.inf if infinite else check_finite_number("order", order)
    if number < 0:
        raise ValueError(f"order: wanted at least 0, got {received(order)}")
    return number


def _powers(order: float, scores: Array, value: Array, largest: Array) -> Array:
    """Sums of powers of the weights, and of the weights, relative to the largest."""
    del value
    hidden = jnp.isneginf(scores)
    apart = jnp.where(hidden, 0.0, scores) - largest
    terms = (jnp.where(hidden, 0.0, jnp.exp(x * apart)) for x in (order, 1.0))
    return jnp.stack([x.sum(-1) for x in terms], -1)
