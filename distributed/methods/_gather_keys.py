"""Keys of all devices, gathered piece by piece."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels.internal import InFlight

from ..cost._shape import halves, pieces
from ..merge._packing import joined
from ._arguments import Axes
from ._in_turn import AbstractTurns, Gradients, Keys, Tree, Visit


@dataclasses.dataclass(frozen=True)
class Pieces(AbstractTurns):
    """In each turn an equal part of every device's keys; gradients are scattered as they come.

    It is made of a part of each half, which in the order `"zigzag"` are from both ends of the sequence: so that every
    device's queries see as many keys of a piece.
    """

    axes: Axes
    size: int

    @property
    def count(self) -> int:
        return pieces(self.size)

    @property
    def _halves(self) -> int:
        return halves(self.size)

    def first(self, own: Tree) -> Tree:
        return self._fetch(own, 0)

    def following(self, here: Tree, own: Tree, turn: int | Array) -> Tree:
        del here
        return self._fetch(own, turn + 1)

    def cut(self, x: Array | None, axis: int, turn: int | Array) -> Array | None:
        if x is None or x.shape[axis] == 1:
            return x
        apart = lax.dynamic_index_in_dim(self._apart(x, axis), turn, axis + 2, keepdims=False)
        return apart.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    def uncut(self, found: Array, like: Array, axis: int, turn: int | Array) -> Array:
        if like.shape[axis] == 1:
            return found
        zeros = self._apart(lax.full_like(found, 0.0, shape=like.shape), axis)
        shape = *zeros.shape[: axis + 2], 1, *zeros.shape[axis + 3 :]
        placed = lax.dynamic_update_slice_in_dim(zeros, found.reshape(shape), turn, axis + 2)
        return placed.reshape(like.shape)

    def backward(self, visit: Visit, own: Keys) -> Gradients:
        # Gradients are scattered one turn later: no transfer needs the result of its own turn.
        def step(carry: tuple[Keys, Gradients], turn: Array) -> tuple[tuple[Keys, Gradients], Keys]:
            here, so_far = carry
            coming = InFlight(self._fetch(own, turn + 1), self._scatter(so_far.keys))
            arrived, found = visit(here, so_far, turn, coming)
            return (arrived.others, found), arrived.sums

        last = self.count - 1
        if last == 0:
            _, found = visit(self.first(own), None, 0, InFlight())
            return found._replace(keys=self._scatter(found.keys))
        arrived, found = visit(self.first(own), None, 0, InFlight(self._fetch(own, 1)))
        middle = jnp.arange(1, last, dtype=jnp.int32)
        (here, so_far), homes = lax.scan(step, (arrived.others, found), middle)
        arrived, found = visit(here, so_far, last, InFlight(None, self._scatter(so_far.keys)))

        def together(home: Array, *last: Array) -> Array:
            turns = jnp.concatenate([home, *(x[None] for x in last)])
            apart = turns.reshape(*turns.shape[:2], self._halves, -1, *turns.shape[3:])
            return jnp.moveaxis(apart, 0, 2).reshape(turns.shape[1], -1, *turns.shape[3:])

        keys = jax.tree.map(together, homes, arrived.sums, self._scatter(found.keys))
        return found._replace(keys=keys)

    def _fetch(self, tree: Tree, turn: int | Array) -> Tree:
        def of(x: Array) -> Array:
            apart = x.reshape(len(x), self._halves, self.count, -1, *x.shape[2:])
            mine = lax.dynamic_index_in_dim(apart, turn, 2, keepdims=False)
            return joined(mine.reshape(len(x), -1, *x.shape[2:]), self.axes, 1)

        return jax.tree.map(of, tree)

    def _scatter(self, gradients: Keys) -> Keys:
        """The sums over devices of gradients of a piece, each device its own part."""

        def of(x: Array) -> Array:
            if x.size == 0:  # HLO scatters no empty arrays
                shape = x.shape[0], x.shape[1] // lax.axis_size(self.axes), *x.shape[2:]
                return lax.full_like(x, 0.0, shape=shape)
            return lax.psum_scatter(x, self.axes, scatter_dimension=1, tiled=True)

        return jax.tree.map(of, gradients)

    def _apart(self, x: Array, axis: int) -> Array:
        """An array of all keys with axes of devices, halves, pieces, and keys in half a piece."""
        size = self.size // (self._halves * self.count)
        shape = lax.axis_size(self.axes), self._halves, self.count, size
        return x.reshape(*x.shape[:axis], *shape, *x.shape[axis + 1 :])
