"""The two sides of a fold in tiles, and the interface of the kernels that fold them."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ._scores import Pairs

Ids = tuple[Array, ...]


LEVELS = 32  # of a tree, at most


class Side(NamedTuple):
    """Queries or keys in tiles.

    Attributes:
        arrays: by name, `[B, tiles, size, K, W]`, or numbers `[B, tiles, size, K]`.
        ids: int32 `[B, tiles, size]` each: positions, negative where there is nothing, and what else masks compare;
            none where all is there and all pairs are visible.
    """

    arrays: dict[str, Array]
    ids: Ids

    @property
    def sizes(self) -> tuple[int, ...]:
        """The entries of the batch, the tiles of each, and the key heads."""
        batch, tiles, _, heads = next(iter(self.arrays.values())).shape[:4]
        return batch, tiles, heads


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

    @property
    def depth(self) -> int:
        """How many nodes of a part may wait: one a level of the tree below it, or each where numbers have gaps."""
        return (self.most - 1).bit_length() + 1 if self.consecutive else min(self.most, LEVELS)

    def in_parts(self, wanted: int) -> tuple["Walk", Array]:
        """The same, of about so many parts, each of one subtree, and the numbers of these, `[B, parts]`."""
        count = self.numbers.shape[1]
        size = subtree_for(count, wanted)
        # the first subtree may be cut by the first tile
        parts = -(-(count + size - 1) // size)
        first = self.numbers[:, :1]
        numbers = first // size + jnp.arange(parts, dtype=jnp.int32)[None]
        return self._cut((numbers * size - first)[:, None], size), numbers

    def in_runs(self, size: int) -> "Walk":
        """The same, of as many parts as there are runs of so many tiles."""
        parts = -(-self.numbers.shape[1] // size)
        return self._cut(size * jnp.arange(parts, dtype=jnp.int32)[None, None], size)

    def _cut(self, begin: Int[Array, "#b 1 parts"], size: int) -> "Walk":
        first, stop = (jnp.clip(x, begin, begin + size) for x in (self.first, self.stop))
        # a part is within one subtree of so many tiles
        return self._replace(first=first, stop=stop, most=size, consecutive=True)

    def of_parts(
        self, found: list[Array], numbers: Array, consecutive: bool
    ) -> tuple[Side, "Walk"]:
        """The items of parts, `[B, tiles, parts, ...]`, as the other side, and which each own tile is folded with."""
        batch, tiles, parts = self.first.shape
        arrays = {str(i): lax.collapse(x, 1, 3) for i, x in enumerate(found)}
        first = parts * jnp.arange(tiles, dtype=jnp.int32)[None, :, None]
        first = jnp.broadcast_to(first, (batch, tiles, 1))
        numbers = jnp.tile(numbers, (1, tiles))
        return Side(arrays, ()), Walk(numbers, first, first + parts, parts, consecutive)


def subtree_for(count: int, wanted: int) -> int:
    """The tiles of the smallest subtrees of which so many have no more than are wanted."""
    return 1 << (max(-(-count // wanted), 1) - 1).bit_length()


# of the ids of own and other tiles, which broadcast; None: parts of a fold, which are all there
OfPairs = Callable[[Ids, Ids], Pairs | None]
