"""The merge strategy of two levels: a fast axis, and slow ones."""

from collections.abc import Iterator

import jax.numpy as jnp
from jax import lax

from energy_attn.kernels import AttentionState

from ..cost._shape import Shape
from ..cost._topology import Topology
from ..cost._transfer import Transfer
from ._abstract import AbstractMerge, Axes, exchange
from ._butterfly import exchange_transfers, exchanged
from ._packing import as_invariant, narrowed, transfer


class HierarchicalMerge(AbstractMerge):
    """Each device of the last axis folds its share of the rows; only shares are sent over the other axes.

    For states, this is what a reduce-scatter, an all-reduce and an all-gather are for sums.
    """

    name = "hierarchical"
    least_axes = 2
    automatic = True

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        *slow, fast = axes
        devices, shape, rows = lax.axis_size(fast), state.lse.shape, state.lse.size
        width = state.out.shape[-1]
        share = -(-rows // devices)
        missing = share * devices - rows
        out = jnp.pad(state.out.reshape(rows, width), ((0, missing), (0, 0)))
        lse = jnp.pad(state.lse.reshape(rows), (0, missing), constant_values=-jnp.inf)
        shares = AttentionState(out.reshape(devices, share, width), lse.reshape(devices, share))
        folded = narrowed(exchanged(exchange(shares, (fast,)), tuple(slow)), state)
        gathered = transfer(lambda x: lax.all_gather(x, fast, tiled=True), folded)
        out, lse = (x[:rows] for x in gathered)
        return as_invariant(AttentionState(out.reshape(state.out.shape), lse.reshape(shape)), axes)

    def transfers(self, shape: Shape, topology: Topology) -> Iterator[Transfer]:
        *slow, fast = topology.axes
        devices = topology.links[fast].devices
        share = -(-shape.rows // devices)
        if devices > 1:
            yield Transfer("all-to-all", share * devices * shape.state, (fast,))
        yield from exchange_transfers(share * shape.state, topology, tuple(slow))
        if devices > 1:
            yield Transfer("all-gather", share * shape.state, (fast,))
