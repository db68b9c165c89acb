"""Halos: the keys of other devices that a device's queries may see, and the ring on which they come."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from energy_attn.kernels.internal import blockwise

from ..cost._network import Derivatives, Topology, Transfer, Transfers
from ..cost._shape import Shape, tangent_bytes
from ..merge._abstract import Axes
from ._abstract import (
    ALL,
    AbstractKeySchedule,
    Arrays,
    Gradients,
    Keys,
    LocalCall,
    SeenPairs,
    StepFn,
    add_trees,
    hop,
    pad_zeros,
    source_device,
)

# More spans than this are not sent one by one.
_MOST_SPANS = 8


# Of first and last positions of queries, and then of keys, `[devices]` each: the first and the last of these keys that
# some of the queries may see, the first behind the last where they see none.
Meets = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


class Span(NamedTuple):
    """Keys from `start` to `stop` of each device, sent `distance` places on, from 1 to one less than all devices."""

    distance: int
    start: int
    stop: int


class Halo(NamedTuple):
    """The keys that a device receives; static.

    Of `around` devices, its own among them, keys go around whole, each from the device before; `spans` are sent from
    further ones directly.
    """

    around: int
    spans: tuple[Span, ...]

    def keys(self, size: int) -> int:
        return (self.around - 1) * size + sum(x.stop - x.start for x in self.spans)


class Run(NamedTuple):
    """A run of `length` positions of each device, from `position` on, every `stride`, at index `place` of its part."""

    position: np.ndarray
    place: int
    length: np.ndarray
    stride: int = 1


def runs(layout: str, tokens: int, devices: int) -> list[Run] | None:
    """Runs of positions of each device in a layout; None if the layout cannot divide the tokens."""
    size, here = -(-tokens // devices), np.arange(devices)
    if layout == "contiguous":
        return [Run(here * size, 0, np.clip(tokens - here * size, 0, size))]
    if layout == "striped":
        return [Run(here, 0, -(-(tokens - here) // devices), devices)]
    if size % 2:
        return None
    piece, length = size // 2, np.full(devices, size // 2)
    return [Run(here * piece, 0, length), Run((2 * devices - 1 - here) * piece, piece, length)]


def run_length(layout: str, size: int) -> int | None:
    """The length of runs of successive tokens where a device has `size`; None: there are no runs."""
    return {"contiguous": size, "zigzag": size // 2}.get(layout)


def has_groups(layout: str, queries: int, keys: int, devices: int) -> bool:
    """Whether consecutive devices hold consecutive tokens, so that a group acts as one device."""
    return layout == "contiguous" and queries % devices == 0 and keys % devices == 0


def halo(
    layout: str,
    devices: int,
    queries: int,
    keys: int,
    window: tuple[int, int],
    meets: Meets | None = None,
) -> Halo | None:
    """The keys that queries may see, from `window[0]` before them to `window[1]` after; None: of all devices.

    `meets` may say that they see fewer.
    """
    rows, columns = (runs(layout, count, devices) for count in (queries, keys))
    size, others = -(-keys // devices), range(1, devices)
    if layout == "striped":  # token n is on device n modulo their number
        every = [Span(d, 0, size) for d in others if d <= window[0] or devices - d <= window[1]]
    elif rows is None or columns is None or devices == 1:
        return None
    else:
        every = [x for d in others for x in _spans(rows, columns, d, window, meets)]
    found = Halo(1, tuple(every))
    if len(every) > _MOST_SPANS:
        whole = [x.distance for x in every if (x.start, x.stop) == (0, size)]
        consecutive = whole[-1] if whole == list(range(1, len(whole) + 1)) else 0
        rest = tuple(x for x in every if x.distance > consecutive)
        if len(rest) > _MOST_SPANS:  # all of each, up to the last that is needed
            consecutive, rest = every[-1].distance, ()
        found = Halo(1 + consecutive, rest)
    return found if found.keys(size) < (devices - 1) * size else None


# A call outside of jit asks each time, and the cost model for each method.
halo_of_window = functools.lru_cache(maxsize=1024)(halo)


def _spans(
    rows: list[Run], columns: list[Run], distance: int, window: tuple[int, int], meets: Meets | None
) -> list[Span]:
    """The keys that any device needs of the one `distance` places before it, in order."""
    found: list[Span] = []
    for run in columns:
        position, length = (np.roll(x, distance) for x in (run.position, run.length))
        start, stop = int(length.max()), 0
        for queries in rows:
            last = queries.position + queries.length - 1
            first = np.maximum(position, queries.position - window[0])
            end = np.minimum(position + length, last + window[1] + 1)
            seen = (first < end) & (queries.length > 0)
            if meets is not None and seen.any():
                nothing = np.where(seen, end - 1, first - 1)
                first, end = meets(queries.position, last, first, nothing)
                end, seen = end + 1, seen & (first <= end)
            if seen.any():
                start = min(start, int((first - position)[seen].min()))
                stop = max(stop, int((end - position)[seen].max()))
        if start < stop:
            found.append(Span(distance, run.place + start, run.place + stop))
    if len(found) == 2 and found[0].stop == found[1].start:
        return [Span(distance, found[0].start, found[1].stop)]
    return found


def ring_pairs(seen: SeenPairs, size: int) -> list[np.ndarray]:
    pairs = seen(0, size)
    here = np.arange(len(pairs))
    return [pairs[here, here - step] for step in range(len(pairs))]


def ring_transfers(
    sizes: Sequence[int],
    halo: Halo | None,
    axes: tuple[int, ...],
    shape: Shape,
    topology: Topology,
    derivatives: Derivatives,
) -> Transfers:
    """The transfers of `keys_around`, of keys and values of `sizes` bytes on each device.

    Gradients return in the dtypes of keys and values, or behind keys that go around.
    """
    devices = math.prod(topology.links[axis].devices for axis in axes)
    length = -(-shape.keys // topology.devices) * (topology.devices // devices)
    halo = halo or Halo(devices, ())
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


def ring_schedule(call: LocalCall, halo: Halo | None = None) -> "RingSchedule":
    """Key schedule in which the keys of `halo`, by default all, go around the devices of a call."""
    halo = halo or Halo(lax.axis_size(call.axes), ())
    return RingSchedule(call.axes, call.operands.key.shape[1], halo)


@dataclasses.dataclass(frozen=True)
class RingSchedule(AbstractKeySchedule):
    """First the keys that go around whole, the own ones in front, then spans, each straight from its device.

    Gradients travel with the keys that go around; those of spans return as they came, in the dtypes of keys.
    """

    axes: Axes
    size: int
    halo: Halo

    @property
    def count(self) -> int:
        return self.halo.around

    @property
    def trailing(self) -> int:
        return len(self.halo.spans)

    def first(self, own: Arrays) -> Arrays:
        return own

    def advance(self, here: Arrays, own: Arrays, step: int | Array) -> Arrays:
        if isinstance(step, int) and step + 1 >= self.count:
            return self._fetch(own, self.halo.spans[step + 1 - self.count])
        return hop(here, self.axes)

    def slice_step(self, x: Array, axis: int, step: int | Array) -> Array:
        span = self._span(step)
        place = source_device(step if span is None else span.distance, self.axes)
        found = lax.dynamic_slice_in_dim(x, place * self.size, self.size, axis)
        return found if span is None else lax.slice_in_dim(found, span.start, span.stop, axis=axis)

    def backward(self, run_step: StepFn, own: Keys) -> Gradients:
        found = self._backward_around(run_step, own)
        # each span comes beside the products of the step before, and its gradients return beside those of the next
        spans, keys, home = self.halo.spans, found.keys, Keys(None, None)
        here = self._fetch(own, spans[0]) if spans else own
        for step, span in enumerate(spans, self.count):
            more = step + 1 - self.count < len(spans)
            coming = self._fetch(own, spans[step + 1 - self.count]) if more else None
            arrived, found = run_step(here, found, step, blockwise.InFlight(coming, home))
            keys = self._with(keys, arrived.sums, spans[step - 1 - self.count], step > self.count)
            home = hop(_as_like(found.keys, own), self.axes, -span.distance)
            here = arrived.others
        if spans:
            keys = self._with(keys, home, spans[-1], True)
        return found._replace(keys=keys)

    def _backward_around(self, run_step: StepFn, own: Keys) -> Gradients:
        # Gradients follow their keys one hop behind: no transfer needs the result of its own step.
        def pass_on(
            keys: Any, so_far: Gradients | None, step: int | Array, onward: bool, some: slice = ALL
        ) -> tuple[Any, Gradients]:
            sums = None if so_far is None else so_far.keys
            going = blockwise.InFlight(keys if onward else None, sums)
            arrived, found = run_step(keys, so_far, step, hop(going, self.axes), some)
            if so_far is not None:
                found = found._replace(keys=add_trees(arrived.sums, found.keys))
            return arrived.others, found

        half, last = self.size // 2, self.count - 1
        if last == 0:
            return run_step(own, None, 0, blockwise.InFlight())[1]
        # Of the own keys the first half comes first, beside whose products they leave, and the second half last, beside
        # whose products gradients come home.
        carry = pass_on(own, None, 0, onward=True, some=slice(0, half))
        middle = jnp.arange(1, last, dtype=jnp.int32)
        carry, _ = lax.scan(lambda x, i: (pass_on(*x, i, onward=True), None), carry, middle)
        _, so_far = pass_on(*carry, last, onward=False)
        home = hop(so_far.keys, self.axes, -last)
        # else XLA cuts the second half before the loop, and keeps it
        here, so_far = lax.optimization_barrier((own, so_far))
        arrived, found = run_step(
            here, so_far, 0, blockwise.InFlight(None, home), slice(half, self.size)
        )
        return found._replace(keys=add_trees(arrived.sums, found.keys))

    def _span(self, step: int | Array) -> Span | None:
        is_later = isinstance(step, int) and step >= self.count
        return self.halo.spans[step - self.count] if is_later else None

    def _fetch(self, own: Arrays, span: Span) -> Arrays:
        cut = jax.tree.map(lambda x: lax.slice_in_dim(x, span.start, span.stop, axis=1), own)
        return hop(cut, self.axes, span.distance)

    def _with(self, keys: Keys, more: Any, span: Span, is_there: bool) -> Keys:
        if not is_there:
            return keys

        def whole(x: Array, like: Array) -> Array:
            return pad_zeros(x.astype(like.dtype), 1, span.start, self.size)

        return add_trees(keys, jax.tree.map(whole, more, keys))


def _as_like(gradients: Keys, like: Keys) -> Keys:
    pairs = zip(gradients, like, strict=True)
    return Keys(*(x if x is None or y is None else x.astype(y.dtype) for x, y in pairs))
