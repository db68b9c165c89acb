"""Merge strategies, and the list of them, from which names, types, checks and tables are derived."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, merge, merge_all
from energy_attn.kernels.internal import State, checks, fold, mesh_axes

from ..cost._network import Topology, Transfer, Transfers, total_seconds
from ..cost._shape import Shape
from ._abstract import (
    AbstractMerge,
    AbstractMessageMerge,
    Axes,
    as_invariant,
    flat_rows,
    gathered,
    narrowed,
    packed,
    permuted,
    promoted,
    shaped_like,
    transfer,
    unpacked,
)

# With at least this many chips in a slice, XLA:TPU turns a small gather into an all-reduce of arrays padded with
# zeros (`tests/tpu/test_programs.py`).
_MANY_CHIPS = 64


class AllreduceMerge(AbstractMerge):
    """One maximum of `lse`, then numerator and denominator in one sum.

    Over several axes it is one reduction over all of them, which XLA may split by the topology of the network.
    """

    name = "allreduce"

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        # m = max F_i, then Σ out_i e^{F_i - m} and Σ e^{F_i - m} in one sum; out is their quotient.
        # The division is in lse's dtype. Otherwise XLA could send the sum in a narrower one.
        def total(pair: Any) -> AttentionState:
            return transfer(lambda x: lax.psum(x, axes), AttentionState(*pair))

        return fold(state, lambda x: lax.pmax(x, axes), total)

    def transfers(self, shape: Shape, topology: Topology) -> Transfers:
        yield Transfer("all-reduce", shape.rows * shape.lse_bytes, topology.axes)
        yield Transfer("all-reduce", shape.rows * shape.state, topology.axes)

    def scatter(self, states: AttentionState, axes: Axes) -> AttentionState:
        def total(pair: Any) -> AttentionState:
            return transfer(lambda x: lax.psum_scatter(x, axes), AttentionState(*pair))

        def kept(x: Array) -> Array:
            return lax.dynamic_index_in_dim(x, lax.axis_index(axes), keepdims=False)

        return fold(promoted(states), lambda x: lax.pmax(x, axes), total, kept)

    def scatter_transfers(self, rows: int, shape: Shape, topology: Topology) -> Transfers:
        yield Transfer("all-reduce", rows * shape.lse_bytes, topology.axes)
        yield Transfer("reduce-scatter", rows * shape.state, topology.axes)


class GatherMerge(AbstractMessageMerge):
    """One all-gather of all states, folded by each device for itself."""

    name = "gather"

    def fold(self, state: State, axes: Axes) -> State:
        states = unpacked(gathered(packed(state), axes), state)
        return as_invariant(narrowed(merge_all(states, axis=0), state), axes)

    def transfers(self, shape: Shape, topology: Topology) -> Transfers:
        size, tpu = shape.rows * shape.state, topology.platform == "tpu"
        if tpu and shape.out_width > 0:  # energies fill rows of outputs
            row = shape.out_width * shape.lse_bytes
            size = row * (shape.rows + -(-shape.rows * shape.lse_bytes // row))
        one_slice = all(link.torus for link in topology.links)
        if tpu and one_slice and topology.devices >= _MANY_CHIPS:
            yield Transfer("all-reduce", topology.devices * size, topology.axes)
        else:
            yield Transfer("all-gather", size, topology.axes)


class RingMerge(AbstractMerge):
    """Every state goes around the ring of devices, in $p - 1$ steps.

    [`Ring`][energy_attn.distributed.methods.Ring] uses it where all devices have the same queries.
    """

    name = "ring"
    automatic = False  # a gather sends the same bytes in one collective

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        devices = lax.axis_size(axes)
        pairs = [(i, (i + 1) % devices) for i in range(devices)]
        state = mesh_axes.vary_together(state, axes)

        def step(sent: AttentionState, _: None) -> tuple[AttentionState, AttentionState]:
            received = permuted(sent, axes, pairs)
            return received, received

        # a loop, so that the size of the program does not depend on the number of devices
        _, arrived = lax.scan(step, state, None, length=devices - 1)
        # device i receives the states of i - 1, i - 2, ..., i + 1; rolled to the order 0, 1, 2, ...
        states = (jnp.concatenate([x[::-1], y[None]]) for x, y in zip(arrived, state, strict=True))
        first = lax.axis_index(axes) + 1
        ranked = AttentionState(*(jnp.roll(x, first, axis=0) for x in states))
        return as_invariant(merge_all(ranked, axis=0), axes)

    def transfers(self, shape: Shape, topology: Topology) -> Transfers:
        hops = topology.devices - 1
        yield Transfer("collective-permute", shape.rows * shape.state, topology.axes, hops)


class ButterflyMerge(AbstractMessageMerge):
    r"""$\lceil \log_2 p \rceil$ exchanges, the last axis first.

    Every device folds the same states in the same order, so all results are bitwise equal.
    """

    name = "butterfly"

    def fold(self, state: State, axes: Axes) -> State:
        return as_invariant(narrowed(exchanged(promoted(state), axes), state), axes)

    def transfers(self, shape: Shape, topology: Topology) -> Transfers:
        return exchange_transfers(shape.rows * shape.state, topology, topology.axes)


class HierarchicalMerge(AbstractMerge):
    """Folds a share of the rows on each device of the last axis; only shares are sent over the other axes.

    For states, this is what a reduce-scatter, an all-reduce and an all-gather are for sums.
    """

    name = "hierarchical"
    least_axes = 2

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        *slow, fast = axes
        devices = lax.axis_size(fast)
        rows = flat_rows(state, devices)
        shares = jax.tree.map(lambda x: x.reshape(devices, len(x) // devices, *x.shape[1:]), rows)
        folded = narrowed(exchanged(self.scatter(shares, (fast,)), tuple(slow)), state)
        gathered = transfer(lambda x: lax.all_gather(x, fast, tiled=True), folded)
        return as_invariant(shaped_like(gathered, state), axes)

    def transfers(self, shape: Shape, topology: Topology) -> Transfers:
        *slow, fast = topology.axes
        devices = topology.links[fast].devices
        share = -(-shape.rows // devices)
        if devices > 1:
            yield Transfer("all-to-all", share * devices * shape.state, (fast,))
        yield from exchange_transfers(share * shape.state, topology, tuple(slow))
        if devices > 1:
            yield Transfer("all-gather", share * shape.state, (fast,))


def exchanged(state: State, axes: Axes) -> State:
    """The butterfly: each device folds its state with others at growing distances, until all hold the fold."""
    for axis in reversed(axes):
        # p = 2^k · odd: first the states of `odd` consecutive devices, then k exchanges of pairs
        devices = lax.axis_size(axis)
        odd = devices // (devices & -devices)
        state = merge_all(unpacked(_neighbours(packed(state), axis, odd), state), axis=0)
        step = odd
        while step < devices:  # exchange with the device `step` before or after
            pairs = [(i, i - step if i // step % 2 else i + step) for i in range(devices)]
            state = merge(state, unpacked(permuted(packed(state), axis, pairs), state))
            step *= 2
    return state


def exchange_transfers(size: int, topology: Topology, axes: tuple[int, ...]) -> Transfers:
    """The permutes of `exchanged`, for states of `size` bytes."""
    for axis in reversed(axes):
        devices = topology.links[axis].devices
        odd, held = devices // (devices & -devices), 1
        while held < odd:
            sent = min(held, odd - held)
            yield Transfer("collective-permute", sent * size, (axis,), 1, held)
            held += sent
        while held < devices:
            yield Transfer("collective-permute", size, (axis,), 1, held, pairs=True)
            held *= 2


def _neighbours(state: AttentionState, axis: str, count: int) -> AttentionState:
    """The states of `count` consecutive devices, in order: Bruck's all-gather."""
    # J. Bruck et al., Efficient algorithms for all-to-all communications in multiport message-passing systems,
    # IEEE TPDS 8 (1997): each round doubles what a device has.
    states, held = jax.tree.map(lambda x: x[None], state), 1
    while held < count:
        sent = _rows(states, 0, count - held)
        devices = range(lax.axis_size(axis))
        pairs = [(i, i - i % count + (i - held) % count) for i in devices]
        states = _concatenated(states, permuted(sent, axis, pairs))
        held = states.lse.shape[0]
    # each device has its own state first, then those of the following devices
    rank = lax.axis_index(axis) % count
    return jax.tree.map(lambda x: jnp.roll(x, rank, axis=0), states)


