"""The merge strategy of one all-gather."""

from collections.abc import Callable
from typing import Any

from energy_attn.kernels import AttentionState, merge_all

from ._abstract import AbstractMessageMerge, Axes
from ._packing import as_invariant, gathered


class Gather(AbstractMessageMerge):
    """One all-gather of all states, folded by each device for itself."""

    name = "gather"
    least_axes = 1
    automatic = True

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        return as_invariant(merge_all(gathered(state, axes), axis=0), axes)

    def fold_messages(
        self,
        message: AttentionState,
        axes: Axes,
        unpack: Callable[[AttentionState], Any],
        pack: Callable[[Any], AttentionState],
    ) -> Any:
        return merge_all(unpack(gathered(message, axes)), axis=0)
