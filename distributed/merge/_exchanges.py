"""Merge strategies of pairwise exchanges, of whole states or of shares of their rows."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, merge, merge_all
from energy_attn.kernels.internal import State

from ..cost._shape import Shape
from ..cost._topology import Topology
from ..cost._transfer import Transfer, Transfers
from ._abstract import AbstractMerge, AbstractMessageMerge, Axes, exchange
from ._packing import (
    as_invariant,
    flat_rows,
    narrowed,
    packed,
    permuted,
    promoted,
    shaped_like,
    transfer,
    unpacked,
)


class ButterflyMerge(AbstractMessageMerge):
    r"""$\lceil \log_2 p \rceil$ exchanges, the last axis first.

    Every device folds the same states in the same order, so all results are bitwise equal.
    """

    name = "butterfly"
    least_axes = 1
    automatic = True

    def fold(self, state: State, axes: Axes) -> State:
        return as_invariant(narrowed(exchanged(promoted(state), axes), state), axes)

    def transfers(self, shape: Shape, topology: Topology) -> Transfers:
        return exchange_transfers(shape.rows * shape.state, topology, topology.axes)


class HierarchicalMerge(AbstractMerge):
    """Folds a share of the rows on each device of the last axis; only shares are sent over the other axes.

    For states, this is what a reduce-scatter, an all-reduce and an all-gather are for sums.
    """

    name = "hierarchical"
    least_axes = 2
    automatic = True

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        *slow, fast = axes
        devices = lax.axis_size(fast)
        rows = flat_rows(state, devices)
        shares = jax.tree.map(lambda x: x.reshape(devices, len(x) // devices, *x.shape[1:]), rows)
        folded = narrowed(exchanged(exchange(shares, (fast,)), tuple(slow)), state)
        gathered = transfer(lambda x: lax.all_gather(x, fast, tiled=True), folded)
        return as_invariant(shaped_like(gathered, state), axes)

    def transfers(self, shape: Shape, topology: Topology) -> Transfers:
        *slow, fast = topology.axes
        devices = topology.links[fast].devices
        share = -(-shape.rows // devices)
        if devices > 1:
            yield Transfer("all-to-all", share * devices * shape.state, (fast,))
        yield from exchange_transfers(share * shape.state, topology, tuple(slow))
        if devices > 1:
            yield Transfer("all-gather", share * shape.state, (fast,))


def exchanged(state: State, axes: Axes) -> State:
    for axis in reversed(axes):
        devices = lax.axis_size(axis)
        odd = devices // (devices & -devices)
        state = merge_all(unpacked(_neighbours(packed(state), axis, odd), state), axis=0)
        step = odd
        while step < devices:  # exchange with the device `step` before or after
            pairs = [(i, i - step if i // step % 2 else i + step) for i in range(devices)]
            state = merge(state, unpacked(permuted(packed(state), axis, pairs), state))
            step *= 2
    return state


def exchange_transfers(size: int, topology: Topology, axes: tuple[int, ...]) -> Transfers:
    """The permutes of `exchanged` over these axes, for states of `size` bytes."""
    for axis in reversed(axes):
        devices = topology.links[axis].devices
        odd, held = devices // (devices & -devices), 1
        while held < odd:
            sent = min(held, odd - held)
            yield Transfer("collective-permute", sent * size, (axis,), 1, held)
            held += sent
        while held < devices:
            yield Transfer("collective-permute", size, (axis,), 1, held, pairs=True)
            held *= 2


def _neighbours(state: AttentionState, axis: str, count: int) -> AttentionState:
    """The states of `count` consecutive devices, in order: Bruck's all-gather.

    J. Bruck et al., Efficient algorithms for all-to-all communications in multiport
    message-passing systems, IEEE TPDS 8 (1997): each round doubles what a device has.
    """
    states, held = jax.tree.map(lambda x: x[None], state), 1
    while held < count:
        sent = _rows(states, 0, count - held)
        devices = range(lax.axis_size(axis))
        pairs = [(i, i - i % count + (i - held) % count) for i in devices]
        states = _concatenated(states, permuted(sent, axis, pairs))
        held = states.lse.shape[0]
    # each device has its own state first, then those of the following devices
    rank = lax.axis_index(axis) % count
    return jax.tree.map(lambda x: jnp.roll(x, rank, axis=0), states)


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
    return jax.tree.map(lambda x: x[begin:end], state)


def _concatenated(*states: AttentionState) -> AttentionState:
    return jax.tree.map(lambda *x: jnp.concatenate(x), *states)


def _reduce_scatter(state: AttentionState, axis: str) -> AttentionState:
    """This device's share of the rows, over all devices of an axis."""
    devices, rank = lax.axis_size(axis), lax.axis_index(axis)

    def shares(x: Array) -> Array:
        # share i belongs to the device i ranks further
        return jnp.roll(x.reshape(devices, x.shape[0] // devices, *x.shape[1:]), -rank, axis=0)

    state = jax.tree.map(shares, state)
    for step, sent in rounds(devices):
        pairs = [(i, (i + step) % devices) for i in range(devices)]
        arrived = permuted(_rows(state, step, step + sent), axis, pairs)
        state = _concatenated(merge(arrived, _rows(state, 0, sent)), _rows(state, sent, step))
    return jax.tree.map(lambda x: x[0], state)


def _all_gather(state: AttentionState, axis: str, offset: int) -> AttentionState:
    """The shares of all devices of an axis, in order, by the rounds of `_reduce_scatter` in reverse.

    Each device starts with the share of the device `offset` ranks further.
    """
    devices, rank = lax.axis_size(axis), lax.axis_index(axis)
    state = jax.tree.map(lambda x: x[None], state)
    for step, sent in reversed(rounds(devices)):
        pairs = [(i, (i - step) % devices) for i in range(devices)]
        state = _concatenated(state, permuted(_rows(state, 0, sent), axis, pairs))

    def ordered(x: Array) -> Array:
        return jnp.roll(x, rank + offset, axis=0).reshape(devices * x.shape[1], *x.shape[2:])

    return jax.tree.map(ordered, state)
