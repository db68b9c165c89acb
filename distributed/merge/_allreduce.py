"""The merge strategy of two all-reduces."""

from collections.abc import Iterator

from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import fold

from ..cost._shape import Shape
from ..cost._topology import Topology
from ..cost._transfer import Transfer
from ._abstract import AbstractMerge, Axes
from ._packing import promoted, transfer


class AllreduceMerge(AbstractMerge):
    """One maximum of `lse`, then numerator and denominator in one sum.

    Over several axes it is one reduction over all of them, which XLA may split by the topology of the network.
    """

    name = "allreduce"
    least_axes = 1
    automatic = True

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        # The division is in lse's dtype; otherwise XLA could send the sum in a narrower one.
        def total(pair: tuple[Array, Array]) -> AttentionState:
            return transfer(lambda x: lax.psum(x, axes), AttentionState(*pair))

        return fold(state, lambda x: lax.pmax(x, axes), total)

    def transfers(self, shape: Shape, topology: Topology) -> Iterator[Transfer]:
        yield Transfer("all-reduce", shape.rows * shape.lse_bytes, topology.axes)
        yield Transfer("all-reduce", shape.rows * shape.state, topology.axes)

    def scatter(self, states: AttentionState, axes: Axes) -> AttentionState:
        return scatter_sums(states, axes)

    def scatter_transfers(self, rows: int, shape: Shape, topology: Topology) -> Iterator[Transfer]:
        yield Transfer("all-reduce", rows * shape.lse_bytes, topology.axes)
        yield Transfer("reduce-scatter", rows * shape.state, topology.axes)


def scatter_sums(states: AttentionState, axes: Axes) -> AttentionState:
    """Folds states `[p, ...]`, leaving row i on device i, by a maximum of `lse` and a reduce-scatter of sums."""

    def total(pair: tuple[Array, Array]) -> AttentionState:
        return transfer(lambda x: lax.psum_scatter(x, axes), AttentionState(*pair))

    return fold(
        promoted(states),
        lambda x: lax.pmax(x, axes),
        total,
        lambda x: lax.dynamic_index_in_dim(x, lax.axis_index(axes), keepdims=False),
    )
