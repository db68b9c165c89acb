"""Masks as users join them, each with its definition in NumPy: a prefix-LM, documents, masks that no kernel knows."""

import functools
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


# Images: runs of a positive number. The last two touch.
IMAGES = np.stack(
    [
        np.repeat(x, n)
        for x, n in (([0, 1, 0], [3, 5, 8]), ([1, 0, 1, 2], [4, 2, 5, 5]), ([0], [16]))
    ]
).astype(np.int32)


class Parity(masks.AbstractMask):
    """A custom mask: positions whose sum is a multiple of a number."""

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
    """Whether two positions are in one document; positions past the table, which JAX would clip, are in none."""
    size = len(ids)
    return (query < size) & (key < size) & (ids[query % size] == ids[key % size])


def _same(b, q, k):
    inside = (q >= 0) & (k >= 0) & (q < LAST) & (k < LAST)
    return inside & (IDS[b, q % LAST] == IDS[b, k % LAST])


def _one_image(b, q, k):
    """Whether no token from one to the other is of another number, and that is positive."""
    found = np.zeros(np.broadcast_shapes(*(np.shape(x) for x in (b, q, k))), bool)
    for index in np.ndindex(found.shape):
        row, first, last = (int(np.broadcast_to(x, found.shape)[index]) for x in (b, q, k))
        first, last = min(first, last), max(first, last)
        between = set(IMAGES[row, max(first, 0) : last + 1].tolist())
        found[index] = 0 <= first and last < LAST and len(between) == 1 and min(between) > 0
    return found


def spaced(query, key, step):
    """Whether a key is in a dilated window."""
    return (query - key) % step == 0


def chosen(query, key, blocks):
    """Whether a key's block of 4 is in the table's row of the query's block."""
    row = jnp.clip(query // 4, 0, len(blocks) - 1)
    return (blocks[row, 0] == key // 4) | (blocks[row, 1] == key // 4)


def ancestor(query, key, enter, leave):
    """Whether a node is above another in a tree, by when a walk enters and leaves them."""
    q, k = (jnp.clip(x, 0, len(enter) - 1) for x in (query, key))
    return (enter[k] <= enter[q]) & (enter[q] < leave[k])


BLOCKS = np.asarray([[0, 2], [1, 0], [3, 3], [9, 1]], np.int32)
# the walk through a tree whose node i > 0 hangs on node (i - 1) // 2
ENTER = np.asarray([0, 1, 9, 2, 6, 10, 14, 3, 5, 7, 8, 11, 13, 15, 16, 4], np.int32)
LEAVE = np.asarray([17, 9, 17, 6, 9, 14, 17, 5, 6, 8, 9, 13, 14, 16, 17, 5], np.int32)


def _chosen(q, k):
    return (BLOCKS[np.clip(q // 4, 0, 3)] == np.asarray(k // 4)[..., None]).any(-1)


def _above(q, k):
    q, k = np.asarray(q), np.asarray(k)
    found = np.zeros(np.broadcast_shapes(q.shape, k.shape), bool)
    q = np.broadcast_to(q, found.shape)
    for _ in range(5):
        found, q = found | (q == k), np.where(q > 0, (q - 1) // 2, -2)
    return found


class Case(NamedTuple):
    """A mask of some batch entries, and its definition `sees(b, query, key)` of arrays that broadcast."""

    rule: masks.AbstractMask
    sees: Callable
    tabulated: bool = False

    def of(self, batch: int) -> masks.AbstractMask:
        """The mask of the first `batch` entries."""
        if self.tabulated:
            return _table()
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
        (~masks.Window(1, None) & masks.Lengths(9, queries=12))
        | (masks.Segments(IDS) & ~masks.Causal()),
        lambda b, q, k: ((k < q - 1) & (k < 9) & (q < 12)) | (_same(b, q, k) & (k > q)),
    ),
    "longformer": Case(
        masks.Window(2, 2) | masks.Prefix(2) | masks.Lengths(LAST, queries=2),
        lambda b, q, k: (abs(q - k) <= 2) | (k < 2) | ((q < 2) & (k < LAST)),
    ),
    "traced_window": Case(
        masks.TracedWindow(LENGTHS, np.asarray(1, np.int32)) & masks.Window(4, None),
        lambda b, q, k: (k >= q - np.minimum(LENGTHS[b], 4)) & (k <= q + 1),
    ),
    "dilated": Case(
        masks.Causal() & (masks.Window(2, None) | masks.Function(spaced, 3)),
        lambda b, q, k: (k <= q) & ((k >= q - 2) | ((q - k) % 3 == 0)),
    ),
    "blocks": Case(
        masks.Window(1, 1) | masks.Function(chosen, BLOCKS),
        lambda b, q, k: (abs(q - k) <= 1) | _chosen(q, k),
    ),
    "table": Case(
        masks.Causal() & masks.Function(chosen, BLOCKS),
        lambda b, q, k: (k <= q) & _chosen(q, k),
        tabulated=True,
    ),
    "images": Case(
        (masks.Causal() | masks.Spans(IMAGES)) & masks.Window(3, None),
        lambda b, q, k: ((k <= q) | _one_image(b, q, k)) & (k >= q - 3),
    ),
    "tree": Case(masks.Function(ancestor, ENTER, LEAVE), lambda b, q, k: _above(q, k)),
    "parity": Case(Parity(np.asarray([2, 3, 4], np.int32)), lambda b, q, k: (q + k) % (2 + b) == 0),
}


@functools.cache
def _table() -> masks.AbstractMask:
    """The rule "table", tabulated when it is asked for: processes must be connected before JAX computes."""
    with jax.ensure_compile_time_eval():
        table = jax.jit(lambda rule: masks.tabulate(rule, 12, block=4))(RULES["table"].rule)
        return jax.tree.map(np.asarray, table)


# Those that no vendor's kernel takes.
UNKNOWN = frozenset(RULES) - {"documents"}
