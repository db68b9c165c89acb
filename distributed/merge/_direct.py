"""Merge strategies that send all rows at once: in two sums, in a gather, or around a ring."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, merge_all
from energy_attn.kernels.internal import State, fold, vary_together

from ..cost._shape import Shape
from ..cost._topology import Topology
from ..cost._transfer import Transfer, Transfers
from ._abstract import AbstractMerge, AbstractMessageMerge, Axes
from ._packing import (
    as_invariant,
    gathered,
    narrowed,
    packed,
    permuted,
    promoted,
    transfer,
    unpacked,
)

# With at least this many chips in a slice, XLA:TPU turns a small gather into an all-reduce of arrays padded with
# zeros (`tests/tpu/test_programs.py`).
_MANY_CHIPS = 64


class AllreduceMerge(AbstractMerge):
    """One maximum of `lse`, then numerator and denominator in one sum.

    Over several axes it is one reduction over all of them, which XLA may split by the topology of the network.
    """

    name = "allreduce"
    least_axes = 1
    automatic = True

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        # The division is in lse's dtype; otherwise XLA could send the sum in a narrower one.
        total = functools.partial(_total, functools.partial(lax.psum, axis_name=axes))
        return fold(state, lambda x: lax.pmax(x, axes), total)

    def transfers(self, shape: Shape, topology: Topology) -> Transfers:
        yield Transfer("all-reduce", shape.rows * shape.lse_bytes, topology.axes)
        yield Transfer("all-reduce", shape.rows * shape.state, topology.axes)

    def scatter(self, states: AttentionState, axes: Axes) -> AttentionState:
        total = functools.partial(_total, functools.partial(lax.psum_scatter, axis_name=axes))
        return fold(
            promoted(states),
            lambda x: lax.pmax(x, axes),
            total,
            lambda x: lax.dynamic_index_in_dim(x, lax.axis_index(axes), keepdims=False),
        )

    def scatter_transfers(self, rows: int, shape: Shape, topology: Topology) -> Transfers:
        yield Transfer("all-reduce", rows * shape.lse_bytes, topology.axes)
        yield Transfer("reduce-scatter", rows * shape.state, topology.axes)


def _total(collective: Callable[[Any], Any], pair: tuple[Array, Array]) -> AttentionState:
    return transfer(collective, AttentionState(*pair))


class GatherMerge(AbstractMessageMerge):
    """One all-gather of all states, folded by each device for itself."""

    name = "gather"
    least_axes = 1
    automatic = True

    def fold(self, state: State, axes: Axes) -> State:
        states = unpacked(gathered(packed(state), axes), state)
        return as_invariant(narrowed(merge_all(states, axis=0), state), axes)

    def transfers(self, shape: Shape, topology: Topology) -> Transfers:
        size, tpu = shape.rows * shape.state, topology.platform == "tpu"
        if tpu and shape.out_width > 0:  # energies fill rows of outputs
            row = shape.out_width * shape.lse_bytes
            size = row * (shape.rows + -(-shape.rows * shape.lse_bytes // row))
        one_slice = all(link.torus for link in topology.links)
        if tpu and one_slice and topology.devices >= _MANY_CHIPS:
            yield Transfer("all-reduce", topology.devices * size, topology.axes)
        else:
            yield Transfer("all-gather", size, topology.axes)


class RingMerge(AbstractMerge):
    """Every state goes around the ring of devices, in $p - 1$ steps.

    [`Ring`][energy_attn.distributed.methods.Ring] uses it where all devices have the same queries.
    """

    name = "ring"
    least_axes = 1
    automatic = False  # a gather sends the same bytes in one collective

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        devices = lax.axis_size(axes)
        pairs = [(i, (i + 1) % devices) for i in range(devices)]
        state = vary_together(state, axes)

        def step(sent: AttentionState, _: None) -> tuple[AttentionState, AttentionState]:
            received = permuted(sent, axes, pairs)
            return received, received

        # a loop, so that the size of the program does not depend on the number of devices
        _, arrived = lax.scan(step, state, None, length=devices - 1)
        # device i receives those of i - 1, i - 2, ..., i + 1
        states = (jnp.concatenate([x[::-1], y[None]]) for x, y in zip(arrived, state, strict=True))
        first = lax.axis_index(axes) + 1
        ranked = AttentionState(*(jnp.roll(x, first, axis=0) for x in states))
        return as_invariant(merge_all(ranked, axis=0), axes)

    def transfers(self, shape: Shape, topology: Topology) -> Transfers:
        hops = topology.devices - 1
        yield Transfer("collective-permute", shape.rows * shape.state, topology.axes, hops)
