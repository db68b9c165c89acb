"""The abstract classes of a sharding method and of a key schedule, and the types that they share."""

import abc
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, Operands, Settings
from energy_attn.kernels.internal import CallPolicy, additions, blockwise, out_dtype

from ..cost._network import Derivatives, Topology, Transfers
from ..cost._shape import Shape, key_copies, local_rows
from ..merge._abstract import Axes, joined, moved

Arrays = TypeVar("Arrays")
Axis = TypeVar("Axis")

ALL = slice(None)
# For the keys of each device from a first to a last one, exclusive: the number of visible pairs of queries on device
# (or group of devices that exchange heads) i and keys on j, `[devices, devices]`.
SeenPairs = Callable[[int, int], np.ndarray]


class LocalCall(NamedTuple):
    """A call on one device, inside `jax.shard_map`.

    Attributes:
        policy: which kernels compute it.
        settings: the static options.
        operands: the arrays of this device, split as by `AbstractMethod.split`.
        axes: the mesh axes over which the sequence is sharded.
        queries_sharded: whether queries are sharded, or replicated.
        others: the mesh axes over which batch and heads are sharded; the operands' indices name this device's own.
    """

    policy: CallPolicy
    settings: Settings
    operands: Operands
    axes: Axes
    queries_sharded: bool
    others: Axes = ()


class Split(NamedTuple):
    """The mesh axes of the sequence over which bias, mask, positions and segments are sharded."""

    heads: Axes  # of bias and mask, in addition to the axes that shard all heads
    queries: Axes  # of bias and mask
    keys: Axes  # of bias and mask, and of the positions and segments of keys
    rows: Axes  # of the positions and segments of queries


