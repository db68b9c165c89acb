"""Halos: the keys of other devices that a device's queries may see, and their schedule around a ring."""

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

# At most this many spans are sent one by one.
_MOST_SPANS = 8

# From first and last positions of queries, and then of keys, `[devices]` each, to the first and the last of these keys
# that some query may see; the first is behind the last where queries see none.
Meets = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


class Span(NamedTuple):
    """Keys from `start` to `stop` of each device, sent `distance` places on, from 1 to one less than all devices."""

    distance: int
    start: int
    stop: int


class Halo(NamedTuple):
    """The keys that a device receives; static."""

    around: (
        int  # devices, itself among them, whose whole shards go around, each from the device before
    )
    spans: tuple[Span, ...]  # sent from devices further away directly

    def keys(self, size: int) -> int:
        return (self.around - 1) * size + sum(x.stop - x.start for x in self.spans)


class Run(NamedTuple):
    """A run of `length` positions of each device, from `position` on, every `stride`, at index `place` of its shard."""

    position: np.ndarray
    place: int
    length: np.ndarray
    stride: int = 1


def runs(layout: str, tokens: int, devices: int) -> list[Run] | None:
    """Runs of positions of each device in a layout; None if the layout cannot divide the tokens."""
    size, device = -(-tokens // devices), np.arange(devices)
    if layout == "contiguous":
        return [Run(device * size, 0, np.clip(tokens - device * size, 0, size))]
    if layout == "striped":
        return [Run(device, 0, -(-(tokens - device) // devices), devices)]
    if size % 2:
        return None
    piece, length = size // 2, np.full(devices, size // 2)
    back = (2 * devices - 1 - device) * piece
    return [Run(device * piece, 0, length), Run(back, piece, length)]


def run_length(layout: str, size: int) -> int | None:
    """The length of runs of successive tokens in a shard of `size` tokens; None: there are no runs."""
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
    """The keys of other devices from `window[0]` before queries to `window[1]` after them; None if these are all."""
    rows, columns = (runs(layout, count, devices) for count in (queries, keys))
    size, others = -(-keys // devices), range(1, devices)
    if layout == "striped":  # token n is on device n modulo their number
        spans = [Span(d, 0, size) for d in others if d <= window[0] or devices - d <= window[1]]
    elif rows is None or columns is None or devices == 1:
        return None
    else:
        spans = [x for d in others for x in _spans(rows, columns, d, window, meets)]
    result = Halo(1, tuple(spans))
    if (
        len(spans) > _MOST_SPANS
    ):  # whole shards of the devices just before go around; the rest is sent directly
        whole = [x.distance for x in spans if (x.start, x.stop) == (0, size)]
        consecutive = whole[-1] if whole == list(range(1, len(whole) + 1)) else 0
        rest = tuple(x for x in spans if x.distance > consecutive)
        if len(rest) > _MOST_SPANS:  # still too many: whole shards up to the last that is needed
            consecutive, rest = spans[-1].distance, ()
        result = Halo(1 + consecutive, rest)
    return result if result.keys(size) < (devices - 1) * size else None


# Calls outside of jit, and the cost model for each method, find the same halo again and again.
halo_of_window = functools.lru_cache(maxsize=1024)(halo)


def _spans(
    rows: list[Run], columns: list[Run], distance: int, window: tuple[int, int], meets: Meets | None
) -> list[Span]:
    """The keys that any device needs of the device `distance` places before it, in order."""
    spans: list[Span] = []
    for run in columns:
        position, length = (np.roll(x, distance) for x in (run.position, run.length))
        start, stop = int(length.max()), 0
        for queries in rows:
            last = queries.position + queries.length - 1
            first = np.maximum(position, queries.position - window[0])
            end = np.minimum(position + length, last + window[1] + 1)
            seen = (first < end) & (queries.length > 0)
            if meets is not None and seen.any():  # a mask hides more than the window
                nothing = np.where(seen, end - 1, first - 1)
                first, end = meets(queries.position, last, first, nothing)
                end, seen = end + 1, seen & (first <= end)
            if seen.any():
                start = min(start, int((first - position)[seen].min()))
                stop = max(stop, int((end - position)[seen].max()))
        if start < stop:
            spans.append(Span(distance, run.place + start, run.place + stop))
    if len(spans) == 2 and spans[0].stop == spans[1].start:
        return [Span(distance, spans[0].start, spans[1].stop)]
    return spans


def ring_pairs(seen: SeenPairs, size: int) -> list[np.ndarray]:
    pairs = seen(0, size)
    device = np.arange(len(pairs))
    return [pairs[device, device - step] for step in range(len(pairs))]


def ring_transfers(
    sizes: Sequence[int],
    halo: Halo | None,
    axes: tuple[int, ...],
    shape: Shape,
    topology: Topology,
    derivatives: Derivatives,
) -> Transfers:
    """The transfers of a `RingSchedule`, for keys and values of `sizes` bytes on each device."""
    devices = math.prod(topology.links[axis].devices for axis in axes)
    length = -(-shape.keys // topology.devices) * (topology.devices // devices)
    halo = halo or Halo(devices, ())
    hops, (tangent, gradient) = halo.around - 1, derivatives
    for size in sizes:
        if hops:
            # A derivative sends keys again, unless XLA merges its only hop with the forward's. A tangent sends
            # directions, too.
            count = 1 + ((tangent or gradient) and hops > 1) + tangent
            yield from [Transfer("collective-permute", size, axes, hops)] * count
        if hops and gradient:  # gradients follow their keys, and return to their devices
            moving = tangent_bytes(size, shape)
            yield Transfer("collective-permute", moving, axes, hops)
            yield Transfer("collective-permute", moving, axes)
        for span in halo.spans:
            part = size // length * (span.stop - span.start)
            # XLA merges the backward's keys with the forward's; their gradients return in the dtypes of the keys
            count = 1 + tangent + gradient
            yield from [Transfer("collective-permute", part, axes)] * count


def ring_schedule(call: LocalCall, halo: Halo | None = None) -> "RingSchedule":
    halo = halo or Halo(lax.axis_size(call.axes), ())
    return RingSchedule(call.axes, call.operands.key.shape[1], halo)


@dataclasses.dataclass(frozen=True)
class RingSchedule(AbstractKeySchedule):
    """First the shards that go around, the device's own one in front, then spans, each directly from its device."""

    # Gradients travel with the shards that go around. The gradients of spans return directly, in the keys' dtypes.
    axes: Axes
    size: int
    halo: Halo

    @property
    def count(self) -> int:
        return self.halo.around

    @property
    def trailing(self) -> int:
        return len(self.halo.spans)

    def first(self, shard: Arrays) -> Arrays:
        return shard

    def advance(self, held: Arrays, shard: Arrays, step: int | Array) -> Arrays:
        if isinstance(step, int) and step + 1 >= self.count:
            return self._fetch(shard, self.halo.spans[step + 1 - self.count])
        return hop(held, self.axes)

    def slice_step(self, x: Array, axis: int, step: int | Array) -> Array:
        is_span = isinstance(step, int) and step >= self.count
        span = self.halo.spans[step - self.count] if is_span else None
        place = source_device(step if span is None else span.distance, self.axes)
        part = lax.dynamic_slice_in_dim(x, place * self.size, self.size, axis)
        return part if span is None else lax.slice_in_dim(part, span.start, span.stop, axis=axis)

    def backward(self, run_step: StepFn, shard: Keys) -> Gradients:
        sums = self._backward_around(run_step, shard)
        # A span arrives during the products of the step before, and its gradients return during those of the next.
        spans, keys, returning = self.halo.spans, sums.keys, Keys(None, None)
        held = self._fetch(shard, spans[0]) if spans else shard
        for step, span in enumerate(spans, self.count):
            more = step + 1 - self.count < len(spans)
            coming = self._fetch(shard, spans[step + 1 - self.count]) if more else None
            arrived, sums = run_step(held, sums, step, blockwise.InFlight(coming, returning))
            keys = self._with(keys, arrived.sums, spans[step - 1 - self.count], step > self.count)
            returning = hop(_as_like(sums.keys, shard), self.axes, -span.distance)
            held = arrived.others
        if spans:
            keys = self._with(keys, returning, spans[-1], True)
        return sums._replace(keys=keys)

    def _backward_around(self, run_step: StepFn, shard: Keys) -> Gradients:
        # Gradients follow their keys one hop behind: no transfer needs the result of its own step.
        def pass_on(
            keys: Any, so_far: Gradients | None, step: int | Array, onward: bool, some: slice = ALL
        ) -> tuple[Any, Gradients]:
            sums = None if so_far is None else so_far.keys
            going = blockwise.InFlight(keys if onward else None, sums)
            arrived, result = run_step(keys, so_far, step, hop(going, self.axes), some)
            if so_far is not None:
                result = result._replace(keys=add_trees(arrived.sums, result.keys))
            return arrived.others, result

        half, last = self.size // 2, self.count - 1
        if last == 0:
            return run_step(shard, None, 0, blockwise.InFlight())[1]
        # The device's own keys are computed in two halves: the first while they leave, in step 0, and the second
        # last, while their gradients make the final hop.
        carry = pass_on(shard, None, 0, onward=True, some=slice(0, half))
        middle = jnp.arange(1, last, dtype=jnp.int32)
        carry, _ = lax.scan(lambda x, i: (pass_on(*x, i, onward=True), None), carry, middle)
        _, so_far = pass_on(*carry, last, onward=False)
        returning = hop(so_far.keys, self.axes, -last)
        # otherwise XLA slices the second half before the loop, and keeps it
        held, so_far = lax.optimization_barrier((shard, so_far))
        arrived, result = run_step(
            held, so_far, 0, blockwise.InFlight(None, returning), slice(half, self.size)
        )
        return result._replace(keys=add_trees(arrived.sums, result.keys))

    def _fetch(self, shard: Arrays, span: Span) -> Arrays:
        keys = jax.tree.map(lambda x: lax.slice_in_dim(x, span.start, span.stop, axis=1), shard)
        return hop(keys, self.axes, span.distance)

    def _with(self, keys: Keys, more: Any, span: Span, is_there: bool) -> Keys:
        if not is_there:
            return keys

        def whole(x: Array, like: Array) -> Array:
            return pad_zeros(x.astype(like.dtype), 1, span.start, self.size)

        return add_trees(keys, jax.tree.map(whole, more, keys))


def _as_like(gradients: Keys, like: Keys) -> Keys:
    pairs = zip(gradients, like, strict=True)
    return Keys(*(x if x is None or y is None else x.astype(y.dtype) for x, y in pairs))
