"""Keys of some of the devices: those that queries may see."""

import dataclasses
from typing import Any

import jax
from jax import lax
from jaxtyping import Array

from energy_attn.kernels.internal import InFlight

from ..cost._halo import Halo, Span
from ._arguments import Axes
from ._hops import among, hop, origin, part, placed
from ._in_turn import AbstractTurns, Gradients, Keys, Tree, Visit, added
from ._ring_keys import Around


@dataclasses.dataclass(frozen=True)
class Near(AbstractTurns):
    """First the keys that go around whole, then spans, each straight from its device; gradients return as they came.

    Gradients of spans return in the dtypes of keys and values.

    Attributes:
        halo: which keys.
    """

    axes: Axes
    size: int
    halo: Halo

    @property
    def count(self) -> int:
        return self.halo.around

    @property
    def others(self) -> int:
        return len(self.halo.spans)

    def first(self, own: Tree) -> Tree:
        return own

    def following(self, here: Tree, own: Tree, turn: int | Array) -> Tree:
        if isinstance(turn, int) and turn + 1 >= self.count:
            return self._fetch(own, self.halo.spans[turn + 1 - self.count])
        return hop(here, self.axes)

    def cut(self, x: Array | None, axis: int, turn: int | Array) -> Array | None:
        span = self._span(turn)
        place = origin(turn if span is None else span.distance, self.axes)
        found = part(x, axis, place, self.size)
        if span is None or found is None or found.shape[axis] == 1:
            return found
        return lax.slice_in_dim(found, span.start, span.stop, axis=axis)

    def uncut(self, found: Array, like: Array, axis: int, turn: int | Array) -> Array:
        span = self._span(turn)
        if span is None:
            return placed(found, like, axis, origin(turn, self.axes))
        if like.shape[axis] == 1:
            return found
        found = among(found, axis, span.start, self.size)
        return placed(found, like, axis, origin(span.distance, self.axes))

    def backward(self, visit: Visit, own: Keys) -> Gradients:
        ring = Around(self.axes, self.size, self.count)
        found = ring.backward(visit, own)
        # each span comes beside the products of the turn before, and its gradients return beside those of the next
        spans, keys, home = self.halo.spans, found.keys, Keys(None, None)
        here = self._fetch(own, spans[0]) if spans else own
        for turn, span in enumerate(spans, self.count):
            more = turn + 1 - self.count < len(spans)
            coming = self._fetch(own, spans[turn + 1 - self.count]) if more else None
            arrived, found = visit(here, found, turn, InFlight(coming, home))
            keys = self._with(keys, arrived.sums, spans[turn - 1 - self.count], turn > self.count)
            home = hop(_as_like(found.keys, own), self.axes, -span.distance)
            here = arrived.others
        if spans:
            keys = self._with(keys, home, spans[-1], True)
        return found._replace(keys=keys)

    def _span(self, turn: int | Array) -> Span | None:
        is_later = isinstance(turn, int) and turn >= self.count
        return self.halo.spans[turn - self.count] if is_later else None

    def _fetch(self, own: Tree, span: Span) -> Tree:
        cut = jax.tree.map(lambda x: lax.slice_in_dim(x, span.start, span.stop, axis=1), own)
        return hop(cut, self.axes, span.distance)

    def _with(self, keys: Keys, more: Any, span: Span, is_there: bool) -> Keys:
        """The sums of gradients, and those of a span."""
        if not is_there:
            return keys

        def whole(x: Array, like: Array) -> Array:
            return among(x.astype(like.dtype), 1, span.start, self.size)

        return added(keys, jax.tree.map(whole, more, keys))


def _as_like(gradients: Keys, like: Keys) -> Keys:
    """Gradients, unless they are None, in the dtypes of others."""
    pairs = zip(gradients, like, strict=True)
    return Keys(*(x if x is None or y is None else x.astype(y.dtype) for x, y in pairs))
