"""Pairs of queries and keys that devices compute, counted in closed form from the layout of a sequence."""

import math

import numpy as np

from energy_attn.kernels.internal import check_choice, check_integer

from ..cost._shape import Shape, check_sizes
from ..cost._topology import Topology
from ..methods._abstract import exchanging
from ..methods._cost import check_sharded, near_method
from ..methods._halo import Run, runs
from ..methods._methods import VARIANTS


def pairs(method: str, shape: Shape, topology: Topology, *, tile: int = 1) -> tuple[int, ...]:
    r"""The pairs of a query and a key that the busiest device computes, in each step of a method.

    $$\text{pairs}_s = B \tfrac{N}{h} \max_i
      \left|\{(t, a) : t \in Q_i,\; a \in K_{i,s},\; a \text{ seen by } t\}\right|$$

    with the queries $Q_i$ of device $i$, the keys $K_{i,s}$ that it has in step $s$, and $h$ devices that share the
    heads. Devices wait for each other in each step, so that these add up. A ring has $p$ steps, a hybrid $p / f$, a
    gather one for each of its pieces, the others have one; so do those that send a halo alone.

    Args:
        method: as for [`transfers`][energy_attn.distributed.cost.transfers].
        shape: the sizes, of sharded queries, as many as keys; `causal`, `window` and `layout` say which pairs are seen.
        topology: the mesh.
        tile: a kernel computes all of a square of so many queries and keys, or of fewer that divide the consecutive
            tokens of a device, where one of their pairs is seen.

    Returns:
        The number for each step.

    Raises:
        TypeError: `shape` is not a `Shape`, or `topology` not a `Topology`.
        ValueError: an unknown method, or one that these axes or heads do not allow; queries that are not sharded or
            not as many as keys; tokens that the layout does not divide equally; a tile below 1.

    Source: Striped Attention (arXiv 2311.09431), section 3, for the steps of a causal ring.

    Examples:
        >>> import dataclasses
        >>> from energy_attn.distributed import cost, plan
        >>> mesh = cost.topology("tpu_v5p", (4,))
        >>> shape = cost.Shape(1, 16, 16, 1, 1, 8, causal=True, queries_sharded=True)
        >>> plan.pairs("ring", shape, mesh)
        (10, 16, 16, 16)
        >>> plan.pairs("ring", dataclasses.replace(shape, layout="zigzag"), mesh)
        (10, 8, 8, 8)
    """
    check_sizes(shape, topology)
    check_choice("method", method, tuple(VARIANTS))
    way = next(iter(VARIANTS[method].values()))
    way.check_axes(topology.axes)
    check_sharded(way, shape, topology)
    check_integer("tile", tile, least=1)
    if shape.queries != shape.keys:
        raise ValueError(
            f"shape: wanted as many queries as the {shape.keys} keys, got {shape.queries}"
        )
    devices = topology.devices
    parts = 2 * devices if shape.layout == "zigzag" else devices
    if shape.keys % parts:
        raise ValueError(
            f"shape: wanted a multiple of {parts} tokens for the layout {shape.layout!r} over "
            f"{devices} devices, got {shape.keys}"
        )
    shared = exchanging(way, topology)
    groups = devices // shared

    def seen(start: int, stop: int) -> np.ndarray:
        every = _seen(shape, devices, start, stop, tile)
        return every.reshape(groups, shared, groups, shared).sum((1, 3))

    heads, near = shape.batch * shape.heads // shared, near_method(way, shape, devices, shared)
    return tuple(heads * int(x.max()) for x in near.pairs(seen, shape.keys // devices))


def _seen(shape: Shape, devices: int, start: int, stop: int, tile: int) -> np.ndarray:
    """Pairs of queries of each device and some keys of each, those from `start` to `stop`, `[devices, devices]`."""
    size = shape.keys // devices
    before, after = (shape.keys, shape.keys) if shape.window is None else shape.window
    window = before, 0 if shape.causal else after
    rows, columns = (_parts(shape, devices, *x) for x in ((0, size), (start, stop)))
    count = np.zeros((devices, devices), np.int64)
    for queries in rows:
        for keys in columns:
            count += _in_tiles(queries, keys, window, tile)
    return count


def _parts(shape: Shape, devices: int, start: int, stop: int) -> list[Run]:
    """The positions of each device's tokens from `start` to `stop`."""
    found = []
    for run in runs(shape.layout, shape.keys, devices) or ():
        low, high = max(start, run.place), min(stop, run.place + int(run.length[0]))
        if low < high:
            position = run.position + (low - run.place) * run.stride
            found.append(run._replace(position=position, length=np.asarray(high - low)))
    return found


def _in_tiles(queries: Run, keys: Run, window: tuple[int, int], tile: int) -> np.ndarray:
    """Pairs of two runs of one stride in tiles where some pair is seen, `[devices, devices]`."""
    lengths = math.gcd(int(queries.length), int(keys.length))
    tile = next(x for x in range(min(tile, lengths), 0, -1) if lengths % x == 0)
    step, reach = queries.stride * tile, queries.stride * (tile - 1)
    rows, columns = (int(x.length) // tile for x in (queries, keys))
    apart = queries.position[:, None] - keys.position[None, :]
    # of row i the tiles from `first + i` on, and before `last + i`
    last = (apart + reach + window[1]) // step + 1
    first = -((reach + window[0] - apart) // step)
    return tile**2 * (_below(last, rows, columns) - _below(first, rows, columns))


def _below(start: np.ndarray, rows: int, columns: int) -> np.ndarray:
    r"""$\sum_{i < \text{rows}} \min(\max(\text{start} + i, 0), \text{columns})$."""

    def until(x: np.ndarray) -> np.ndarray:
        inside = np.clip(x, 0, columns)
        return inside * (inside - 1) // 2 + columns * np.maximum(x - columns, 0)

    return until(start + rows) - until(start)
