"""The two sides of a fold in tiles, and the interface of the kernels that fold them."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

Ids = tuple[Array, ...]


class Side(NamedTuple):
    """Queries or keys in tiles.

    Attributes:
        arrays: by name, `[B, tiles, K, size, W]`, or numbers `[B, tiles, K, size]`.
        ids: int32 `[B, tiles, size]` each: positions, negative where there is nothing, and what else masks compare;
            none where all is there and all pairs are visible.
    """

    arrays: dict[str, Array]
    ids: Ids

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        batch, tiles, heads = next(iter(self.arrays.values())).shape[:3]
        return batch * tiles * heads


class Walk(NamedTuple):
    """Which tiles of the other side are folded for each own one.

    Attributes:
        numbers: of the other side's tiles in the tree, `[B, others]`, which increase.
        first: the first tile of each part of the fold, `[B, tiles, parts]`.
        stop: one past its last, likewise.
        most: no part has more tiles.
        consecutive: whether numbers are, so that they can be cut into subtrees.
    """

    numbers: Int[Array, "b others"]
    first: Int[Array, "b tiles parts"]
    stop: Int[Array, "b tiles parts"]
    most: int
    consecutive: bool

    def in_parts(self, wanted: int) -> "Walk":
        """The same, of about so many parts, each of one subtree."""
        count = self.numbers.shape[1]
        if wanted < 2 or count < 2 or not self.consecutive:
            return self
        size = 1 << max((-(-count // wanted) - 1).bit_length(), 0)
        # the first subtree may be cut by the first tile
        parts = -(-(count + size - 1) // size)
        base = self.numbers[:, :1]
        begin = base // size * size - base + size * jnp.arange(parts, dtype=jnp.int32)[None]
        begin = begin[:, None]
        first, stop = (jnp.clip(x, begin, begin + size) for x in (self.first, self.stop))
        return Walk(self.numbers, first, stop, size, True)

    def of_parts(self, found: list[Array]) -> tuple[Side, "Walk"]:
        """The items of parts, `[B, tiles, parts, ...]`, as the other side, and which each own tile is folded with."""
        batch, tiles, parts = self.first.shape
        arrays = {str(i): lax.collapse(x, 1, 3) for i, x in enumerate(found)}
        numbers = self.numbers[:, :1] // self.most + jnp.arange(parts, dtype=jnp.int32)[None]
        first = parts * jnp.arange(tiles, dtype=jnp.int32)[None, :, None]
        first = jnp.broadcast_to(first, (batch, tiles, 1))
        return Side(arrays, ()), Walk(
            jnp.tile(numbers, (1, tiles)), first, first + parts, parts, True
        )


Seen = Callable[
    [Ids, Ids], Bool[Array, "own other"]
]  # of the ids of own and other tiles, which broadcast