class HalvingMerge(AbstractMerge):
    r"""A reduce-scatter of states, then a gather: $2 \lceil\log_2 p\rceil$ permutes for each axis, and one more.

    Each permute sends half of the remaining rows, in total $\frac{p-1}{p}$ of a state each way, as much as a
    ring in $2 (p - 1)$ steps. One device folds each row, so all results are bitwise equal.

    R. Rabenseifner, Optimization of collective reduction operations, ICCS 2004; in the form for any
    number of devices, J. L. Träff, Optimal, non-pipelined reduce-scatter and allreduce algorithms
    (arXiv 2410.14234).
    """

    name = "halving"

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        part = promoted(flat_rows(state, lax.axis_size(axes)))
        for axis in reversed(axes):
            part = _reduce_scatter(part, axis)
        fast = fast_axis([lax.axis_size(axis) for axis in axes])
        # A compiler may compute a share twice, where it is kept and where it is sent, with different rounding.
        # So each device sends its share away, and receives it back in the gather, with the bits that all have.
        devices = lax.axis_size(axes[fast])
        pairs = [(i, (i - 1) % devices) for i in range(devices)]
        part = permuted(narrowed(part, state), axes[fast], pairs)
        for i, axis in enumerate(axes):
            part = _all_gather(part, axis, 1 if i == fast else 0)
        return as_invariant(shaped_like(part, state), axes)

    def transfers(self, shape: Shape, topology: Topology) -> Transfers:
        share = rows = -(-shape.rows // topology.devices)
        sizes, back = [link.devices for link in topology.links], []
        for axis, devices in enumerate(sizes):
            for step, sent in reversed(rounds(devices)):
                size, pairs = sent * rows * shape.state, 2 * step == devices
                back.append(Transfer("collective-permute", size, (axis,), 1, step, pairs))
            rows *= devices
        fast = fast_axis(sizes)
        yield from reversed(back)
        yield Transfer("collective-permute", share * shape.state, (fast,), pairs=sizes[fast] == 2)
        yield from back


def rounds(devices: int) -> list[tuple[int, int]]:
    """Distance and number of shares sent in each round: half of the remaining ones."""
    rounds, remaining = [], devices
    while remaining > 1:
        step = -(-remaining // 2)
        rounds.append((step, remaining - step))
        remaining = step
    return rounds


def fast_axis(sizes: Sequence[int]) -> int:
    return max((i for i, size in enumerate(sizes) if size > 1), default=0)


def _rows(state: AttentionState, begin: int, end: int) -> AttentionState:
    return jax.tree.map(lambda x: x[begin:end], state)


def _concatenated(*states: AttentionState) -> AttentionState:
    return jax.tree.map(lambda *x: jnp.concatenate(x), *states)


def _reduce_scatter(state: AttentionState, axis: str) -> AttentionState:
    devices, rank = lax.axis_size(axis), lax.axis_index(axis)

    def shares(x: Array) -> Array:
        # share i belongs to the device i ranks further
        return jnp.roll(x.reshape(devices, x.shape[0] // devices, *x.shape[1:]), -rank, axis=0)

    state = jax.tree.map(shares, state)
    for step, sent in rounds(devices):
        pairs = [(i, (i + step) % devices) for i in range(devices)]
        arrived = permuted(_rows(state, step, step + sent), axis, pairs)
        state = _concatenated(merge(arrived, _rows(state, 0, sent)), _rows(state, sent, step))
    return jax.tree.map(lambda x: x[0], state)


def _all_gather(state: AttentionState, axis: str, offset: int) -> AttentionState:
    """The shares of all devices in order, where each starts with the share of the device `offset` ranks further."""
    # the rounds of `_reduce_scatter` in reverse
    devices, rank = lax.axis_size(axis), lax.axis_index(axis)
    state = jax.tree.map(lambda x: x[None], state)
    for step, sent in reversed(rounds(devices)):
        pairs = [(i, (i - step) % devices) for i in range(devices)]
        state = _concatenated(state, permuted(_rows(state, 0, sent), axis, pairs))

    def ordered(x: Array) -> Array:
        return jnp.roll(x, rank + offset, axis=0).reshape(devices * x.shape[1], *x.shape[2:])

    return jax.tree.map(ordered, state)


# Type checkers need a literal; a test compares it with the list below.
MergeName = Literal["allreduce", "gather", "butterfly", "hierarchical", "halving", "ring"]
MergeOption = MergeName | Literal["auto"]

_LISTED = (
    AllreduceMerge(),
    GatherMerge(),
    ButterflyMerge(),
    HierarchicalMerge(),
    HalvingMerge(),
    RingMerge(),
)
STRATEGIES: dict[str, AbstractMerge] = {strategy.name: strategy for strategy in _LISTED}
MERGES = tuple(STRATEGIES)
# The other strategies sum terms about a common mean, which no device has before the sum.
COVARIANCE_MERGES = tuple(x.name for x in _LISTED if isinstance(x, AbstractMessageMerge))


def check_merge(merge: str, axes: int) -> None:
    checks.check_choice("merge", merge, (*MERGES, "auto"))
    least = 1 if merge == "auto" else STRATEGIES[merge].least_axes
    if axes < least:
        number = {2: "two"}.get(least, str(least))
        raise ValueError(
            f"merge: wanted {number} or more mesh axes for {merge!r}, slow ones first, "
            f"got {'one' if axes == 1 else axes}"
        )


def automatic_merges(axes: int) -> tuple[str, ...]:
    return tuple(x.name for x in _LISTED if x.automatic and x.least_axes <= axes)


def fastest_merge(shape: Shape, topology: Topology) -> str:
    """The strategy that folds states in the least time by the model, for `merge="auto"`."""
    merges = automatic_merges(len(topology.links))
    if topology.devices == 1:
        return merges[0]

    def time(merge: str) -> float:
        return total_seconds(STRATEGIES[merge].transfers(shape, topology), topology)

    return min(merges, key=time)
