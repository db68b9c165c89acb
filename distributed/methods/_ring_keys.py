"""Keys that go around a ring."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels.internal import InFlight

from ._arguments import Axes
from ._hops import hop, origin, part, placed
from ._in_turn import ALL, AbstractTurns, Gradients, Keys, Tree, Visit, added


@dataclasses.dataclass(frozen=True)
class Around(AbstractTurns):
    """The keys of one device after the other, its own first; gradients travel with their keys.

    Attributes:
        turns: how many devices' keys a device sees; None: those of all.
    """

    axes: Axes
    size: int
    turns: int | None = None

    @property
    def count(self) -> int:
        return lax.axis_size(self.axes) if self.turns is None else self.turns

    def first(self, own: Tree) -> Tree:
        return own

    def following(self, here: Tree, own: Tree, turn: int | Array) -> Tree:
        del own, turn
        return hop(here, self.axes)

    def cut(self, x: Array | None, axis: int, turn: int | Array) -> Array | None:
        return part(x, axis, origin(turn, self.axes), self.size)

    def uncut(self, found: Array, like: Array, axis: int, turn: int | Array) -> Array:
        return placed(found, like, axis, origin(turn, self.axes))

    def backward(self, visit: Visit, own: Keys) -> Gradients:
        # Gradients follow their keys one hop behind: no transfer needs the result of its own step.
        def turn(
            keys: Any,
            so_far: Gradients | None,
            step: int | Array,
            onward: bool,
            some: slice = ALL,
        ) -> tuple[Any, Gradients]:
            sums = None if so_far is None else so_far.keys
            going = InFlight(keys if onward else None, sums)
            arrived, found = visit(keys, so_far, step, hop(going, self.axes), some)
            if so_far is not None:
                found = found._replace(keys=added(arrived.sums, found.keys))
            return arrived.others, found

        here, half, last = self.first(own), self.size // 2, self.count - 1
        if last == 0:
            return visit(here, None, 0, InFlight())[1]
        # Of the own keys the first half comes first, beside whose products they leave, and the second half last, beside
        # whose products gradients come home.
        carry = turn(here, None, 0, onward=True, some=slice(0, half))
        middle = jnp.arange(1, last, dtype=jnp.int32)
        carry, _ = lax.scan(lambda x, i: (turn(*x, i, onward=True), None), carry, middle)
        _, so_far = turn(*carry, last, onward=False)
        home = hop(so_far.keys, self.axes, 1 if self.turns is None else -last)
        # else XLA cuts the second half before the loop, and keeps it
        here, so_far = lax.optimization_barrier((here, so_far))
        arrived, found = visit(here, so_far, 0, InFlight(None, home), slice(half, self.size))
        return found._replace(keys=added(arrived.sums, found.keys))