class AbstractMethod(abc.ABC):
    """How devices that share a sequence attend to all of its keys; a frozen dataclass.

    A method of the library is one class, in the list of `methods/_parallel.py`.

    Attributes:
        name: its name in `method=`.
        is_option: whether `method=` takes the name.
        replicated_queries: whether queries may be replicated; if not, they are sharded.
        whole_sequences: whether each device attends to whole sequences, so that causal work is balanced.
        reads_positions: whether it reads the positions of all tokens, even where mask and score do not.
        receive_buffers: the number of successive equal transfers that arrive in separate buffers.
        takes_halo: whether `HaloExchange` may replace it where queries see few keys of other devices.

    Examples:
        >>> from energy_attn.distributed import SequenceParallel, methods
        >>> ring = methods.Ring(rotate="keys")
        >>> SequenceParallel("device", method=ring).method.name
        'ring'
    """

    name: ClassVar[str]
    is_option: ClassVar[bool] = True
    replicated_queries: ClassVar[bool] = False
    whole_sequences: ClassVar[bool] = False
    reads_positions: ClassVar[bool] = False
    receive_buffers: ClassVar[int] = 2
    takes_halo: ClassVar[bool] = False

    @abc.abstractmethod
    def attend(self, call: LocalCall) -> AttentionState:
        """Computes the state of this device's queries. Raises as kernels do."""

    @abc.abstractmethod
    def transfers(self, shape: Shape, topology: Topology, derivatives: Derivatives) -> Transfers:
        """The collectives of `attend` over several devices, in the order in which they run."""

    @classmethod
    def variants(cls) -> Mapping[str | None, "AbstractMethod"]:
        """The methods of this class by their `merge` in the cost model."""
        return {None: cls()}

    @property
    def is_automatic(self) -> bool:
        """Whether `method="auto"` considers it."""
        return self.is_option

    @property
    def sends_gradient(self) -> bool:
        """Whether `transfers` predicts the gradients with respect to query, key and value."""
        return True

    @property
    def overlap(self) -> Literal["none", "hops", "pieces"]:
        """The transfers that overlap products: none, hops around a ring, or gathered pieces."""
        return "none"

    def pairs(self, seen: SeenPairs, size: int) -> list[np.ndarray]:
        """The number of pairs of each device in each step, for `size` keys on each; by default in one step."""
        return [seen(0, size).sum(1)]

    def state_rows(self, shape: Shape, topology: Topology) -> int:
        """The number of states that a device holds, one for each row."""
        return local_rows(shape, topology)

    def split(self, axes: Axes, operands: Operands, queries_sharded: bool) -> Split:
        """The axes over which operands are split; by default the axes of queries, and no axes of keys."""
        del operands, queries_sharded
        return Split(heads=(), queries=axes, keys=(), rows=axes)

    def replaces_kernels(self, operands: Operands) -> bool:
        """Whether it replaces the kernels for these operands even where no sequence is sharded."""
        del operands
        return False

    def exchanged(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """The axes along which heads are exchanged for sequence."""
        del axes
        return ()

    def check_axes(self, axes: Sequence[object]) -> None:
        """Raises `ValueError` for axes that the method cannot use."""
        del axes


def exchanging(method: AbstractMethod, topology: Topology) -> int:
    """The number of devices that exchange heads for sequence; 1 if none do."""
    return math.prod(topology.links[axis].devices for axis in method.exchanged(topology.axes))


def check_heads(method: AbstractMethod, heads: int, kv_heads: int, devices: int) -> None:
    if key_copies(heads, kv_heads, devices) is None:
        raise ValueError(
            f"query: wanted a number of heads that is a multiple of {math.lcm(kv_heads, devices)}, so that "
            f"{devices} devices share them and the {kv_heads} heads of keys for {method.name!r}, got {heads}; "
            "'ring', 'gather' and 'tree' take any"
        )


def rounded(state: AttentionState, operands: Operands, settings: Settings) -> AttentionState:
    return AttentionState(state.out.astype(out_dtype(operands, settings)), state.lse)


def with_all_queries(operands: Operands, axes: Axes) -> Operands:
    tokens = operands.tokens.map_queries(lambda x: joined(x, axes, 1))
    return operands._replace(query=joined(operands.query, axes, 1), tokens=tokens)


def attend_with_sink(
    run: Callable[[Settings, Operands], AttentionState],
    policy: CallPolicy,
    settings: Settings,
    operands: Operands,
) -> AttentionState:
    """Merges the state of `run` with the sink of the call; kernels of reproducible calls fold the sink instead."""
    if operands.sink is None or policy.folds_sinks:
        return run(settings, operands)
    state = run(settings.needing(unrounded=True), operands._replace(sink=None))
    rows = operands.positioned(read=False).tokens.query_positions
    return rounded(additions.with_sink(state, operands.sink, rows), operands, settings)


class Keys(NamedTuple):
    """Keys and values, their directions or their gradients; None for an array that does not move."""

    key: Array | None
    value: Array | None


class Gradients(NamedTuple):
    """Gradients with respect to the keys of a step, and sums so far with respect to the arrays that stay."""

    keys: Keys
    query: Array | None
    bias: Array | None
    score_arrays: tuple[Array | None, ...]


# The backward of one step: `step_fn(keys, so_far, step, in_flight, some)`, with the gradients so far, the transfers
# that overlap the step, and a slice of a shard's keys (ALL by default). Returns the transfers' results, and the
# gradients with respect to these keys, zero for the shard's other keys.
StepFn = Callable[..., tuple[blockwise.InFlight, Gradients]]


class AbstractKeySchedule(abc.ABC):
    """The keys of each step of a loop, and the transfer that brings the next ones; a frozen dataclass, static."""

    axes: Axes  # over which keys are sharded
    size: int  # the number of keys on each device

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """The number of leading steps, whose arrays have one shape."""

    @property
    def trailing(self) -> int:
        """The number of trailing steps, unrolled: their index is static."""
        return 0

    @abc.abstractmethod
    def first(self, shard: Arrays) -> Arrays:
        """The arrays `[B, S, ...]` of step 0, from each device's shard."""

    @abc.abstractmethod
    def advance(self, held: Arrays, shard: Arrays, step: int | Array) -> Arrays:
        """The arrays of the step after this one."""

    @abc.abstractmethod
    def slice_step(self, x: Array, axis: int, step: int | Array) -> Array:
        """The slice of an array of all keys for the keys of a step."""

    @abc.abstractmethod
    def backward(self, run_step: StepFn, shard: Keys) -> Gradients:
        """Sums the gradients of all steps; gradients of keys return to the devices that hold the keys."""


def hop(tree: Arrays, axes: Axes, places: int = 1) -> Arrays:
    """Receives arrays from the device `places` before."""
    devices = lax.axis_size(axes)
    pairs = [(i, (i + places) % devices) for i in range(devices)]
    pass_on = functools.partial(moved, lambda x: lax.ppermute(x, axes, pairs))
    return jax.tree.map(pass_on, tree)


def source_device(step: int | Array, axes: Axes) -> Array:
    """The device whose shard this device holds after `step` hops."""
    return (lax.axis_index(axes) - step) % lax.axis_size(axes)


def gather_tokens(x: Array | None, size: int, axes: Axes) -> Array | None:
    """Positions or segments of all devices, `[B, p size]`, gathered where they are sharded."""
    return x if x is None or x.shape[1] != size else joined(x, axes, 1)


def device_slice(x: Array | None, axis: int, place: Array, size: int) -> Array | None:
    if x is None or x.shape[axis] == 1:
        return x
    return lax.dynamic_slice_in_dim(x, place * size, size, axis)


def pad_zeros(x: Array, axis: int, first: int, size: int) -> Array:
    """Pads an axis with zeros to `size`, with the array at `first`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = first, size - first - x.shape[axis]
    return jnp.pad(x, widths)


def add_trees(a: Arrays, b: Arrays) -> Arrays:
    return jax.tree.map(jnp.add, a, b)
