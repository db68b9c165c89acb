"""Folding states of which each device keeps its own rows: for queries that are sharded."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, merge_all
from energy_attn.kernels.internal import fold

from ..network._shape import Shape
from ..network._topology import Topology, all_axes
from ..network._transfer import Transfer
from ._packing import transfer, widened


class Scatter(NamedTuple):
    """A fold of states `[p, ...]`, of which device i keeps row i.

    Attributes:
        fold: `fold(states, axes)`; the result is in `lse`'s dtype.
        transfers: `transfers(rows, shape, topology)`: what it sends, for `rows` rows of all devices.
    """

    fold: Callable[[AttentionState, tuple[str, ...]], AttentionState]
    transfers: Callable[[int, Shape, Topology], Iterator[Transfer]]


def _exchange(states: AttentionState, axes: tuple[str, ...]) -> AttentionState:
    exchanged = transfer(lambda x: lax.all_to_all(x, axes, 0, 0), states)
    return merge_all(widened(exchanged), axis=0)


def _exchange_transfers(rows: int, shape: Shape, topology: Topology) -> Iterator[Transfer]:
    yield Transfer("all-to-all", rows * shape.state, all_axes(topology))


def _sum(states: AttentionState, axes: tuple[str, ...]) -> AttentionState:
    def total(pair: tuple[Array, Array]) -> AttentionState:
        return transfer(lambda x: lax.psum_scatter(x, axes), AttentionState(*pair))

    return fold(
        widened(states),
        lambda x: lax.pmax(x, axes),
        total,
        lambda x: lax.dynamic_index_in_dim(x, lax.axis_index(axes), keepdims=False),
    )


def _sum_transfers(rows: int, shape: Shape, topology: Topology) -> Iterator[Transfer]:
    yield Transfer("all-reduce", rows * shape.wide_bytes, all_axes(topology))
    yield Transfer("reduce-scatter", rows * shape.state, all_axes(topology))


# One exchange of all to all; or one maximum of `lse` and one reduce-scatter of sums.
EXCHANGE = Scatter(_exchange, _exchange_transfers)
SUM = Scatter(_sum, _sum_transfers)
