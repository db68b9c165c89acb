"""The time of an attention over a mesh of chips: pairs of queries and keys, products and exposed transfers."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from energy_attn.kernels.internal import checks

from ..cost._network import Topology, Transfer, seconds
from ..cost._shape import Shape, check_sizes
from ..methods._abstract import exchanging
from ..methods._choice import VARIANTS, check_sharded, halo_method
from ..methods._halo import Run, runs
from ._cost import transfers


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device of a mesh: how fast it multiplies, and how much it holds.

    Attributes:
        network: the name of its interconnect, as [`topology`][energy_attn.distributed.cost.topology] takes it.
        flops: the peak of dense bfloat16 products, in floating-point operations per second.
        memory: bytes.
        efficiency: the part of the peak that products reach.

    Raises:
        TypeError: a number or a name of another type.
        ValueError: a rate or a memory that is not positive, or an efficiency that is not between 0 and 1.

    Examples:
        >>> import dataclasses
        >>> from energy_attn.distributed import plan
        >>> dataclasses.replace(plan.chip("v5p"), efficiency=0.5).efficiency  # a chip of other figures
        0.5
    """

    network: str
    flops: float
    memory: int
    efficiency: float = 0.5

    def __post_init__(self) -> None:
        checks.check_text("network", self.network)
        checks.check_integer("memory", self.memory, least=1, is_wide=True)
        if checks.check_finite_number("flops", self.flops) <= 0:
            raise ValueError(f"flops: wanted operations per second, above 0, got {self.flops}")
        if not 0 < checks.check_finite_number("efficiency", self.efficiency) <= 1:
            raise ValueError(
                f"efficiency: wanted a part of the peak, above 0 and at most 1, got {self.efficiency}"
            )


# Peaks and memory are the makers': Google Cloud's pages of TPU v4, v5e, v5p and v6e, and NVIDIA's data sheets of H100
# SXM and H200. Efficiencies are those of whole training steps without context parallelism that MaxText publishes
# (docs/reference/models/tiering.md, 15 June 2026): Llama 2 70B on 512 v5p, Llama 3.1 70B on 256 v6e. Others: assumed.
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "v4": Chip("tpu_v4", 275e12, 32 << 30),
        "v5e": Chip("tpu_v5e", 197e12, 16 * 10**9),
        "v5p": Chip("tpu_v5p", 459e12, 95 * 10**9, 0.654),
        "v6e": Chip("tpu_v6e", 918e12, 32 * 10**9, 0.503),
        "h100": Chip("dgx_h100", 989.4e12, 80 * 10**9),
        "h200": Chip("dgx_h200", 989.4e12, 141 * 10**9),
    }
)


def chip(name: str, *, efficiency: float | None = None) -> Chip:
    """Returns a chip by name: its peak rate, memory, network and efficiency.

    | name | dense bfloat16 products, TFLOP/s | memory | efficiency |
    |---|---|---|---|
    | `"v4"` | 275 | 32 GiB | 0.5, assumed |
    | `"v5e"` | 197 | 16 GB | 0.5, assumed |
    | `"v5p"` | 459 | 95 GB | 0.654 |
    | `"v6e"` | 918 | 32 GB | 0.503 |
    | `"h100"` | 989.4 | 80 GB | 0.5, assumed |
    | `"h200"` | 989.4 | 141 GB | 0.5, assumed |

    Args:
        name: as above.
        efficiency: the part of the peak that products reach; None: as above.

    Raises:
        TypeError: `efficiency` is no number.
        ValueError: an unknown name, or an efficiency that is not between 0 and 1.

    Source: Google Cloud's pages of TPU v4, v5e, v5p and v6e, NVIDIA's data sheets of H100 SXM and H200; efficiencies
        of whole training steps: MaxText, docs/reference/models/tiering.md, 15 June 2026.

    Examples:
        >>> from energy_attn.distributed import plan
        >>> plan.chip("v5p").flops, plan.chip("v5p", efficiency=0.4).efficiency
        (459000000000000.0, 0.4)
    """
    checks.check_choice("name", name, tuple(CHIPS))
    chip = CHIPS[name]
    return chip if efficiency is None else dataclasses.replace(chip, efficiency=efficiency)


