"""The rows of a call in tiles: those of all query heads of a key head, of some tokens that follow each other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from ._each import hidden
from ._slice import slice_at

ROWS = 512  # rows of a tile, of a fold over keys
TOGETHER = 4096  # rows of all key heads, whose scores of a leaf are 4 MiB


class RowTiles(NamedTuple):
    """Tiles `[K, rows, ...]` of arrays `[B, T, N, ...]`, which are cut where they lie.

    Tiles have as many tokens as each other. Where these are more than there are, the last begins earlier, and some rows
    are computed twice: a row's bits do not depend on what is beside it.

    Attributes:
        batch: entries of the batch.
        queries: tokens of an entry.
        key_heads: heads of keys.
        group: heads of queries for each.
    """

    batch: int
    queries: int
    key_heads: int
    group: int

    @property
    def of_entry(self) -> int:
        """The tiles of an entry of the batch."""
        most = min(ROWS, TOGETHER // self.key_heads) // self.group
        return max(-(-self.queries // max(most, 1)), 1)

    @property
    def tokens(self) -> int:
        """Those of a tile."""
        return -(-self.queries // self.of_entry)

    @property
    def rows(self) -> int:
        """Those of a tile; one of one row has another, as XLA:CPU multiplies one row by another program."""
        return max(2, self.tokens * self.group)

    def place(self, n: Array) -> tuple[Array, Array, Array]:
        """The entry of the batch of the `n`-th tile, its index among those of that, and its first token."""
        count = jnp.full_like(n, self.of_entry)
        index = lax.rem(n, count)
        first = jnp.minimum(index * self.tokens, self.queries - self.tokens)
        return lax.div(n, count), index, first

    def of_rows(self, n: Array) -> tuple[Int[Array, " rows"], Int[Array, " rows"]]:
        """The tokens of the rows of the `n`-th tile, and which of the query heads of a key head they are."""
        row = np.minimum(np.arange(self.rows, dtype=np.int32), self.tokens * self.group - 1)
        return self.place(n)[2] + row // self.group, jnp.asarray(row % self.group)

    def spread(self, ids: Int[Array, "b length"]) -> Int[Array, "b tiles rows"]:
        """Positions or segments of tokens for the rows of the tiles; -1 for one that is added."""
        first = np.arange(self.of_entry) * self.tokens
        first = np.minimum(first, self.queries - self.tokens)
        ids = ids[:, first[:, None] + np.arange(self.tokens)]
        ids = jnp.repeat(ids, self.group, 2)
        missing = self.rows - ids.shape[2]
        return jnp.pad(ids, ((0, 0), (0, 0), (0, missing)), constant_values=-1)

    def cut(self, x: Array, n: Array) -> Array:
        """The `n`-th tile."""
        batch, _, first = self.place(n)
        rest, zero = x.shape[3:], jnp.zeros_like(n)
        x = x.reshape(*x.shape[:2], self.key_heads, -1)
        x = slice_at(x, (batch, first, zero, zero), (1, self.tokens, *x.shape[2:]))[0]
        x = x.reshape(self.tokens, self.key_heads, self.group, *rest).swapaxes(0, 1)
        x = lax.collapse(x, 1, 3)
        missing = self.rows - x.shape[1]
        return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * len(rest)))

    def put(self, whole: Array, x: Array, n: Array) -> Array:
        """An array with a tile in its place."""
        batch, _, first = self.place(n)
        x = x[:, : self.tokens * self.group]
        x = x.reshape(self.key_heads, self.tokens, self.group, *x.shape[2:]).swapaxes(0, 1)
        corner = batch, first, *[jnp.zeros_like(n)] * (whole.ndim - 2)
        return lax.dynamic_update_slice(whole, lax.collapse(x, 1, 3)[None], corner)

    def each(self, f: Callable[[Array], Any], like: Array) -> Any:
        """`[B, T, N, ...]` of `f(n)`, the `n`-th tile. Raises, and varies over a mesh, as `each` of one axis."""
        struct = jax.eval_shape(f, jnp.int32(0))
        sizes = self.batch, self.queries, self.key_heads * self.group
        begin = jax.tree.map(
            lambda x: lax.full_like(like, 0, x.dtype, (*sizes, *x.shape[2:])), struct
        )

        def turn(n: Array, found: Any) -> Any:
            return jax.tree.map(lambda xs, x: self.put(xs, x, n), found, f(n))

        return lax.fori_loop(jnp.int32(0), hidden(self.batch * self.of_entry), turn, begin)
