"""Sums over the rows of a call, as gradients of sinks are: of each head of each entry of the batch, then over these.

The canonical tree folds what tiles of queries of one head add; then heads; then entries of the batch.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from ..call._operands import Operands
from . import _tree as tree
from ._call import AbstractSchedule
from ._programs import without_signs

HEADS = 1 << 12  # at most: each head of an entry of the batch has a number of its own


class PerHeadSums(NamedTuple):
    """Sums of each head of each entry of a batch, `[B, N, ...]`, and the numbers of these in the tree over all."""

    found: PyTree[Array]
    numbers: Int[Array, "B N"]

    def summed(self) -> Any:
        """The sum over all."""
        found, numbers = jax.tree.map(lambda x: lax.collapse(x, 0, 2), self)
        return tree_sum(numbers, found)

    def of_heads(self) -> Any:
        """The sum of each head over the batch, `[N, ...]`."""
        return jax.vmap(tree_sum, (1, 1))(self.numbers, self.found)


def tree_sum(numbers: Int[Array, " items"], items: PyTree[Array]) -> Any:
    """The sum of items of these numbers, by the canonical tree."""
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x[0]), items)
    return tree.folded(numbers, items, zeros, lambda x, y: jax.tree.map(jnp.add, x, y))


def unit_numbers(operands: Operands) -> Int[Array, "B N"]:
    """The numbers of the heads of the entries of a batch, in the tree over all. Raises as `unit_indices`."""
    batches, heads = unit_indices(operands)
    return batches[:, None] * HEADS + heads[None]


def unit_indices(operands: Operands) -> tuple[Int[Array, " B"], Int[Array, " N"]]:
    """The entries of the whole batch and the heads that a call has. Raises `NotImplementedError` for too many."""
    batch, _, heads, _ = operands.query.shape
    if heads > HEADS or batch > (1 << 31) // HEADS:
        raise NotImplementedError(
            f"query: wanted at most {(1 << 31) // HEADS} entries of the batch and {HEADS} heads for gradients of "
            f"sinks, biases and scores beside reproducible=True, got {batch} and {heads}"
        )
    given = (operands.batch_indices, batch), (operands.head_indices, heads)
    batches, heads = (jnp.arange(n, dtype=jnp.int32) if x is None else x for x, n in given)
    return batches, heads


def sums_of_rows(of: AbstractSchedule, terms: Float[Array, "B T N"]) -> Float[Array, "B N"]:
    """The sums of numbers of rows, of each head of each entry of the batch; NaN for two queries of one position."""
    there = of.asked.positions >= 0
    terms = jnp.where(there[..., None], of.asked.spread(terms), 0.0)
    found = of.computed(lambda x: x.sum(2), terms)
    numbers = jnp.where(there.any(-1), of.asked.numbers, -1)
    numbers = jnp.broadcast_to(numbers, found.shape[:2])
    return of.asked.checked(without_signs(jax.vmap(tree_sum)(numbers, found)))
