"""Halos: keys of other devices that a device's queries may see, by the positions of a layout."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

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
