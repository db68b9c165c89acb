"""The ways to fold the states of all devices into one that all of them have.

Each maps a state that differs between the devices of some axes to their fold, with arithmetic in
`lse`'s dtype. None of `WAYS` is differentiated: the derivative of a fold does not depend on the
way, and `_merge` has it. `cost.transfers` says what each sends.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, merge, merge_all
from energy_attn.kernels.internal import fold

from ._packing import gathered, same, transfer
from ._remote import folded

Axes = tuple[str, ...]
Way = Callable[[AttentionState, Axes], AttentionState]


def allreduce(state: AttentionState, axes: Axes) -> AttentionState:
    """One maximum of `lse`, then numerator and denominator in one sum. Raises nothing.

    Over several axes it is one reduction over all of them: XLA knows the network, and cuts it into
    a reduce-scatter, a sum over the slow axis and a gather where that is better.
    """

    # The quotient is taken in lse's dtype and only then narrowed: XLA would otherwise be free to
    # narrow the sum that is sent.
    def total(pair: tuple[Array, Array]) -> AttentionState:
        return transfer(lambda x: lax.psum(x, axes), AttentionState(*pair))

    return fold(state, lambda x: lax.pmax(x, axes), total)


def gather(state: AttentionState, axes: Axes) -> AttentionState:
    """All states to all devices at once; each folds them for itself. Raises nothing."""
    return same(merge_all(gathered(state, axes), axis=0), axes)


def butterfly(state: AttentionState, axes: Axes) -> AttentionState:
    r"""$\lceil \log_2 p \rceil$ exchanges, the last axis first. Raises nothing.

    Every device folds the same states in the same order, so all results are bitwise equal.
    """
    return same(_narrow(exchanged(_wide(state), axes), state), axes)


def remote(state: AttentionState, axes: Axes) -> AttentionState:
    """The butterfly by one kernel, where the chips of one TPU slice can do it. Raises nothing."""
    return same(_narrow(folded(_wide(state), axes, exchanged), state), axes)


def hierarchical(state: AttentionState, axes: Axes) -> AttentionState:
    """Each device of the last axis folds its share of the rows; shares alone cross the other axes.

    On states what a reduce-scatter, a sum and a gather are on numbers. Raises nothing.
    """
    *slow, fast = axes
    devices, shape, rows = lax.axis_size(fast), state.lse.shape, state.lse.size
    width = state.out.shape[-1]
    share = -(-rows // devices)
    missing = share * devices - rows
    out = jnp.pad(state.out.reshape(rows, width), ((0, missing), (0, 0)))
    lse = jnp.pad(state.lse.reshape(rows), (0, missing), constant_values=-jnp.inf)
    cut = AttentionState(out.reshape(devices, share, width), lse.reshape(devices, share))
    mine = _narrow(exchanged(scatter(cut, (fast,)), tuple(slow)), state)
    whole = transfer(lambda x: lax.all_gather(x, fast, tiled=True), mine)
    out, lse = (x[:rows] for x in whole)
    return same(AttentionState(out.reshape(state.out.shape), lse.reshape(shape)), axes)


def ring(state: AttentionState, axes: Axes) -> AttentionState:
    """Every state to every device, one step at a time: $p - 1$ steps of one state. Raises nothing.

    What a ring of devices takes along which the queries travel, and the keys do not.
    """
    devices = lax.axis_size(axes)
    pairs = [(i, (i + 1) % devices) for i in range(devices)]
    found = [state]
    for _ in range(devices - 1):
        found.append(_permuted(found[-1], axes, pairs))
    # from device i come those of i, i - 1, ...
    stacked = AttentionState(*(jnp.stack(x[::-1]) for x in zip(*found, strict=True)))
    place = lax.axis_index(axes) + 1
    ranked = AttentionState(*(jnp.roll(x, place, axis=0) for x in stacked))
    return same(merge_all(ranked, axis=0), axes)


def scatter(state: AttentionState, axes: Axes) -> AttentionState:
    """Folds states `[p, ...]`, of which device i keeps row i: one exchange of all to all.

    The result is in `lse`'s dtype. Raises nothing.
    """
    exchanged = transfer(lambda x: lax.all_to_all(x, axes, 0, 0), state)
    return merge_all(_wide(exchanged), axis=0)


def reduce_scatter(state: AttentionState, axes: Axes) -> AttentionState:
    """As `scatter`, by one maximum of `lse` and one reduce-scatter of sums. Raises nothing."""

    def total(pair: tuple[Array, Array]) -> AttentionState:
        return transfer(lambda x: lax.psum_scatter(x, axes), AttentionState(*pair))

    return fold(
        _wide(state),
        lambda x: lax.pmax(x, axes),
        total,
        lambda x: lax.dynamic_index_in_dim(x, lax.axis_index(axes), keepdims=False),
    )


WAYS: dict[str, Way] = {
    "allreduce": allreduce,
    "gather": gather,
    "butterfly": butterfly,
    "remote": remote,
    "hierarchical": hierarchical,
    "ring": ring,
}


def exchanged(
    state: AttentionState,
    axes: Axes,
    unpack: Callable[[AttentionState], Any] = lambda state: state,
    pack: Callable[[Any], AttentionState] = lambda state: state,
) -> AttentionState:
    """The exchanges of a butterfly. What travels are messages; `unpack` makes states of them, and
    `pack` messages of states. Raises nothing.
    """
    for axis in reversed(axes):
        devices = lax.axis_size(axis)
        odd = devices // (devices & -devices)
        state = pack(merge_all(unpack(_neighbours(state, axis, odd)), axis=0))
        step = odd
        while step < devices:  # with the device that many before or after
            pairs = [(i, i - step if i // step % 2 else i + step) for i in range(devices)]
            state = pack(merge(unpack(state), unpack(_permuted(state, axis, pairs))))
            step *= 2
    return state


def _neighbours(state: AttentionState, axis: str, count: int) -> AttentionState:
    """The states of `count` consecutive devices, in order: Bruck's all-gather.

    J. Bruck et al., Efficient algorithms for all-to-all communications in multiport
    message-passing systems, IEEE TPDS 8 (1997): each round doubles what a device has.
    """
    found, have = AttentionState(state.out[None], state.lse[None]), 1
    while have < count:
        sent = AttentionState(*(x[: count - have] for x in found))
        devices = range(lax.axis_size(axis))
        pairs = [(i, i - i % count + (i - have) % count) for i in devices]
        arrived = _permuted(sent, axis, pairs)
        found = AttentionState(*map(lambda *x: jnp.concatenate(x), found, arrived))
        have = found.lse.shape[0]
    # each has found itself first, then the next ones around the circle
    place = lax.axis_index(axis) % count
    return AttentionState(*(jnp.roll(x, place, axis=0) for x in found))


def _permuted(
    state: AttentionState, axis: str | Axes, pairs: list[tuple[int, int]]
) -> AttentionState:
    return transfer(lambda x: lax.ppermute(x, axis, pairs), state)


def _wide(state: AttentionState) -> AttentionState:
    # folded more than once: rounded only at the end
    return AttentionState(state.out.astype(state.lse.dtype), state.lse)


def _narrow(state: AttentionState, like: AttentionState) -> AttentionState:
    return AttentionState(state.out.astype(like.out.dtype), state.lse)
