"""The abstract class of a merge strategy."""

import abc
from typing import ClassVar

from jax import lax

from energy_attn.kernels import AttentionState, merge_all
from energy_attn.kernels.internal import State

from ..cost._shape import Shape
from ..cost._topology import Topology
from ..cost._transfer import Transfer, Transfers
from ._packing import promoted, transfer

Axes = tuple[str, ...]


class AbstractMerge(abc.ABC):
    """Reduces the states of all devices to one, equal on all of them.

    A strategy is one class in a module of its own, in the list of `merge/_strategies.py`. Strategies are not
    differentiated: the derivative of a fold is the same for all, and `merge_across` defines it.

    Attributes:
        name: its name, for `merge=`.
        least_axes: how many mesh axes it needs.
        automatic: whether `"auto"` considers it.
    """

    name: ClassVar[str]
    least_axes: ClassVar[int]
    automatic: ClassVar[bool]

    @abc.abstractmethod
    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        """The fold of each device's state, equal on all devices of `axes`, `out` in its own dtype."""

    @abc.abstractmethod
    def transfers(self, shape: Shape, topology: Topology) -> Transfers:
        """The collectives of `fold`, over several devices."""

    def scatter(self, states: AttentionState, axes: Axes) -> AttentionState:
        """The fold where queries are sharded: of states `[p, ...]`, device i keeps row i, in `lse`'s dtype."""
        return exchange(states, axes)

    def scatter_transfers(self, rows: int, shape: Shape, topology: Topology) -> Transfers:
        """The collectives of `scatter`, for this many rows of all devices together."""
        yield Transfer("all-to-all", rows * shape.state, topology.axes)


class AbstractMessageMerge(AbstractMerge):
    """A strategy that only sends states and merges them locally, and so folds covariances, too."""

    @abc.abstractmethod
    def fold(self, state: State, axes: Axes) -> State:
        """The fold of each device's state, of either kind, equal on all devices of `axes`."""


def exchange(states: AttentionState, axes: Axes) -> AttentionState:
    """Folds states `[p, ...]`, leaving row i on device i in `lse`'s dtype, by one all-to-all."""
    exchanged = transfer(lambda x: lax.all_to_all(x, axes, 0, 0), states)
    return merge_all(promoted(exchanged), axis=0)
