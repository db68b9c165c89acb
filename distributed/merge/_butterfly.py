"""Merge strategies of pairwise exchanges: of whole states, or of shares after an exchange along a fast axis."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from energy_attn.kernels import AttentionState, merge, merge_all

from ..cost._shape import Shape
from ..cost._topology import Topology
from ..cost._transfer import Transfer, Transfers
from ._abstract import AbstractMerge, AbstractMessageMerge, Axes, exchange
from ._packing import as_invariant, flat_rows, narrowed, permuted, promoted, shaped_like, transfer


class ButterflyMerge(AbstractMessageMerge):
    r"""$\lceil \log_2 p \rceil$ exchanges, the last axis first.

    Every device folds the same states in the same order, so all results are bitwise equal.
    """

    name = "butterfly"
    least_axes = 1
    automatic = True

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        return as_invariant(narrowed(exchanged(promoted(state), axes), state), axes)

    def fold_messages(
        self,
        message: AttentionState,
        axes: Axes,
        unpack: Callable[[AttentionState], Any],
        pack: Callable[[Any], AttentionState],
    ) -> Any:
        return unpack(exchanged(message, axes, unpack, pack))

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
        shares = AttentionState(
            *(x.reshape(devices, len(x) // devices, *x.shape[1:]) for x in rows)
        )
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


def exchanged(
    state: AttentionState,
    axes: Axes,
    unpack: Callable[[AttentionState], Any] = lambda state: state,
    pack: Callable[[Any], AttentionState] = lambda state: state,
) -> AttentionState:
    """The exchanges of a butterfly; `unpack` converts messages to states, `pack` back."""
    for axis in reversed(axes):
        devices = lax.axis_size(axis)
        odd = devices // (devices & -devices)
        state = pack(merge_all(unpack(_neighbours(state, axis, odd)), axis=0))
        step = odd
        while step < devices:  # exchange with the device `step` before or after
            pairs = [(i, i - step if i // step % 2 else i + step) for i in range(devices)]
            state = pack(merge(unpack(state), unpack(permuted(state, axis, pairs))))
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
    states, held = AttentionState(state.out[None], state.lse[None]), 1
    while held < count:
        sent = AttentionState(*(x[: count - held] for x in states))
        devices = range(lax.axis_size(axis))
        pairs = [(i, i - i % count + (i - held) % count) for i in devices]
        arrived = permuted(sent, axis, pairs)
        states = AttentionState(*map(lambda *x: jnp.concatenate(x), states, arrived))
        held = states.lse.shape[0]
    # each device has its own state first, then those of the following devices
    rank = lax.axis_index(axis) % count
    return AttentionState(*(jnp.roll(x, rank, axis=0) for x in states))
