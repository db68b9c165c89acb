"""Cumulants and moments of the values under the attention weights: derivatives of the energy."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from energy_attn.kernels.internal import ScoreBlock, outer, precision, received

from ..functional._free_energy import Calls, Parts, both_computed
from ._at_source import (
    centred_parts,
    check_row_vectors,
    covariance_product,
    mean_over_keys,
    state_at,
)

# The work doubles with each order.
_HIGHEST_ORDER = 8


def cumulant(calls: Calls, parts: Parts, tangents: Sequence[Array]) -> Array:
    directions = _check_tangents(tangents, calls, parts)
    if len(directions) == 1:
        return (_mean(calls, parts) * directions[0]).sum(-1)
    if len(directions) == 2:
        return (covariance_product(calls, None, parts, directions[0])[1] * directions[1]).sum(-1)
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
    wanted = tuple(dict.fromkeys(groups.values()))
    term = _CentredProducts(wanted)
    found = mean_over_keys(calls, None, parts, term, len(wanted), mean, *directions).out
    moments = {group: found[..., wanted.index(kind)] for group, kind in groups.items()}
    terms = [
        (-1) ** (len(blocks) - 1)
        * math.factorial(len(blocks) - 1)
        * functools.reduce(jnp.multiply, (moments[block] for block in blocks))
        for blocks in _partitions(tuple(numbers))
    ]
    return functools.reduce(jnp.add, terms)


def moment(calls: Calls, parts: Parts, tangents: Sequence[Array]) -> Array:
    directions = _check_tangents(tangents, calls, parts)
    if len(directions) == 1:
        return (_mean(calls, parts) * directions[0]).sum(-1)
    term = _CentredProducts((tuple(range(len(directions))),))
    origin = jnp.zeros_like(directions[0])
    return mean_over_keys(calls, None, parts, term, 1, origin, *directions).out[..., 0]


def _mean(calls: Calls, parts: Parts) -> Array:
    # one pass with attention and the energies
    return both_computed(*state_at(calls, None, parts))[0]


def _check_tangents(tangents: object, calls: Calls, parts: Parts) -> list[Array]:
    if not isinstance(tangents, Sequence):
        raise TypeError(f"tangents: wanted a sequence of arrays, got {received(tangents)}")
    if not 1 <= len(tangents) <= _HIGHEST_ORDER:
        raise ValueError(
            f"tangents: wanted from one to {_HIGHEST_ORDER} arrays, got {len(tangents)}"
        )
    return [check_row_vectors(f"tangents[{i}]", x, calls, parts) for i, x in enumerate(tangents)]


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
