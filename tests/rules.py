"""Rules as users join them, each with its definition in NumPy: a prefix-LM, documents, and what no kernel knows."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from energy_attn import masks

LAST = 16  # positions of the tables
ROWS = 3  # of the arrays below
LENGTHS = np.asarray([1, 5, 2], np.int32)
IDS = np.stack([np.repeat([0, 1, 2], x) for x in ([5, 4, 7], [2, 9, 5], [7, 1, 8])]).astype(
    np.int32
)


class Parity(masks.AbstractMask):
    """A rule that nobody knows: positions whose sum is a multiple of a number."""

    number: np.ndarray

    @property
    def ranks(self):
        return (0,)

    def visible(self, query, key):
        return (query + key) % self.number == 0

    def any_visible(self, query, key):
        return jnp.ones(jnp.broadcast_shapes(query.low.shape, key.low.shape), bool)

    def all_visible(self, query, key):
        return ~self.any_visible(query, key)


def same_document(query, key, ids):
    """For `Function`: positions past the table, which JAX would clip, are in no document."""
    size = len(ids)
    return (query < size) & (key < size) & (ids[query % size] == ids[key % size])


def _same(b, q, k):
    inside = (q >= 0) & (k >= 0) & (q < LAST) & (k < LAST)
    return inside & (IDS[b, q % LAST] == IDS[b, k % LAST])


class Case(NamedTuple):
    """A rule for some batch entries, and whether entry `b` sees, of arrays of numbers that broadcast."""

    rule: masks.AbstractMask
    sees: Callable

    def of(self, batch: int) -> masks.AbstractMask:
        """The rule for so many entries."""
        return jax.tree.map(lambda x: x[:batch] if x.ndim and len(x) == ROWS else x, self.rule)


RULES = {
    "prefix": Case(masks.Causal() | masks.Prefix(3), lambda b, q, k: (k <= q) | (k < 3)),
    "prefix_rows": Case(
        masks.Causal() | masks.Prefix(LENGTHS), lambda b, q, k: (k <= q) | (k < LENGTHS[b])
    ),
    "documents": Case(
        masks.Causal() & masks.Segments(IDS), lambda b, q, k: (k <= q) & _same(b, q, k)
    ),
    "documents_function": Case(
        masks.Function(same_document, IDS, batched=True) & masks.Causal(),
        lambda b, q, k: (k <= q) & _same(b, q, k),
    ),
    "nested": Case(
        (~masks.Window(1, None) & masks.Lengths(9, 12)) | (masks.Segments(IDS) & ~masks.Causal()),
        lambda b, q, k: ((k < q - 1) & (k < 9) & (q < 12)) | (_same(b, q, k) & (k > q)),
    ),
    "parity": Case(Parity(np.asarray([2, 3, 4], np.int32)), lambda b, q, k: (q + k) % (2 + b) == 0),
}
# Those that no hand-written kernel takes.
UNKNOWN = frozenset(RULES) - {"documents"}