def pairs(method: str, shape: Shape, topology: Topology, *, tile: int = 1) -> tuple[int, ...]:
    r"""Counts the (query, key) pairs that the busiest device computes in each step of a method.

    $$\text{pairs}_s = B \tfrac{N}{h} \max_i
      \left|\{(t, a) : t \in Q_i,\; a \in K_{i,s},\; a \text{ seen by } t\}\right|$$

    with the queries $Q_i$ of device $i$, the keys $K_{i,s}$ that it has in step $s$, and $h$ devices that share the
    heads. Devices wait for each other in each step, so the counts add up. A ring has $p$ steps, a hybrid $p / f$, a
    gather one per piece; other methods, and an exchange of a halo, have one.

    Args:
        method: as for [`transfers`][energy_attn.distributed.cost.transfers].
        shape: the sizes, of sharded queries, as many as keys; `causal`, `window` and `layout` say which pairs are seen.
        topology: the mesh.
        tile: the side of the square of queries and keys that a kernel computes whole if one of its pairs is seen;
            reduced to a divisor of the consecutive tokens of a device.

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
    checks.check_choice("method", method, tuple(VARIANTS))
    variant = next(iter(VARIANTS[method].values()))
    variant.check_axes(topology.axes)
    check_sharded(variant, shape, topology)
    checks.check_integer("tile", tile, least=1)
    if shape.queries != shape.keys:
        raise ValueError(
            f"shape: wanted as many queries as the {shape.keys} keys, got {shape.queries}"
        )
    # a shard in the order "zigzag" has two pieces
    devices = topology.devices
    parts = 2 * devices if shape.layout == "zigzag" else devices
    if shape.keys % parts:
        raise ValueError(
            f"shape: wanted a multiple of {parts} tokens for the layout {shape.layout!r} over "
            f"{devices} devices, got {shape.keys}"
        )
    shared = exchanging(variant, topology)
    groups = devices // shared

    def seen(start: int, stop: int) -> np.ndarray:
        visible = _visible_pairs(shape, devices, start, stop, tile)
        return visible.reshape(groups, shared, groups, shared).sum((1, 3))

    heads, variant = (
        shape.batch * shape.heads // shared,
        halo_method(variant, shape, devices, shared),
    )
    return tuple(heads * int(x.max()) for x in variant.pairs(seen, shape.keys // devices))


def _visible_pairs(shape: Shape, devices: int, start: int, stop: int, tile: int) -> np.ndarray:
    """Visible pairs of each device's queries with each device's keys from `start` to `stop`, `[devices, devices]`."""
    # positions are those of the layout: a row of runs for each device
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
    parts = []
    for run in runs(shape.layout, shape.keys, devices) or ():
        low, high = max(start, run.place), min(stop, run.place + int(run.length[0]))
        if low < high:
            position = run.position + (low - run.place) * run.stride
            parts.append(run._replace(position=position, length=np.asarray(high - low)))
    return parts


def _in_tiles(queries: Run, keys: Run, window: tuple[int, int], tile: int) -> np.ndarray:
    """Pairs in tiles with a visible pair, of two runs with one stride, `[devices, devices]`."""
    # the largest tile up to `tile` that divides both runs
    lengths = math.gcd(int(queries.length), int(keys.length))
    tile = next(x for x in range(min(tile, lengths), 0, -1) if lengths % x == 0)
    step, reach = queries.stride * tile, queries.stride * (tile - 1)
    rows, columns = (int(x.length) // tile for x in (queries, keys))
    distance = queries.position[:, None] - keys.position[None, :]
    # row i of tiles sees the columns from `first + i` up to, and without, `last + i`
    last = (distance + reach + window[1]) // step + 1
    first = -((reach + window[0] - distance) // step)
    return tile**2 * (_below(last, rows, columns) - _below(first, rows, columns))


def _below(start: np.ndarray, rows: int, columns: int) -> np.ndarray:
    # Σ_{i < rows} min(max(start + i, 0), columns), as the difference of two sums from 0 on
    def until(x: np.ndarray) -> np.ndarray:
        inside = np.clip(x, 0, columns)
        return inside * (inside - 1) // 2 + columns * np.maximum(x - columns, 0)

    return until(start + rows) - until(start)


class StepTime(NamedTuple):
    """Seconds of an attention.

    Attributes:
        products: matrix products of the busiest device, summed over the steps.
        transfers: all collectives, without overlap; a permute uses one of the two links of a torus axis.
        exposed: the part of the transfers that no product hides.
    """

    products: float
    transfers: float
    exposed: float

    @property
    def seconds(self) -> float:
        """Products and exposed transfers."""
        return self.products + self.exposed


def step_time(
    method: str,
    merge: str | None,
    shape: Shape,
    topology: Topology,
    chip: Chip,
    *,
    tile: int = 1,
    gradient: bool = False,
) -> StepTime:
    r"""The seconds of an attention: products, and exposed transfers.

    $$t = \sum_s \frac{2 (H + H_v)\, \text{pairs}_s}{\text{efficiency} \cdot \text{flops}}
      + \text{exposed}, \qquad
      \text{exposed} = \sum_s \max(0, \text{transfers}_s - \text{products}_s) + \text{others}$$

    with the [pairs][energy_attn.distributed.plan.pairs] of each step. `transfers_s` are those that a compiled program
    starts before the products of a step and awaits after them: hops of keys and of their gradients around a ring (half
    of a device's own keys are left for the last hop); on GPUs the gathers of all pieces except the first, and the
    scatters of all gradients except the last. All others are exposed: all-to-alls, gathers of the backward, all
    gathers on TPUs, the spans of a window, a tree's states. A permute uses one of the two links of a torus axis. The
    backward has five products where the forward has two: scores again, and the gradients of weights, values, queries
    and keys, $2 (3 H + 2 H_v)$ operations per pair.

    Args:
        method: as for [`transfers`][energy_attn.distributed.cost.transfers].
        merge: as for `transfers`.
        shape: the sizes, of sharded queries, as many as keys.
        topology: the mesh.
        chip: its devices.
        tile: as for `pairs`.
        gradient: whether to add the backward.

    Returns:
        A named tuple of seconds: `products` of the busiest device, `transfers` of all collectives without overlap,
        and `exposed`, the part of the transfers that no product hides; `seconds` is products plus exposed.

    Raises:
        TypeError: `chip` is not a `Chip`, or as `transfers` and `pairs`.
        ValueError: as `transfers` and `pairs`.

    Source: FlashAttention-2 (arXiv 2307.08691), section 3.1.2, for the products of the backward. The overlap of
        transfers with products was read from programs compiled for v5p, v6e and H200:
        [what each strategy sends](../choosing.md#what-each-strategy-sends).

    Examples:
        >>> from energy_attn.distributed import cost, plan
        >>> shape = cost.Shape(1, 2**17, 2**17, 32, 8, 128, causal=True, queries_sharded=True)
        >>> mesh, chip = cost.topology("tpu_v5p", (16,)), plan.chip("v5p")
        >>> ring = plan.step_time("ring", "keys", shape, mesh, chip)
        >>> ring.exposed < 0.01 * ring.transfers
        True
    """
    if not isinstance(chip, Chip):
        raise TypeError(f"chip: wanted a Chip, got {checks.received(chip)}")
    counts = pairs(method, shape, topology, tile=tile)
    forward = transfers(method, merge, shape, topology)
    # operations per pair: Q Kᵀ and P V; in the backward Q Kᵀ, dO Vᵀ, dSᵀ Q, dS K and Pᵀ dO
    passes = [(forward, 2 * (shape.width + shape.out_width))]
    if checks.check_flag("gradient", gradient):
        both = transfers(method, merge, shape, topology, gradient=True)
        backward = tuple(_without(both, forward))
        passes.append((backward, 2 * (3 * shape.width + 2 * shape.out_width)))
    total = StepTime(0.0, 0.0, 0.0)
    for is_backward, (sent, operations) in enumerate(passes):
        products = [x * operations / (chip.efficiency * chip.flops) for x in counts]
        overlapped = _overlapped(
            VARIANTS[method][merge].overlap, topology, sent, forward, len(counts), bool(is_backward)
        )
        all_transfers = sum(x.count * _seconds(x, topology) for x in sent)
        # a device's own keys are computed in two halves, first and last
        if len(overlapped) > len(products):
            products = [products[0] / 2, *products[1:], products[0] / 2]
        hidden = sum(map(min, overlapped, products)) if overlapped else 0.0
        time = StepTime(sum(products), all_transfers, max(0.0, all_transfers - hidden))
        total = StepTime(*(a + b for a, b in zip(total, time, strict=True)))
    return total


def _overlapped(
    overlap: str,
    topology: Topology,
    sent: Sequence[Transfer],
    forward: Sequence[Transfer],
    steps: int,
    is_backward: bool,
) -> list[float]:
    """Seconds of transfers that overlap the products of each step; empty if all are exposed."""

    def lasting(transfers: Sequence[Transfer]) -> float:
        return sum(_seconds(x, topology) for x in transfers)

    if steps == 1 or overlap == "none" or (overlap == "pieces" and topology.platform != "gpu"):
        return []
    if overlap == "pieces":
        # the gathers of the pieces behind the first; the scatters of the gradients of the piece before
        kind = "reduce-scatter" if is_backward else "all-gather"
        pieces = lasting([x for x in sent if x.kind == kind and x.count == steps])
        return [0.0] + [pieces] * (steps - 1)
    hops = [x for x in sent if x.kind == "collective-permute"]
    if not is_backward:  # a hop during each step but the last
        return [lasting(hops)] * (steps - 1) + [0.0]
    # keys go around again, unless XLA merged their only hop, and gradients follow one step behind
    keys = [x for x in forward if x.kind == "collective-permute"]
    gradients = _without(hops, keys) if steps > 2 else hops
    last_hops = gradients[1::2]  # of keys and of values, each after the hops around the ring
    gradients, hops = gradients[::2], _without(hops, last_hops)
    around, behind = lasting(_without(hops, gradients)), lasting(gradients)
    return [around] + [around + behind] * (steps - 2) + [behind, lasting(last_hops)]


def _seconds(transfer: Transfer, topology: Topology) -> float:
    """Seconds of one run, where a permute uses one direction of a torus axis."""
    # `latency` counts both directions. Otherwise "auto" would prefer gathers, which hide nothing on TPUs, to rings.
    if transfer.kind == "collective-permute":
        links = (
            dataclasses.replace(x, bandwidth=x.bandwidth / 2) if x.torus else x
            for x in topology.links
        )
        topology = dataclasses.replace(topology, links=tuple(links))
    return seconds(transfer, topology)


def _without(transfers: Sequence[Transfer], others: Sequence[Transfer]) -> list[Transfer]:
    rest = list(transfers)
    for other in others:
        rest.remove(other)
    return rest
