"""The merge strategy of recursive halving and doubling of the rows."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, merge

from ..cost._shape import Shape
from ..cost._topology import Topology
from ..cost._transfer import Transfer, Transfers
from ._abstract import AbstractMerge, Axes
from ._packing import as_invariant, flat_rows, narrowed, permuted, promoted, shaped_like


class HalvingMerge(AbstractMerge):
    r"""A reduce-scatter of states, then a gather: $2 \lceil\log_2 p\rceil$ permutes for each axis, and one more.

    Each permute sends half of the remaining rows, in total $\frac{p-1}{p}$ of a state each way, as much as a
    ring in $2 (p - 1)$ steps. One device folds each row, so all results are bitwise equal.

    R. Rabenseifner, Optimization of collective reduction operations, ICCS 2004; in the form for any
    number of devices, J. L. Träff, Optimal, non-pipelined reduce-scatter and allreduce algorithms
    (arXiv 2410.14234).
    """

    name = "halving"
    least_axes = 1
    automatic = True

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        part = promoted(flat_rows(state, lax.axis_size(axes)))
        for axis in reversed(axes):
            part = _reduce_scatter(part, axis)
        fast = fast_axis([lax.axis_size(axis) for axis in axes])
        # A compiler may compute a share twice, where it is kept and where it is sent, with different rounding.
        # So each device sends its share away, and receives it back in the gather.
        devices = lax.axis_size(axes[fast])
        pairs = [(i, (i - 1) % devices) for i in range(devices)]
        part = permuted(narrowed(part, state), axes[fast], pairs)
        for i, axis in enumerate(axes):
            part = _all_gather(part, axis, 1 if i == fast else 0)
        return as_invariant(shaped_like(part, state), axes)

    def transfers(self, shape: Shape, topology: Topology) -> Transfers:
        share = rows = -(-shape.rows // topology.devices)
        sizes, back = [link.devices for link in topology.links], []
        for axis, devices in enumerate(sizes):
            for step, sent in reversed(rounds(devices)):
                size, pairs = sent * rows * shape.state, 2 * step == devices
                back.append(Transfer("collective-permute", size, (axis,), 1, step, pairs))
            rows *= devices
        fast = fast_axis(sizes)
        yield from reversed(back)
        yield Transfer("collective-permute", share * shape.state, (fast,), pairs=sizes[fast] == 2)
        yield from back


def rounds(devices: int) -> list[tuple[int, int]]:
    """The distance and the number of the shares that are sent in each round: half of the remaining ones."""
    rounds, remaining = [], devices
    while remaining > 1:
        step = -(-remaining // 2)
        rounds.append((step, remaining - step))
        remaining = step
    return rounds


def fast_axis(sizes: Sequence[int]) -> int:
    """The last axis of several devices."""
    return max((i for i, size in enumerate(sizes) if size > 1), default=0)


def _rows(state: AttentionState, begin: int, end: int) -> AttentionState:
    return AttentionState(state.out[begin:end], state.lse[begin:end])


def _concatenated(*states: AttentionState) -> AttentionState:
    return AttentionState(*(jnp.concatenate(x) for x in zip(*states, strict=True)))


def _reduce_scatter(state: AttentionState, axis: str) -> AttentionState:
    """This device's share of the rows, over all devices of an axis."""
    devices, rank = lax.axis_size(axis), lax.axis_index(axis)

    def shares(x: Array) -> Array:
        # share i belongs to the device i ranks further
        return jnp.roll(x.reshape(devices, x.shape[0] // devices, *x.shape[1:]), -rank, axis=0)

    state = AttentionState(*map(shares, state))
    for step, sent in rounds(devices):
        pairs = [(i, (i + step) % devices) for i in range(devices)]
        arrived = permuted(_rows(state, step, step + sent), axis, pairs)
        state = _concatenated(merge(arrived, _rows(state, 0, sent)), _rows(state, sent, step))
    return AttentionState(*(x[0] for x in state))


def _all_gather(state: AttentionState, axis: str, offset: int) -> AttentionState:
    """The shares of all devices of an axis, in order, by the rounds of `_reduce_scatter` in reverse.

    Each device starts with the share of the device `offset` ranks further.
    """
    devices, rank = lax.axis_size(axis), lax.axis_index(axis)
    state = AttentionState(*(x[None] for x in state))
    for step, sent in reversed(rounds(devices)):
        pairs = [(i, (i - step) % devices) for i in range(devices)]
        state = _concatenated(state, permuted(_rows(state, 0, sent), axis, pairs))

    def ordered(x: Array) -> Array:
        return jnp.roll(x, rank + offset, axis=0).reshape(devices * x.shape[1], *x.shape[2:])

    return AttentionState(*map(ordered, state))
