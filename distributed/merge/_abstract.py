"""The abstract class of a merge strategy."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

from energy_attn.kernels import AttentionState

from ._scatter import exchange

Axes = tuple[str, ...]


class AbstractMerge(abc.ABC):
    """Reduces the states of all devices to one, equal on all of them.

    Strategies are not differentiated: the derivative of a fold is the same for all, and `merge_across`
    defines it.

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

    def scatter(self, states: AttentionState, axes: Axes) -> AttentionState:
        """The fold where queries are sharded: of states `[p, ...]`, device i keeps row i, in `lse`'s dtype."""
        return exchange(states, axes)


class AbstractMessageMerge(AbstractMerge):
    """A strategy that only sends states and merges them locally, and so works for states of any kind."""

    @abc.abstractmethod
    def fold_messages(
        self,
        message: AttentionState,
        axes: Axes,
        unpack: Callable[[AttentionState], Any],
        pack: Callable[[Any], AttentionState],
    ) -> Any:
        """The fold of states that are sent as messages; `unpack` converts these to states, `pack` back.

        The result varies over `axes` by its type, and is equal on all devices.
        """
