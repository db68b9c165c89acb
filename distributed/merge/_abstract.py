"""A merge strategy: the abstract class that each of them fills in."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

from energy_attn.kernels import AttentionState

from ._scatter import exchange

Axes = tuple[str, ...]


class AbstractMerge(abc.ABC):
    """How the states of all devices become one that all of them have: what it computes and sends.

    Nothing here is differentiated: the derivative of a fold is the same for every strategy, and
    `merge_across` has it.

    Attributes:
        name: what `merge=` calls it.
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
    """A strategy that only moves states, so that states of any kind fold by it: covariances too."""

    @abc.abstractmethod
    def fold_messages(
        self,
        message: AttentionState,
        axes: Axes,
        unpack: Callable[[AttentionState], Any],
        pack: Callable[[Any], AttentionState],
    ) -> Any:
        """The fold of states that travel as messages: `unpack` makes states of them, `pack` messages.

        The result varies over `axes` by its type, and is equal on all devices.
        """
