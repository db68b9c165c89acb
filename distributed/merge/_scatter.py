"""Folds states so that each device keeps its own rows, for sharded queries."""

from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, merge_all
from energy_attn.kernels.internal import fold

from ._packing import promoted, transfer


def exchange(states: AttentionState, axes: tuple[str, ...]) -> AttentionState:
    """The fold of states `[p, ...]` of which device i keeps row i, in `lse`'s dtype, by one all-to-all."""
    exchanged = transfer(lambda x: lax.all_to_all(x, axes, 0, 0), states)
    return merge_all(promoted(exchanged), axis=0)


def sums(states: AttentionState, axes: tuple[str, ...]) -> AttentionState:
    """As `exchange`, by one maximum of `lse` and one reduce-scatter of sums."""

    def total(pair: tuple[Array, Array]) -> AttentionState:
        return transfer(lambda x: lax.psum_scatter(x, axes), AttentionState(*pair))

    return fold(
        promoted(states),
        lambda x: lax.pmax(x, axes),
        total,
        lambda x: lax.dynamic_index_in_dim(x, lax.axis_index(axes), keepdims=False),
    )
