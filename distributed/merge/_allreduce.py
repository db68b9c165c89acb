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

    Over several axes it is one reduction over all of them: XLA knows the network, and cuts it into
    a reduce-scatter, a sum over the slow axis and a gather where that is better.
    """

    name = "allreduce"
    least_axes = 1
    automatic = True

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        # The quotient is taken in lse's dtype and only then narrowed: XLA would otherwise be free
        # to narrow the sum that is sent.
        def total(pair: tuple[Array, Array]) -> AttentionState:
            return transfer(lambda x: lax.psum(x, axes), AttentionState(*pair))

        return fold(state, lambda x: lax.pmax(x, axes), total)

    def scatter(self, states: AttentionState, axes: Axes) -> AttentionState:
        return sums(states, axes)
