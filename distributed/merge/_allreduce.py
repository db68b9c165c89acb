"""The merge strategy of two all-reduces."""

from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import fold

from ._abstract import AbstractMerge, Axes
from ._packing import transfer
from ._scatter import sums


class Allreduce(AbstractMerge):
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

    def scatter(self, states: AttentionState, axes: Axes) -> AttentionState:
        return sums(states, axes)
