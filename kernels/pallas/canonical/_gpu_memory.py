"""What the programs of a GPU read and write: rows of arrays, and nodes of the tree that wait for others."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental.pallas import triton
from jaxtyping import Array

from ...fold._programs import Partial
from ...fold._tree import is_below


class Place(NamedTuple):
    """Some rows of an entry along the first axis, and of a head along the third, if there is one."""

    entry: Array
    head: Array | None
    first: Array | int
    size: int

    def of(self, ref: Ref) -> Any:
        """Those of an array."""
        rows, *rest = (lax.iota(jnp.int32, size) for size in (self.size, *ref.shape[2:]))
        rows += self.first
        if self.head is not None:
            rest[0] = self.head
        if rest and rest[-1].ndim:
            rows, rest[-1] = rows[:, None], rest[-1][None]
        return ref.at[self.entry, rows, *rest]

    def load(
        self, refs: Iterable[Ref], there: Array | None, fill: Sequence[float] | None = None
    ) -> tuple[Array, ...]:
        """Those of arrays, and zeros or other numbers in rows where there is nothing."""
        if there is None:
            return tuple(triton.load(self.of(x)) for x in refs)
        refs = tuple(refs)
        others = zip(refs, fill or [0] * len(refs), strict=True)
        return tuple(triton.load(self.of(x), mask=self._mask(x, there), other=y) for x, y in others)

    def store(
        self, refs: Iterable[Ref], arrays: Iterable[Array], there: Array | None = None
    ) -> None:
        """Writes those of arrays, but rows where there is nothing."""
        for ref, x in zip(refs, arrays, strict=True):
            mask = None if there is None else self._mask(ref, there)
            triton.store(self.of(ref), x.astype(ref.dtype), mask=mask)

    def _mask(self, ref: Ref, there: Array) -> Array:
        matrix = len(ref.shape) - (self.head is not None) == 3
        return jnp.broadcast_to(there[:, None], (self.size, ref.shape[-1])) if matrix else there


class Waiting(NamedTuple):
    """The nodes of a program that wait for those after them.

    Attributes:
        refs: of the arrays of all programs' nodes.
        forks: for each node, the bits in which the numbers of the items beside it differ, of which the highest is its
            level in the tree.
        base: the first node of this program.
        there: which rows there are.
        join: that of the program.
        identity: the numbers of the item of nothing.
        barrier: waits for all threads.
    """

    refs: Sequence[Ref]
    forks: Ref
    base: Array
    there: Array | None
    join: Callable[[Partial, Partial], Partial]
    identity: Sequence[float]
    barrier: Callable[[], None]

    def below(self, count: Array, fork: Array) -> Array:
        """How many of so many nodes wait at no lower levels than that of a fork."""

        def top(count: Array) -> Array:
            return self.forks[self.base + jnp.maximum(count - 1, 0)]

        def is_lower(carry: tuple[Array, Array]) -> Array:
            return (carry[0] > 0) & is_below(carry[1], fork)

        def down(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            return carry[0] - 1, top(carry[0] - 1)

        # Triton of JAX 0.11 crashes where arrays are carried
        return lax.while_loop(is_lower, down, (count, top(count)))[0]

    def joined(self, node: Partial, count: Array, left: Array) -> Partial:
        """A node with those of so many that wait above some."""

        def join(index: Array, node: Partial) -> Partial:
            place = self._at(count - 1 - index)
            return self.join(place.load(self.refs, self.there, self.identity), node)

        return lax.fori_loop(0, count - left, join, node)

    def push(self, node: Partial, count: Array, fork: Array) -> None:
        """A node waits above so many."""
        self.barrier()
        self._at(count).store(self.refs, node, self.there)
        triton.store(self.forks.at[self.base + count], fork)
        self.barrier()

    def _at(self, count: Array) -> Place:
        return Place(self.base + count, None, 0, self.refs[0].shape[1])
