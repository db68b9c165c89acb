"""The time of an attention over a mesh: its products, and what its transfers add to them."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from energy_attn.kernels.internal import check_flag, received

from ..cost._shape import Shape
from ..cost._topology import Topology
from ..cost._transfer import Transfer, seconds
from ..methods._cost import transfers
from ..methods._methods import VARIANTS
from ._chips import Chip
from ._pairs import pairs


class StepTime(NamedTuple):
    """Seconds of an attention.

    Attributes:
        products: of the busiest device in each step, added up.
        transfers: of all collectives, if nothing overlaps; permutes over a torus by one of an axis' two links.
        exposed: the part of them beside which nothing is computed.

    Examples:
        >>> from energy_attn.distributed import plan
        >>> plan.StepTime(products=2.0, transfers=1.5, exposed=0.5).exposed
        0.5
    """

    products: float
    transfers: float
    exposed: float

    @property
    def seconds(self) -> float:
        """Products, and the transfers that are exposed.

        Examples:
            >>> from energy_attn.distributed import plan
            >>> plan.StepTime(products=2.0, transfers=1.5, exposed=0.5).seconds
            2.5
        """
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

    with the [pairs][energy_attn.distributed.plan.pairs] of each step, and the transfers that a compiled program starts
    before the products of a step and awaits after them: those of keys and of their gradients around a ring, beside
    whose last hop, home, half of a device's own keys are left; on GPUs the gathers of all pieces but the first, and the
    scatters of all gradients but the last. All others are exposed: all-to-alls, gathers of the backward, all gathers on
    TPUs, the spans of a window, a tree's
    states. A permute goes one way, by one of the two links of a torus axis. The backward has five products where the
    forward has two: scores again, and the gradients of weights, values, queries and keys, $2 (3 H + 2 H_v)$
    operations a pair.

    Args:
        method: as for [`transfers`][energy_attn.distributed.cost.transfers].
        merge: likewise.
        shape: the sizes, of sharded queries, as many as keys.
        topology: the mesh.
        chip: its devices.
        tile: as for `pairs`.
        gradient: whether to add the backward.

    Returns:
        A [`StepTime`][energy_attn.distributed.plan.StepTime].

    Raises:
        TypeError: `chip` is not a `Chip`, or as `transfers` and `pairs`.
        ValueError: as `transfers` and `pairs`.

    Source: FlashAttention-2 (arXiv 2307.08691), section 3.1.2, for the products of the backward. Which transfers lie
        beside products was read from programs compiled for v5p, v6e and H200:
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
        raise TypeError(f"chip: wanted a Chip, got {received(chip)}")
    counts = pairs(method, shape, topology, tile=tile)
    forward = transfers(method, merge, shape, topology)
    passes = [(forward, 2 * (shape.width + shape.out_width))]
    if check_flag("gradient", gradient):
        both = transfers(method, merge, shape, topology, gradient=True)
        backward = tuple(_without(both, forward))
        passes.append((backward, 2 * (3 * shape.width + 2 * shape.out_width)))
    total = StepTime(0.0, 0.0, 0.0)
    for is_backward, (sent, operations) in enumerate(passes):
        products = [x * operations / (chip.efficiency * chip.flops) for x in counts]
        beside = _beside(
            VARIANTS[method][merge].overlap, topology, sent, forward, len(counts), bool(is_backward)
        )
        every = sum(x.count * _seconds(x, topology) for x in sent)
        if len(beside) > len(products):  # the own keys, half of them first and half last
            products = [products[0] / 2, *products[1:], products[0] / 2]
        hidden = sum(map(min, beside, products)) if beside else 0.0
        found = StepTime(sum(products), every, max(0.0, every - hidden))
        total = StepTime(*(a + b for a, b in zip(total, found, strict=True)))
    return total


def _beside(
    overlap: str,
    topology: Topology,
    sent: Sequence[Transfer],
    forward: Sequence[Transfer],
    steps: int,
    is_backward: bool,
) -> list[float]:
    """Seconds of transfers that overlap the products of each step; empty if all are exposed."""

    def lasting(some: Sequence[Transfer]) -> float:
        return sum(_seconds(x, topology) for x in some)

    if steps == 1 or overlap == "none" or (overlap == "pieces" and topology.platform != "gpu"):
        return []
    if overlap == "pieces":
        # the gathers of the pieces behind the first; the scatters of the gradients of the piece before
        kind = "reduce-scatter" if is_backward else "all-gather"
        pieces = lasting([x for x in sent if x.kind == kind and x.count == steps])
        return [0.0] + [pieces] * (steps - 1)
    hops = [x for x in sent if x.kind == "collective-permute"]
    if not is_backward:
        return [lasting(hops)] * (steps - 1) + [0.0]
    keys = [x for x in forward if x.kind == "collective-permute"]
    gradients = _without(hops, keys) if steps > 2 else hops
    home = gradients[1::2]  # of keys and of values, each behind the hops before it
    gradients, hops = gradients[::2], _without(hops, home)
    around, behind = lasting(_without(hops, gradients)), lasting(gradients)
    return [around] + [around + behind] * (steps - 2) + [behind, lasting(home)]


def _seconds(transfer: Transfer, topology: Topology) -> float:
    """Seconds of one run. A permute uses one direction of a torus axis.

    `latency` counts both: else `method="auto"` would take gathers on TPUs, which hide nothing, for rings, which do.
    """
    if transfer.kind == "collective-permute":
        links = (
            dataclasses.replace(x, bandwidth=x.bandwidth / 2) if x.torus else x
            for x in topology.links
        )
        topology = dataclasses.replace(topology, links=tuple(links))
    return seconds(transfer, topology)


def _without(some: Sequence[Transfer], others: Sequence[Transfer]) -> list[Transfer]:
    """Removes each transfer of `others` once from `some`."""
    rest = list(some)
    for other in others:
        rest.remove(other)
    return rest
