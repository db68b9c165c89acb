"""The merge strategy of states that go around a ring."""

from collections.abc import Iterator

import jax.numpy as jnp
from jax import lax

from energy_attn.kernels import AttentionState, merge_all
from energy_attn.kernels.internal import vary_together

from ..cost._shape import Shape
from ..cost._topology import Topology
from ..cost._transfer import Transfer
from ._abstract import AbstractMerge, Axes
from ._packing import as_invariant, permuted


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

    def transfers(self, shape: Shape, topology: Topology) -> Iterator[Transfer]:
        hops = topology.devices - 1
        yield Transfer("collective-permute", shape.rows * shape.state, topology.axes, hops)
