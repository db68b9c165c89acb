"""Keys that go around a ring, all of them or those that queries may see."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import InFlight, Operands, vary_together

from ..cost._shape import Shape, kv_shard, tangent_bytes
from ..cost._topology import Topology
from ..cost._transfer import SentDerivatives, Transfer, Transfers, position_gather
from ._abstract import AbstractMethod, LocalCall, Split
from ._arguments import Axes
from ._halo import Halo, Span
from ._hops import among, hop, origin, part, placed
from ._in_turn import (
    ALL,
    AbstractTurns,
    Gradients,
    Keys,
    Tree,
    Visit,
    added,
    attend_in_turn,
)


@dataclasses.dataclass(frozen=True)
class Neighbours(AbstractMethod):
    r"""Keys come from those devices alone whose keys some query may see, and no more of them than that.

    It takes the place of a ring, of a gather, and of a tree of sharded queries, where a window says so: with $S / p$
    keys on a device and a window of $w$, contiguous shards need $\lceil (w - 1) p / S \rceil$ hops, the last one of a
    part of the keys.
    Gradients of keys return as the keys came.

    Attributes:
        halo: which keys.
    """

    halo: Halo

    name = "ring"

    def split(self, axes: Axes, operands: Operands, queries_sharded: bool) -> Split:
        """Splits queries, and what belongs to them; bias, mask, positions and segments are of all keys."""
        del operands, queries_sharded
        return Split(heads=(), queries=axes, keys=(), rows=axes)

    def attend(self, call: LocalCall) -> AttentionState:
        """Raises as `attend` does."""
        operands = vary_together(call.operands, call.axes)
        return keys_around(call._replace(operands=operands), self.halo)

    def transfers(
        self, shape: Shape, topology: Topology, derivatives: SentDerivatives
    ) -> Transfers:
        yield from position_gather(shape.keys, shape, topology, topology.axes)
        size = -(-shape.keys // topology.devices)
        keys = kv_shard(shape, topology)
        yield from around_transfers(keys, size, self.halo, topology.axes, shape, derivatives)


def keys_around(call: LocalCall, halo: Halo | None = None) -> AttentionState:
    """The state of this device's queries, as the keys of `halo` go around; None: all keys."""
    halo = halo or Halo(lax.axis_size(call.axes), ())
    turns = Around(call.axes, call.operands.key.shape[1], halo)
    return attend_in_turn(call.policy.kernels, call.settings, turns, call.operands)


def around_transfers(
    sizes: Sequence[int],
    length: int,
    halo: Halo,
    axes: tuple[int, ...],
    shape: Shape,
    derivatives: SentDerivatives,
) -> Transfers:
    """The transfers of `keys_around`, of keys and values of `sizes` bytes for a device's `length` tokens.

    Gradients return in the dtypes of keys and values, or behind keys that go around.
    """
    hops, (tangent, gradient) = halo.around - 1, derivatives
    for size in sizes:
        if hops:
            # again for a derivative, but XLA merges an only hop with the same one before; and directions
            count = 1 + ((tangent or gradient) and hops > 1) + tangent
            yield from [Transfer("collective-permute", size, axes, hops)] * count
        if hops and gradient:  # gradients follow their keys, and return to their devices
            moving = tangent_bytes(size, shape)
            yield Transfer("collective-permute", moving, axes, hops)
            yield Transfer("collective-permute", moving, axes)
        for span in halo.spans:
            part = size // length * (span.stop - span.start)
            # the backward's keys are the forward's, which XLA sends once
            count = 1 + tangent + gradient
            yield from [Transfer("collective-permute", part, axes)] * count


@dataclasses.dataclass(frozen=True)
class Around(AbstractTurns):
    """First the keys that go around whole, the own ones in front, then spans, each straight from its device.

    Gradients travel with the keys that go around; those of spans return as they came, in the dtypes of keys.

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
        found = self._backward_around(visit, own)
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

    def _backward_around(self, visit: Visit, own: Keys) -> Gradients:
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

        half, last = self.size // 2, self.count - 1
        if last == 0:
            return visit(own, None, 0, InFlight())[1]
        # Of the own keys the first half comes first, beside whose products they leave, and the second half last, beside
        # whose products gradients come home.
        carry = turn(own, None, 0, onward=True, some=slice(0, half))
        middle = jnp.arange(1, last, dtype=jnp.int32)
        carry, _ = lax.scan(lambda x, i: (turn(*x, i, onward=True), None), carry, middle)
        _, so_far = turn(*carry, last, onward=False)
        home = hop(so_far.keys, self.axes, -last)
        # else XLA cuts the second half before the loop, and keeps it
        here, so_far = lax.optimization_barrier((own, so_far))
        arrived, found = visit(here, so_far, 0, InFlight(None, home), slice(half, self.size))
        return found._replace(keys=added(arrived.sums, found.keys))

    def _span(self, turn: int | Array) -> Span | None:
        is_later = isinstance(turn, int) and turn >= self.count
        return self.halo.spans[turn - self.count] if is_later else None

    def _fetch(self, own: Tree, span: Span) -> Tree:
        cut = jax.tree.map(lambda x: lax.slice_in_dim(x, span.start, span.stop, axis=1), own)
        return hop(cut, self.axes, span.distance)

    def _with(self, keys: Keys, more: Any, span: Span, is_there: bool) -> Keys:
        """Adds the gradients of a span."""
        if not is_there:
            return keys

        def whole(x: Array, like: Array) -> Array:
            return among(x.astype(like.dtype), 1, span.start, self.size)

        return added(keys, jax.tree.map(whole, more, keys))


def _as_like(gradients: Keys, like: Keys) -> Keys:
    """Gradients, unless they are None, in the dtypes of others."""
    pairs = zip(gradients, like, strict=True)
    return Keys(*(x if x is None or y is None else x.astype(y.dtype) for x, y in pairs))
