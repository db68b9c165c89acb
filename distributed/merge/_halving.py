"""The merge strategy of halving and doubling: half as many rows in each round, and back."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, merge

from ._abstract import AbstractMerge, Axes
from ._packing import as_invariant, narrowed, permuted, promoted


class Halving(AbstractMerge):
    r"""A reduce-scatter of states, then a gather of shares: $2 \lceil\log_2 p\rceil$ permutes an axis, and one.

    Each sends half of what is left, $\frac{p-1}{p}$ of a state there and as much back: what a ring sends in
    $2 (p - 1)$ steps. A row is folded by one device, from which all others have it, so all results are
    bitwise equal.

    R. Rabenseifner, Optimization of collective reduction operations, ICCS 2004; in the form for any
    number of devices, J. L. Träff, Optimal, non-pipelined reduce-scatter and allreduce algorithms
    (arXiv 2410.14234).
    """

    name = "halving"
    least_axes = 1
    automatic = True

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        shape, rows, width = state.lse.shape, state.lse.size, state.out.shape[-1]
        missing = -rows % lax.axis_size(axes)
        out = jnp.pad(state.out.reshape(rows, width), ((0, missing), (0, 0)))
        lse = jnp.pad(state.lse.reshape(rows), (0, missing), constant_values=-jnp.inf)
        part = promoted(AttentionState(out, lse))
        for axis in reversed(axes):
            part = _reduced(part, axis)
        fast = fast_axis([lax.axis_size(axis) for axis in axes])
        # A compiler may compute a share twice, where it is kept and where it is sent, and round it in two
        # ways. So nobody keeps the share that it folded: all have it from the device that did.
        devices = lax.axis_size(axes[fast])
        pairs = [(i, (i - 1) % devices) for i in range(devices)]
        part = permuted(narrowed(part, state), axes[fast], pairs)
        for i, axis in enumerate(axes):
            part = _gathered(part, axis, 1 if i == fast else 0)
        out, lse = (x[:rows] for x in part)
        return as_invariant(AttentionState(out.reshape(state.out.shape), lse.reshape(shape)), axes)


def rounds(devices: int) -> list[tuple[int, int]]:
    """How far the shares of each round go, and how many: half of those that are left."""
    rounds, left = [], devices
    while left > 1:
        step = -(-left // 2)
        rounds.append((step, left - step))
        left = step
    return rounds


def fast_axis(sizes: Sequence[int]) -> int:
    """The last axis of several devices."""
    return max((i for i, size in enumerate(sizes) if size > 1), default=0)


def _cut(state: AttentionState, begin: int, end: int) -> AttentionState:
    return AttentionState(state.out[begin:end], state.lse[begin:end])


def _joined(*states: AttentionState) -> AttentionState:
    return AttentionState(*(jnp.concatenate(x) for x in zip(*states, strict=True)))


def _reduced(state: AttentionState, axis: str) -> AttentionState:
    """This device's share of the rows, over all devices of an axis."""
    devices, here = lax.axis_size(axis), lax.axis_index(axis)

    def shares(x: Array) -> Array:
        # share i is that of the device i places on
        return jnp.roll(x.reshape(devices, x.shape[0] // devices, *x.shape[1:]), -here, axis=0)

    state = AttentionState(*map(shares, state))
    for step, sent in rounds(devices):
        pairs = [(i, (i + step) % devices) for i in range(devices)]
        arrived = permuted(_cut(state, step, step + sent), axis, pairs)
        state = _joined(merge(arrived, _cut(state, 0, sent)), _cut(state, sent, step))
    return AttentionState(*(x[0] for x in state))


def _gathered(state: AttentionState, axis: str, ahead: int) -> AttentionState:
    """The shares of all devices of an axis, in order: the same rounds backwards.

    A device comes with the share of the one that is `ahead` places on.
    """
    devices, here = lax.axis_size(axis), lax.axis_index(axis)
    state = AttentionState(*(x[None] for x in state))
    for step, sent in reversed(rounds(devices)):
        pairs = [(i, (i - step) % devices) for i in range(devices)]
        state = _joined(state, permuted(_cut(state, 0, sent), axis, pairs))

    def ordered(x: Array) -> Array:
        return jnp.roll(x, here + ahead, axis=0).reshape(devices * x.shape[1], *x.shape[2:])

    return AttentionState(*map(ordered, state))
